"""Tests of outrider.process with real processes: a line on stdout, two stages of stopping, a sentence of failure."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.basics import BEHIND_IGNORED_INTERRUPTS, PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
PREAMBLE = """
import asyncio, sys
from outrider import rpc
from outrider.errors import ModelRefused
from outrider.process.run import ProcessSettings, run_service

class Service:
    address = "127.0.0.1:1"
    further_addresses = {"rest": "127.0.0.1:2"}
    async def stop(self, grace_s):
        sys.stderr.write("draining\\n")
        sys.stderr.flush()
        await draining()

async def draining(): pass
async def start(): return Service()
"""
RUN = "\nrun_service('test', lambda _: start(), ProcessSettings(stop_with_stdin='--stop-with-stdin' in sys.argv))\n"

Child = asyncio.subprocess.Process
Spawn = Callable[..., "asyncio.Future[Child]"]


@pytest.fixture
async def spawn() -> AsyncIterator[Spawn]:
    """Starts children with the given script between preamble and run; ends what is left of them."""
    children: list[Child] = []

    async def start(script: str = "", *flags: str, command: tuple[str, ...] = ()) -> Child:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command,
            sys.executable,
            "-c",
            PREAMBLE + script + RUN,
            *flags,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=ROOT,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def until_listening(child: Child) -> dict[str, object]:
    """The line that says that it serves."""
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), PATIENCE_S)
    event: dict[str, object] = json.loads(line)
    return event


async def until_says(child: Child, word: bytes) -> None:
    """Reads its stderr up to a line with a word."""
    assert child.stderr is not None
    while word not in (line := await asyncio.wait_for(child.stderr.readline(), PATIENCE_S)):
        assert line, "the process ended before it said so"


async def ended(child: Child) -> tuple[int | None, str, str]:
    """Exit code and the rest of its output; its stdin stays open until then."""
    assert child.stdout is not None
    assert child.stderr is not None
    out, err, code = await asyncio.wait_for(
        asyncio.gather(child.stdout.read(), child.stderr.read(), child.wait()), PATIENCE_S
    )
    return code, out.decode(), err.decode()


async def test_one_line_says_where_it_listens(spawn: Spawn) -> None:
    """A machine reads stdout; people read stderr."""
    child = await spawn()
    event = await until_listening(child)
    addresses = {"address": "127.0.0.1:1", "rest": "127.0.0.1:2"}
    assert event == {"event": "listening", "service": "test", **addresses, "pid": child.pid}
    child.send_signal(signal.SIGTERM)
    code, out, _ = await ended(child)
    assert (code, out) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains(spawn: Spawn, number: signal.Signals) -> None:
    """And the process then exits with 0."""
    child = await spawn()
    await until_listening(child)
    child.send_signal(number)
    code, _, err = await ended(child)
    assert code == 0
    assert "draining" in err


async def test_an_interrupt_that_was_ignored_stays_so(spawn: Spawn) -> None:
    """As it is where a script starts a service with `&`; SIGTERM is what drains it then."""
    child = await spawn(command=BEHIND_IGNORED_INTERRUPTS)
    await until_listening(child)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    code, _, err = await ended(child)
    assert code == 0
    assert '"reason": "SIGTERM"' in err


async def test_a_service_that_has_stopped_is_gone(spawn: Spawn) -> None:
    """The parent need not wait until the interpreter and what it has loaded are taken apart."""
    child = await spawn("import atexit\natexit.register(sys.stderr.write, 'taken apart')")
    await until_listening(child)
    child.send_signal(signal.SIGTERM)
    code, _, err = await ended(child)
    assert (code, "draining" in err, "taken apart" in err) == (0, True, False)


@pytest.mark.slow
async def test_a_second_signal_exits_at_once(spawn: Spawn) -> None:
    """Whatever the drain is waiting for."""
    child = await spawn("async def draining(): await asyncio.Event().wait()")
    await until_listening(child)
    child.send_signal(signal.SIGTERM)
    await until_says(child, b"draining\n")
    child.send_signal(signal.SIGTERM)
    assert (await ended(child))[0] == 128 + signal.SIGTERM


@pytest.mark.slow
async def test_the_end_of_stdin_drains_when_that_is_wanted(spawn: Spawn) -> None:
    """So a child never outlives its parent; without the flag stdin means nothing."""
    child, other = await spawn("", "--stop-with-stdin"), await spawn()
    for each in (child, other):
        await until_listening(each)
        assert each.stdin is not None
        each.stdin.close()
    code, _, err = await ended(child)
    assert code == 0
    assert "draining" in err
    assert other.returncode is None


@pytest.mark.slow
async def test_a_refusal_is_one_sentence_and_a_code(spawn: Spawn) -> None:
    """The last line on stderr, and the exit code of the error."""
    child = await spawn("async def start(): raise ModelRefused('Mamba cannot be rolled back.')")
    code, out, err = await ended(child)
    assert (code, out) == (78, "")
    assert err.splitlines()[-1] == "Mamba cannot be rolled back."


@pytest.mark.slow
async def test_a_bug_is_logged_and_ends_with_70(spawn: Spawn) -> None:
    """The traceback is in the log, and the last line is a sentence."""
    child = await spawn("async def start(): raise KeyError('oops')")
    code, _, err = await ended(child)
    assert code == 70
    assert "oops" in err
    assert err.splitlines()[-1] == "The test service failed: KeyError."


async def test_a_service_that_cannot_be_drained_exits_at_once(spawn: Spawn) -> None:
    """With one line and the code of its error, although a thread hangs for which the interpreter would wait."""
    script = """
import threading
async def draining():
    threading.Thread(target=threading.Event().wait).start()
    raise ModelRefused("the device hangs")
"""
    child = await spawn(script)
    await until_listening(child)
    child.send_signal(signal.SIGTERM)
    code, _, err = await ended(child)
    assert code == 78
    assert "the device hangs" in err.splitlines()[-1]
    assert "Traceback" not in err


async def test_a_service_that_is_starting_can_be_stopped(spawn: Spawn) -> None:
    """Even while a thread loads something that cannot be interrupted."""
    script = """
import threading
async def start():
    sys.stderr.write("loading\\n")
    sys.stderr.flush()
    await asyncio.to_thread(threading.Event().wait)
"""
    child = await spawn(script)
    await until_says(child, b"loading\n")
    child.send_signal(signal.SIGTERM)
    assert (await ended(child))[0] == 0
