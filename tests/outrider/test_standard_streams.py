"""Command lines whose standard streams are closed, full or without a reader, as processes of a shell."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys, typer
from outrider.process.options import run_app, service_app
app = service_app()

@app.command()
def say(words: str = "", ask: bool = False, rich: bool = False, errors: bool = False):
    "Says what there is to say."
    if rich:
        from rich.console import Console
        Console().print("words")
    if ask:
        words = repr(sys.stdin.read() + sys.stdin.buffer.read().decode())
    if errors:
        sys.stderr.write("unheard")
        words = str(os.open(os.devnull, os.O_RDONLY) > 2)
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


@pytest.mark.parametrize("words", ["--words Hi", "--help", "--rich"])
def test_a_full_output_is_told_in_one_sentence(words: str) -> None:
    """Also where the output is so short that it fails at the very end, and for help."""
    code, _, notes = shell(f"program {words} >/dev/full")
    [line] = notes.splitlines()
    assert code == 74
    assert line.startswith("program: The output cannot be written: ")


@pytest.mark.parametrize("words", ["--words Hi", "--help", "--rich"])
def test_an_output_without_a_reader_is_141(words: str) -> None:
    """Nobody is there to be told, so nothing is said."""
    # The reader has ended before the program begins: it cannot do so while the other side holds its pipe.
    line = f"exec 3> >(exec 0<&-; exec true); wait $!; program {words} >&3"
    assert shell(line) == (141, "", "")


def test_a_closed_input_reads_as_empty() -> None:
    """As text and as bytes."""
    assert shell("program --ask <&-") == (0, "''", "")


def test_a_closed_error_stream_is_no_fault() -> None:
    """What would be said there is lost, and no file that is opened later takes its place."""
    assert shell("program --errors 2>&-") == (0, "True", "")
