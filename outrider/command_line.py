"""What all command lines have in common: ranges of options, and how a refusal ends the process. Knows no command."""

import math
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

import typer

from outrider.errors import InvalidRequest, OutriderError
from outrider.parser_errors import ParserError, parser_sentence
from outrider.standard_streams import checked_streams, is_lost_output

USAGE_EXIT_CODE = 64
# What the parser exits with on wrong usage; every other error here has a code of sysexits.h.
PARSER_EXIT_CODE = 2

Number = int | float | None


def between(least: float, most: float = math.inf) -> Callable[[typer.CallbackParam, Number], Number]:
    """A callback of an option that raises InvalidRequest outside [least, most].

    typer has ranges of its own, but what it says about them does not name the value.
    """
    limit = f"in [{least}, {most}]" if most < math.inf else f"at least {least}"

    def check(param: typer.CallbackParam, value: Number) -> Number:
        # Not "outside", so that NaN is refused too.
        if value is not None and not least <= value <= most:
            raise InvalidRequest(param.opts[0], value, limit)
        return value

    return check


def above(least: float) -> Callable[[typer.CallbackParam, Number], Number]:
    """A callback of an option that raises InvalidRequest unless the value is more than `least` and finite."""

    def check(param: typer.CallbackParam, value: Number) -> Number:
        if value is not None and not least < value < math.inf:
            raise InvalidRequest(param.opts[0], value, f"more than {least}, and finite")
        return value

    return check


def refuse_together(option: str, value: object, others: Mapping[str, object]) -> None:
    """Raises InvalidRequest when an option is given with one that has no effect beside it; None means not given."""
    other = next((name for name, given in others.items() if given is not None), None)
    if value is not None and other is not None:
        raise InvalidRequest(other, str(others[other]), f"left out with {option}, where it has no effect")


def service_app() -> typer.Typer:
    """An empty command line of a service, whose help is plain text."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def run_app(app: Callable[[], object], prefix: str = "") -> NoReturn:
    """Runs a command line to its end; an error becomes one sentence, behind the prefix, and its exit code.

    What is neither wrong usage nor an OutriderError nor a lost output is told with its traceback, and exits with 70.
    """
    with checked_streams(prefix):
        code = _exit_code(app, prefix)
    sys.exit(code)


def _exit_code(app: Callable[[], object], prefix: str) -> int:
    try:
        # The parser's own way to tell an error is a box of several lines.
        ended = app(standalone_mode=False) if isinstance(app, typer.Typer) else app()
    except OutriderError as error:
        return _told(prefix + error.message, error.exit_code)
    except SystemExit as ending:
        if ending.code != PARSER_EXIT_CODE:
            raise
        return USAGE_EXIT_CODE
    except Exception as error:
        if isinstance(error, ParserError):
            return _told(prefix + parser_sentence(error), USAGE_EXIT_CODE)
        if is_lost_output(error):
            raise
        traceback.print_exc()
        return _told(f"{prefix}An internal fault; report it with the lines above.", OutriderError.exit_code)
    # An exit that a command asked for comes back as its code.
    return ended if isinstance(ended, int) else 0


def _told(sentence: str, code: int) -> int:
    sys.stderr.write(f"{sentence}\n")
    return code
