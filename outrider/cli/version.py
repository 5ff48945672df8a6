"""`outrider version`: what is installed, without importing any of it."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import typer

SHOWN = ("outrider", "torch", "grpcio", "protobuf", "tokenizers", "fastapi", "uvicorn")


def installed_versions() -> dict[str, str | None]:
    """Versions of Outrider, of Python, and of what computes and carries; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in SHOWN:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {"outrider": found.pop("outrider"), "python": platform.python_version(), **found}


def tell(*, as_json: bool) -> None:
    """Prints our version alone, or as JSON with those of Python and of what computes and carries."""
    installed = installed_versions()
    ours = installed.pop("outrider") or "unknown"
    told = json.dumps({"version": ours, **installed}) if as_json else f"outrider {ours}"
    sys.stdout.write(f"{told}\n")


def eager(wanted: bool) -> None:
    """The callback of --version: tells and ends."""
    if wanted:
        tell(as_json=False)
        raise typer.Exit
