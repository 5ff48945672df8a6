"""Standard streams that cannot be written, with real processes: no writer fails or waits, and losses are reported."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.basics import PATIENCE_S, eventually

ROOT = Path(__file__).resolve().parents[3]
# Ends with the number of lines that were lost.
PREAMBLE = """
import logging, os, sys
import structlog
from outrider.process.options import run_app
from outrider.process.streams import LostLines, unfailing
from outrider.process.telemetry import configure_logs, loss_line

log = structlog.get_logger()

class Odd:
    def __repr__(self): raise RuntimeError("no words")
    __str__ = __repr__

def settle():
    for stream in (sys.stdout, sys.stderr):
        while stream.file._num_bytes:
            stream.file.finish()

def say(count):
    for number in range(count):
        log.info("line", number=number)
        settle()

def main():
    with unfailing(loss_line):
        configure_logs("info")
        work()
        settle()
        [family] = LostLines().collect()
        lost = int(family.samples[0].value)
    sys.exit(lost)
"""
RUN = "\nrun_app(main)\n"


def started(work: str, redirections: str = "", line: str = "") -> "subprocess.Popen[str]":
    """A process that does the work, with its streams as a shell makes them, perhaps after a line of it."""
    command = f'{line} exec "{sys.executable}" -c "$PROGRAM" {redirections}'
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["bash", "-c", command],
        env={**os.environ, "PROGRAM": PREAMBLE + work + RUN, "PYTHONPATH": str(ROOT)},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def ended(work: str, redirections: str = "", line: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of such a process."""
    with started(work, redirections, line) as process:
        output, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirections", "line"),
    [("2>/dev/full", ""), ("2>&3", "exec 3> >(exec 0<&-; exec true); wait $!;"), ("2</dev/null", "")],
)
def test_lines_that_cannot_be_written_are_counted(redirections: str, line: str) -> None:
    """On a full disk, without a reader, and on what cannot be written at all; the writer goes on."""
    code, output, _ = ended("def work():\n    say(5)\n    sys.stdout.write('done')\n", redirections, line)
    assert (code, output) == (5, "done")


def test_whatever_is_written_leaves_in_order() -> None:
    """Nothing, bytes, parts of lines, and what a status line of a terminal leaves."""
    work = """
def work():
    from rich.console import Console
    import typer
    sys.stderr.write("")
    sys.stderr.buffer.write(b"")
    typer.echo("one", err=True)
    with Console(stderr=True).status("Starting"): typer.echo("two", err=True)
    sys.stderr.write("thr"); sys.stderr.write("ee\\n")
    typer.echo(b"four", err=True)
    typer.echo("", err=True, nl=False)
    typer.echo("five", err=True)
"""
    assert ended(work) == (0, "", "one\ntwo\nthree\nfour\nfive\n")


@pytest.mark.slow
def test_an_output_of_a_service_is_no_reason_to_fail_either() -> None:
    """It says where it listens; who does not hear that finds it otherwise."""
    code, _, errors = ended("def work():\n    print('listening')\n    log.info('line')\n", ">/dev/full")
    assert code == 1
    assert [json.loads(line)["event"] for line in errors.splitlines()] == ["line"]


@pytest.mark.slow
def test_closed_streams_are_nobody_else_s() -> None:
    """A file that is opened later gets no number to which libraries write."""
    work = "def work():\n    log.info('line')\n    sys.stdout.write(str(os.open(os.devnull, os.O_RDONLY) > 2))\n"
    assert ended(work, "2>&- <&-") == (0, "True", "")


@pytest.mark.slow
def test_nobody_waits_for_a_reader() -> None:
    """A pipe that is full holds up its writer's thread alone; what has no room is lost, and that is reported later."""
    work = """
def work():
    for number in range(4000):
        log.info("line", number=number, padding="x" * 1000)
    sys.stdout.write("done\\n")
    sys.stdout.file.finish()
    sys.stdin.read()
"""
    with started(work) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        _, errors = process.communicate(timeout=PATIENCE_S)
    lines = [json.loads(line) for line in errors.splitlines()]
    told = [line for line in lines if line["event"] == "log lines lost"]
    assert {line["reason"] for line in told} == {"nobody read what was written before"}
    said = [line["number"] for line in lines if line["event"] == "line"]
    assert said == sorted(set(said))
    assert sum(line["lines"] for line in told) == 4000 - len(said) > 0


@pytest.mark.slow
async def test_what_was_lost_is_said_when_there_is_room_again(tmp_path: Path) -> None:
    """Without another line having to come, and on a line of its own after one that was torn."""
    log, say = tmp_path / "log", "def work():\n    for line in sys.stdin: say(int(line)); print('said', flush=True)\n"
    with started(say, f"2>>{log}", "ulimit -S -f 1;") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("30\n")
        process.stdin.flush()
        assert process.stdout.readline() == "said\n"
        assert log.stat().st_size == 1024
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await eventually(lambda: "log lines lost" in log.read_text())
        process.stdin.write("1\n")
        process.communicate(timeout=PATIENCE_S)
    *before, torn, told, last = log.read_text().splitlines()
    assert not torn.endswith("}")
    assert [json.loads(line)["number"] for line in before] == [*range(len(before))]
    assert json.loads(told)["lines"] == 30 - len(before) == process.returncode
    assert json.loads(told)["reason"] == "File too large"
    assert json.loads(last)["number"] == 0


def test_no_value_of_a_line_is_a_fault() -> None:
    """What cannot be shown is named by its type; the other values of its line are there."""
    work = """
def work():
    log.info("odd", value=Odd(), other=1)
    round = []; round.append(round)
    log.info("round", value=round, other=2)
    log.info("key", value={(1, 2): 3}, other=3)
    log.info("text", value="\\udcff", other=4)
    try: raise ValueError(Odd())
    except ValueError: log.exception("raised", value=Odd(), other=5)
    logging.getLogger("library").error("%s", Odd())
    logging.getLogger("library").error("%d", "no number")
"""
    code, _, errors = ended(work)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert code == 0
    assert [line["event"] for line in lines[:5]] == ["odd", "round", "key", "text", "raised"]
    assert [line["other"] for line in lines[:5]] == [1, 2, 3, 4, 5]
    assert lines[0]["value"] == "a Odd that cannot be shown: RuntimeError"
    assert lines[3]["value"] == "\udcff"
    told = [(line["event"], line["logger"], line["reason"]) for line in lines[5:]]
    assert told == [("a line of a library cannot be shown", "library", kind) for kind in ("RuntimeError", "TypeError")]


@pytest.mark.slow
@pytest.mark.parametrize("error", ["KeyError('oops')", "OutriderError('It cannot be.')"])
def test_an_end_that_cannot_be_told_has_its_code(error: str) -> None:
    """The last sentence of a command has nowhere to go, and the code is that of its error all the same."""
    work = f"from outrider.errors import OutriderError\ndef work(): raise {error}\n"
    assert ended(work, "2>/dev/full")[0] == 70
