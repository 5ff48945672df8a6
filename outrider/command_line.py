"""What all command lines have in common: ranges of options, and how a refusal ends the process. Knows no command."""

import math
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

import typer

from outrider.errors import InvalidRequest, OutriderError

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
    """An empty command line of a service. Its last line on stderr is read as a sentence, so errors get no boxes."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def run_app(app: Callable[[], object], prefix: str = "") -> NoReturn:
    """Runs a command line to its end; an OutriderError becomes its sentence, behind the prefix, and its exit code.

    Any other error is told with its traceback, and exits with 70.
    """
    try:
        app()
    except OutriderError as error:
        sys.stderr.write(f"{prefix}{error.message}\n")
        sys.exit(error.exit_code)
    except SystemExit as ending:
        sys.exit(USAGE_EXIT_CODE if ending.code == PARSER_EXIT_CODE else ending.code)
    except Exception:  # noqa: BLE001 - told whole, and the code says that it is a fault of ours
        traceback.print_exc()
        sys.stderr.write(f"{prefix}An internal fault; report it with the lines above.\n")
        sys.exit(OutriderError.exit_code)
    sys.exit(0)
