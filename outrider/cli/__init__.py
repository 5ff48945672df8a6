"""The command `outrider`, which never imports torch."""

from outrider.process.imports import uncollected

with uncollected():
    from outrider.cli.app import app
    from outrider.process.options import run_app


def main() -> None:
    """Entry point of the console script. Exit codes are those of sysexits.h; 130 and 143 stand for a signal."""
    run_app(app, prefix="outrider: ")
