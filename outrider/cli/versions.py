"""The versions that an answer depends on."""

import platform
from importlib.metadata import PackageNotFoundError, version


def installed_versions() -> dict[str, str | None]:
    """Versions of Outrider, of Python, and of what computes and carries; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in ("outrider", "torch", "grpcio", "protobuf", "tokenizers", "fastapi", "uvicorn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {"outrider": found.pop("outrider"), "python": platform.python_version(), **found}
