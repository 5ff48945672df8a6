"""The command `outrider`. Never imports torch, and knows nothing about tokens, sessions or rounds but their figures."""

import sys

from outrider.cli.app import app

USAGE_EXIT_CODE = 64


def main() -> None:
    """Entry point of the console script. Exit codes are those of sysexits.h; 130 and 143 tell of a signal."""
    try:
        app()
    except SystemExit as exit_request:
        # The parser ends with 2 on wrong usage; every other error here has a code of sysexits.h, where that is 64.
        sys.exit(USAGE_EXIT_CODE if exit_request.code == 2 else exit_request.code)
