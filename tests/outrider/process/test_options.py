"""Settings and groups become options, and command lines end with sentences and exit codes."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.errors import CacheFull, InvalidRequest
from outrider.process.options import (
    ParserError,
    Setting,
    above,
    addresses,
    between,
    check_settings,
    grouped,
    options_of,
    parser_sentence,
    refuse_together,
    run_app,
    service_app,
    within,
    words_of,
)

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Settings of every process."""

    patience: Annotated[float, Setting("How long to wait.", within(0))] = 1.0

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Own(Common):
    """Settings of one."""

    peer: Annotated[str, Setting("Who is asked.", addresses(several=True))]
    max_places: Annotated[int | None, Setting("Places.", within(1, 9), default="all")] = None
    deaf: Annotated[bool, Setting("Hears nothing.")] = False
    eager: Annotated[bool, Setting("Begins at once.")] = True
    inner: int = 7


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("--peer a:1", {}, Own("a:1")),
        ("--peer a:1,b:2 --deaf --no-eager", {}, Own("a:1,b:2", deaf=True, eager=False)),
        ("", {"OUTRIDER_PEER": "a:1", "OUTRIDER_MAX_PLACES": "3"}, Own("a:1", 3)),
        ("--max-places 4", {"OUTRIDER_PEER": "a:1", "OUTRIDER_MAX_PLACES": "3"}, Own("a:1", 4)),
        ("--peer a:1 --patience 2", {"OUTRIDER_EAGER": "0"}, Own("a:1", eager=False, patience=2.0)),
    ],
)
def test_settings_come_from_flags_and_variables(words: str, variables: dict[str, str], expected: Own) -> None:
    """Called as the fields are, the flag wins, a field that says nothing is no option; settings name their flags."""
    seen: list[Own] = []

    def serve(*, settings: Own) -> None:
        seen.append(settings)

    app = service_app()
    app.command()(grouped(serve))
    assert CliRunner().invoke(app, words.split(), env=variables).exit_code == 0
    assert CliRunner().invoke(app, words_of(expected)).exit_code == 0
    assert seen == [expected] * 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"patience": -1}, "--patience is -1, but must be at least 0"),
        ({"max_places": 10}, r"--max-places is 10, but must be in \[1, 9\]"),
        ({"peer": "a:1,b"}, "peer is 'b', but must be HOST:PORT"),
    ],
)
def test_settings_outside_their_limits_do_not_exist(changes: dict[str, Any], sentence: str) -> None:
    """Whatever code makes them."""
    with pytest.raises(InvalidRequest, match=sentence):
        replace(Own("a:1"), **changes)


