"""How command lines end: sentences and exit codes of wrong usage."""

import sys
from typing import Annotated

import pytest
import typer

from outrider.errors import CacheFull, InvalidRequest
from outrider.process.options import above, between, refuse_together, run_app, service_app


def ended(app: typer.Typer, *words: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as exit_request:
        run_app(app, prefix="program: ")
    return exit_request.value.code


def numbers_app() -> typer.Typer:
    """Takes --count from 1 to 4, --seconds from 0 and --limit above 0, and runs out of memory for 4."""
    app = service_app()

    @app.command()
    def command(
        count: Annotated[int | None, typer.Option(callback=between(1, 4))] = None,
        seconds: Annotated[float, typer.Option(callback=between(0))] = 0.0,
        limit: Annotated[float, typer.Option(callback=above(0))] = 1.0,
    ) -> None:
        if count == 4:
            raise CacheFull("no block is free")

    return app


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 0, ""),
        (["--count", "1", "--seconds", "inf"], 0, ""),
        (["--count", "0"], 64, "program: --count is 0, but must be in [1, 4]\n"),
        (["--count", "5"], 64, "program: --count is 5, but must be in [1, 4]\n"),
        (["--seconds", "-0.5"], 64, "program: --seconds is -0.5, but must be at least 0\n"),
        (["--seconds", "nan"], 64, "program: --seconds is nan, but must be at least 0\n"),
        (["--limit", "0"], 64, "program: --limit is 0.0, but must be more than 0, and finite\n"),
        (["--limit", "nan"], 64, "program: --limit is nan, but must be more than 0, and finite\n"),
        (["--limit", "inf"], 64, "program: --limit is inf, but must be more than 0, and finite\n"),
        (["--limit", "0.001"], 0, ""),
        (["--count", "4"], 75, "program: no block is free\n"),
    ],
)
def test_ranges_and_codes(
    words: list[str], code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value out of range is named with its option and limit; an error ends with its own code."""
    assert ended(numbers_app(), *words, monkeypatch=monkeypatch) == code
    assert capsys.readouterr().err == sentence


def test_the_parsers_own_errors_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They exit 64 as all wrong usage does, and end with where to look."""
    assert ended(numbers_app(), "--county", "1", monkeypatch=monkeypatch) == 64
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("program: No such option: --county")
    assert line.endswith(" --help`.")
    assert line.isascii()


def test_an_exit_that_a_command_asks_for_is_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal's, which is none of sysexits.h."""
    app = service_app()

    @app.command()
    def command() -> None:
        raise typer.Exit(130)

    assert ended(app, monkeypatch=monkeypatch) == 130


def test_options_that_exclude_each_other() -> None:
    """Both are named; an option that was not given is no conflict."""
    refuse_together("--plain", None, {"--draft": "x"})
    refuse_together("--plain", True, {"--draft": None})
    with pytest.raises(InvalidRequest, match="--draft is 'x', but must be left out with --plain"):
        refuse_together("--plain", True, {"--count": None, "--draft": "x"})
