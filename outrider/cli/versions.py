"""The versions that an answer depends on."""

import platform
from importlib.metadata import PackageNotFoundError, version

import outrider


def installed_versions() -> dict[str, str | None]:
    """Versions of Outrider, of Python, and of what computes and carries; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in ("torch", "grpcio", "protobuf", "tokenizers", "fastapi", "uvicorn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {"outrider": outrider.__version__, "python": platform.python_version(), **found}
