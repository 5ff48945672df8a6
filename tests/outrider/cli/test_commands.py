"""All commands at once: help that can be read, exit codes of sysexits.h, completion, and docs/cli.md about them."""

import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

import bench
import draft_service
import gateway
import outrider
import target_service
from outrider.cli import app as commands
from outrider.cli import main
from outrider.errors import OutriderError
from outrider.standard_streams import IO_EXIT_CODE

DOCS = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
PACKAGES = (outrider, gateway, draft_service, target_service, bench)
# Programs that read their command line when they are imported, and what is loaded by name alone.
APART = re.compile(r".*(__main__|\.hf_models(\..*)?|\._native\w*)$")


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its words; groups have commands of their own."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from walk(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(walk(typer.main.get_command(commands)))
EACH = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, without colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


def outcome(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a command line, run in this process."""
    monkeypatch.setattr(sys, "argv", ["outrider", *words])
    # Else the program would be called after pytest, which is a package that is run.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    with pytest.raises(SystemExit) as ending:
        main()
    assert isinstance(ending.value.code, int)
    return ending.value.code


def test_the_commands_are_these() -> None:
    """A command that goes missing here goes missing in the docs."""
    assert {("up",), ("generate",), ("doctor",), ("version",), ("bench", "rounds"), ("bench", "serve")} <= set(COMMANDS)


@EACH
def test_help_fits_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Nothing is cut off, and every option has words of its own."""
    assert outcome(monkeypatch, *words, "--help") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@EACH
def test_every_option_is_explained(words: tuple[str, ...]) -> None:
    """One sentence at least, which begins with a capital or the name of what it is about, and ends with a stop."""
    command = COMMANDS[words]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
        assert str(getattr(parameter, "help", "")).rstrip().endswith((".", "]")), parameter.name


@EACH
def test_wrong_usage_is_64_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """The parser's own 2 is none of sysexits.h."""
    assert outcome(monkeypatch, *words, "--no-such-option") == 64
    assert "--no-such-option" in capsys.readouterr().err


@EACH
def test_every_command_has_json_and_a_line_in_the_docs(words: tuple[str, ...]) -> None:
    """In the table of docs/cli.md."""
    assert any("--json" in parameter.opts for parameter in COMMANDS[words].params)
    assert re.search(rf"^\| `outrider {' '.join(words)}( [A-Z]+)?` \|.*--json", DOCS, re.MULTILINE)


def test_the_docs_name_no_command_that_there_is_not() -> None:
    """Every row of the table is one of the commands."""
    named = re.findall(r"^\| `outrider ([a-z ]+?)(?: [A-Z]+)?` \|", DOCS, re.MULTILINE)
    assert {tuple(name.split()) for name in named} == set(COMMANDS)


def errors(base: type[OutriderError]) -> Iterator[type[OutriderError]]:
    """A class and all below it."""
    yield base
    for each in base.__subclasses__():
        yield from errors(each)


def test_every_error_has_an_exit_code_of_the_table() -> None:
    """Of all classes in all packages; and the table has none that nothing ends with."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not APART.fullmatch(module.name):
                importlib.import_module(module.name)
    ours = {each for each in errors(OutriderError) if each.__module__.split(".")[0] in {p.__name__ for p in PACKAGES}}
    documented = {int(code) for row in re.findall(r"^\| ([0-9, ]+) \|", DOCS, re.MULTILINE) for code in row.split(",")}
    assert {each.exit_code for each in ours} | {IO_EXIT_CODE} == {code for code in documented if 64 <= code <= 78}
    assert len(ours) > 15


def test_a_fault_of_ours_is_70_and_told_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its traceback, which a report needs."""

    def broken(*, as_json: bool) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(sys.modules["outrider.cli.app"], "tell", broken)
    assert outcome(monkeypatch, "version") == 70
    notes = capsys.readouterr().err
    assert "ZeroDivisionError: planted" in notes
    assert notes.rstrip().splitlines()[-1].startswith("outrider: An internal fault")


def test_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The option and the command say the same; JSON has more."""
    for words in (["--version"], ["version"]):
        assert outcome(monkeypatch, *words) == 0
        assert capsys.readouterr().out == f"outrider {version('outrider')}\n"
    assert outcome(monkeypatch, "version", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == version("outrider")
    assert {"python", "grpcio", "protobuf"} <= set(told)


@pytest.mark.parametrize(
    ("shell", "mark"), [("bash", "complete -o"), ("zsh", "#compdef outrider"), ("fish", "complete ")]
)
def test_completion_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, mark: str
) -> None:
    """What --show-completion prints in each shell."""
    monkeypatch.setenv("_OUTRIDER_COMPLETE", f"source_{shell}")
    assert outcome(monkeypatch) == 0
    script = capsys.readouterr().out
    assert mark in script
    assert "_OUTRIDER_COMPLETE" in script


@pytest.mark.parametrize(
    ("shell", "line", "wanted"),
    [
        ("bash", "outrider do", "doctor"),
        ("zsh", "outrider bench se", "serve"),
        ("fish", "outrider up --draft-d", "--draft-dtype"),
        ("bash", "outrider generate Hi --rule le", "lenient"),
    ],
)
def test_words_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, line: str, wanted: str
) -> None:
    """Commands, options, and the values of choices."""
    monkeypatch.setenv("_OUTRIDER_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert outcome(monkeypatch) == 0
    assert wanted in capsys.readouterr().out