def ended(app: typer.Typer, *words: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as exit_request:
        run_app(app, prefix="program: ")
    return exit_request.value.code


@dataclass(frozen=True)
class Limits:
    """Settings with limits."""

    limit: Annotated[float, Setting("Whatever.", above(0))] = 1.0

    def __post_init__(self) -> None:
        check_settings(self)


def numbers_app() -> typer.Typer:
    """Takes --count from 1 to 4, --seconds from 0 and --limit above 0, and runs out of memory for 4."""
    app = service_app()

    @app.command()
    @grouped
    def command(
        count: Annotated[int | None, typer.Option(callback=between(1, 4))] = None,
        seconds: Annotated[float, typer.Option(callback=between(0))] = 0.0,
        *,
        limits: Limits,
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


@dataclass(frozen=True)
class Size:
    """A group of two options."""

    max_width: Annotated[int | None, typer.Option(metavar="N")] = None
    tall: Annotated[bool, typer.Option("--tall")] = False


def command_with(seen: list[object]) -> typer.Typer:
    """A command that keeps what it is called with."""
    app = typer.Typer()

    @app.command()
    @grouped
    def show(name: str, *, size: Size, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        """Shows its arguments."""
        seen.extend((name, size, loud))

    return app


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a", ["a", Size(), False]),
        ("a --max-width 3 --tall --loud", ["a", Size(max_width=3, tall=True), True]),
        ("--loud a --tall", ["a", Size(tall=True), True]),
    ],
)
def test_fields_are_options(words: str, expected: list[object]) -> None:
    """Each group is made of its own options, the other parameters are as ever."""
    seen: list[object] = []
    assert CliRunner().invoke(command_with(seen), words.split()).exit_code == 0
    assert seen == expected


def test_an_option_of_a_group_is_checked_like_any_other() -> None:
    """By its type."""
    seen: list[object] = []
    assert CliRunner().invoke(command_with(seen), ["a", "--max-width", "wide"]).exit_code == 2
    assert seen == []


def test_two_options_of_one_name_are_found_at_once() -> None:
    """When the command is declared, not when it is called."""

    def twice(*, size: Size, tall: bool = False) -> None:
        """Has the option --tall twice."""

    with pytest.raises(ValueError, match="duplicate parameter name: 'tall'"):
        grouped(twice)


def test_fields_by_the_names_of_their_options() -> None:
    """All of them, or those that are named."""
    assert options_of(Size(tall=True)) == {"--max-width": None, "--tall": True}
    assert options_of(Size(max_width=3), "max_width") == {"--max-width": 3}


@dataclass
class Context:
    """Where a parser was."""

    command_path: str


@dataclass
class Told:
    """An error that a parser might raise."""

    message: str
    ctx: Context | None = None
    exit_code: int = 2

    def format_message(self) -> str:
        """Sentence as it was given."""
        return self.message


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("", "No command is given."),
        ("No such option: --a", "No such option: --a."),
        ("Missing argument 'A'.\n Choose from:\n\ta,\n\tb", "Missing argument 'A'. Choose from: a, b."),
        ("Invalid value for '--a': Value error, 'x' is no a.", "Invalid value for '--a': 'x' is no a."),
        ("Invalid value for '--a': Input should be a number", "Invalid value for '--a': it must be a number."),
        ("No such command 'a\x1b[31m\udcff'.", "No such command 'a\\x1b[31m\\udcff'."),
    ],
)
def test_one_line_that_ends_with_the_fix(message: str, sentence: str) -> None:
    """Without what a library says to programmers, and without characters that would drive a terminal."""
    assert parser_sentence(Told(message, Context("outrider up"))) == f"{sentence} See `outrider up --help`."


def test_an_error_without_a_place_ends_with_a_fix_too() -> None:
    """Some of the parser's errors do not know in which command they came."""
    assert parser_sentence(Told("Wrong.")).endswith("--help says behind the same command.")


def test_errors_of_the_parser_are_known_by_their_shape() -> None:
    """Those of typer are, other errors are not."""
    assert isinstance(typer.BadParameter("x"), ParserError)
    assert not isinstance(typer.Exit(2), ParserError)
    assert not isinstance(ValueError("x"), ParserError)


PROGRAM = """
import sys, typer
from outrider.process.options import run_app, service_app
app = service_app()

@app.command()
def say(words: str = "", rich: bool = False):
    "Says what there is to say."
    if rich:
        from rich.console import Console
        Console().print("words")
    if words:
        sys.stdout.write(words)

run_app(app, prefix="program: ")
"""


def shell(line: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a line in which `program` is the command."""
    script = f'program() {{ "{sys.executable}" -c "$PROGRAM" "$@"; }}; {line}'
    ended = subprocess.run(
        ["bash", "-c", script],
        env={"PROGRAM": PROGRAM, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("words", ["--words Hi", "--help", "--wrong"])
def test_without_an_output_nothing_starts(words: str) -> None:
    """One sentence and 74, whatever was asked for."""
    code, _, notes = shell(f"program {words} >&-")
    [line] = notes.splitlines()
    assert code == 74
    assert line.startswith("program: There is no standard output to write to; ")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--words Hi", "--help", "--rich"])
def test_a_full_output_is_told_in_one_sentence(words: str) -> None:
    """Also where the output is so short that it fails at the very end, and for help."""
    code, _, notes = shell(f"program {words} >/dev/full")
    [line] = notes.splitlines()
    assert code == 74
    assert line.startswith("program: The output cannot be written: ")


@pytest.mark.parametrize("words", ["--words Hi", "--help", "--rich"])
def test_an_output_without_a_reader_is_141(words: str) -> None:
    """There is no reader, so nothing is said."""
    # The reader has ended before the program begins: it cannot do so while the other side holds its pipe.
    line = f"exec 3> >(exec 0<&-; exec true); wait $!; program {words} >&3"
    assert shell(line) == (141, "", "")
