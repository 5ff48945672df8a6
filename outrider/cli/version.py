"""`outrider version`: what is installed, without importing any of it."""

import json
import sys

import typer

from outrider.cli.doctor import versions


def tell(*, as_json: bool) -> None:
    """Prints our version alone, or as JSON with those of Python and of what computes and carries."""
    installed = versions.gather()
    ours = installed.versions.get(versions.OURS) or "unknown"
    if as_json:
        others = {name: installed.versions.get(name) for name in versions.SHOWN if name != versions.OURS}
        told = json.dumps({"version": ours, "python": installed.python, **others})
    else:
        told = f"outrider {ours}"
    sys.stdout.write(f"{told}\n")


def eager(wanted: bool) -> None:
    """The callback of --version: tells and ends."""
    if wanted:
        tell(as_json=False)
        raise typer.Exit
