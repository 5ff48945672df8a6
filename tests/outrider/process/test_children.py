"""The supervisor against real child processes: small scripts that serve or do not."""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.basics import freeze

from outrider.process.children import (
    Change,
    Launch,
    RestartPolicy,
    ServiceFailed,
    ServiceProcess,
    State,
    Supervisor,
    free_port,
    misses,
)

# Serves where its arguments say until its stdin ends.
SERVES = """
import concurrent.futures, os, signal, sys, grpc
from grpc_health.v1 import health, health_pb2_grpc
signal.signal(signal.SIGUSR1, lambda *_: os._exit(70))
server = grpc.server(concurrent.futures.ThreadPoolExecutor())
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port(sys.argv[sys.argv.index("--listen") + 1])
server.start()
print("listens on a port of its own", flush=True)
print('{"event": "listening", "service": "child"}', flush=True)
sys.stdin.read()
print("drained", file=sys.stderr, flush=True)
server.stop(0)
"""
NOT_WELL = SERVES.replace("health.HealthServicer()", "servicer").replace(
    "server = grpc", 'servicer = health.HealthServicer()\nservicer.set("", 2)\nserver = grpc'
)
REFUSES = """
import sys
print("a log line", file=sys.stderr)
print("The model is of a kind that cannot be truncated.\\n\\n", file=sys.stderr)
sys.exit(78)
"""
SILENT = "import sys; sys.stdin.read()"
DEAF = SERVES.replace("sys.stdin.read()", "while True: signal.pause()")
LONG_LINE = """
import sys
print("x" * 200_000, file=sys.stderr)
sys.exit(3)
"""
SERVES_METRICS = SERVES.replace(
    "server.start()",
    "from outrider.process.metrics import new_registry, serve_metrics\n"
    'serve_metrics(sys.argv[sys.argv.index("--metrics-listen") + 1], new_registry())\n'
    "server.start()",
)
ANYWHERE = {"metrics": "127.0.0.1:0"}
QUICK = RestartPolicy(first_s=0.01, longest_s=0.02, healthy_s=30.0)


def launch(script: str, name: str = "child", ready_timeout_s: float = 30.0) -> Launch:
    """A service made of a script."""
    return Launch(name, (sys.executable, "-c", script), ready_timeout_s=ready_timeout_s)


@dataclass
class Record:
    """What a supervisor said; `changed` is set with every sentence."""

    reports: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def report(self, sentence: str) -> None:
        self.reports.append(sentence)
        self.changed.set()

    async def until(self, words: str) -> None:
        """Waits until a sentence contains the words."""
        while not any(words in sentence for sentence in self.reports):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 120)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def supervisor(record: Record) -> AsyncIterator[Supervisor]:
    async with Supervisor(record.report, lambda name, line: record.log.append((name, line)), QUICK) as running:
        yield running


def test_delays_double_to_a_limit_and_start_anew_after_a_healthy_run() -> None:
    """0.5 s, doubled up to 10 s, and 0.5 s again for a service that ran 30 s."""
    policy = RestartPolicy()
    delays, delay_s = [], None
    for _ in range(7):
        delay_s = policy.delay_s(delay_s, ran_s=1.0)
        delays.append(delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert policy.delay_s(10.0, ran_s=29.9) == 10.0
    assert policy.delay_s(10.0, ran_s=30.0) == 0.5


async def test_starts_and_stops_in_order(record: Record) -> None:
    """Services serve on addresses of their own, and the last started drains first."""
    async with Supervisor(record.report, lambda name, line: record.log.append((name, line)), QUICK) as supervisor:
        addresses = await supervisor.start(launch(SERVES, "target"), launch(SERVES, "draft"))
        addresses += await supervisor.start(launch(SERVES, "gateway"))
        assert len(set(addresses)) == 3
    assert record.log == [("gateway", "drained"), ("draft", "drained"), ("target", "drained")]


async def test_what_a_child_loads_is_observed(record: Record) -> None:
    """Between its start and its service; and of its log a launch may hide all lines below warnings."""
    lines = (
        '{"event": "reading weights", "file": "a", "done_bytes": 1, "total_bytes": 4, "level": "info"}',
        '{"event": "a warning", "level": "warning"}',
        "a bare line",
    )
    script = f"import sys; print({chr(10).join(lines)!r}, file=sys.stderr, flush=True)\n" + SERVES
    changes: list[Change] = []
    async with Supervisor(
        record.report, lambda name, line: record.log.append((name, line)), QUICK, changes.append
    ) as running:
        await running.start(replace(launch(script), hides_info=True))
    assert [change.progress.sentence for change in changes if change.progress] == [
        "reading weights: a, 0.0 of 0.0 MiB (25%)"
    ]
    assert [line for _, line in record.log] == [*lines[1:], "drained"]
    assert [change.state for change in changes] == [
        State.STARTING,
        State.STARTING,
        State.SERVING,
        State.STOPPED,
    ]


async def test_refusal_carries_sentence_and_code(supervisor: Supervisor, record: Record) -> None:
    """A child that exits 78 ends the start with its code and last sentence, said once, and takes the others along."""
    serving = launch(SERVES, "draft")
    with pytest.raises(ServiceFailed, match="kind that cannot be truncated") as failure:
        await supervisor.start(serving, launch(REFUSES, "target"))
    assert failure.value.code == 78
    assert "a log line" not in failure.value.message
    assert record.log == [("target", "a log line")]


async def test_not_ready_in_time(supervisor: Supervisor) -> None:
    """A child that never says that it serves is killed when its time is up."""
    with pytest.raises(ServiceFailed, match="not ready within") as failure:
        await supervisor.start(launch(SILENT, ready_timeout_s=0.3))
    assert failure.value.code == 69


@pytest.mark.slow
async def test_serving_is_what_the_child_says(supervisor: Supervisor) -> None:
    """A child that answers already, and says other things, does not serve until it says so."""
    hesitates = SERVES.replace('"listening"', '"loading"')
    with pytest.raises(ServiceFailed, match="not ready within"):
        await supervisor.start(launch(hesitates, ready_timeout_s=2.0))


def test_free_ports_differ_and_can_be_taken() -> None:
    """No process is given the same port again, and one that names it has it."""
    ports = [free_port("127.0.0.1") for _ in range(20)]
    assert len(set(ports)) == len(ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


async def test_long_lines_are_read(supervisor: Supervisor) -> None:
    """A log line longer than any buffer neither blocks nor breaks the reading."""
    with pytest.raises(ServiceFailed, match=r"x{1000}"):
        await supervisor.start(launch(LONG_LINE))


async def test_lines_without_an_end_are_not_held(supervisor: Supervisor, record: Record) -> None:
    """They come in pieces, none of them much longer than a megabyte, and nothing of them is lost."""
    endless = LONG_LINE.replace("200_000", "5_000_000")
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.start(launch(endless))
    pieces = [line for _, line in record.log]
    assert max(map(len, pieces)) < 1_200_000
    assert sum(map(len, pieces)) + failure.value.message.count("x") == 5_000_000


@pytest.mark.slow
async def test_dead_service_comes_back_on_its_port(supervisor: Supervisor, record: Record) -> None:
    """SIGKILL twice: each time the service is back on the same address, and each death and return is reported."""
    [address] = await supervisor.start(launch(SERVES, "draft"))
    watching = asyncio.create_task(supervisor.watch())
    for _ in range(2):
        record.reports.clear()
        killed = supervisor.pid("draft")
        os.kill(killed, signal.SIGKILL)
        await record.until(f"is back on {address}")
        assert record.reports[0].startswith("The draft service was ended by signal 9")
        assert supervisor.pid("draft") != killed
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("shares_port", [False, True])
async def test_a_service_that_hangs_is_started_again(record: Record, shares_port: bool) -> None:
    """One that is frozen answers nothing, is killed after some questions, and is back on its address; also one whose
    port others answer.
    """
    policy = replace(QUICK, ask_every_s=0.05, answer_s=1.0)
    async with Supervisor(record.report, lambda name, line: None, policy) as supervisor:
        launches = [replace(launch(SERVES_METRICS, name), further=ANYWHERE) for name in ("target", "draft")]
        [address, _] = await supervisor.start(*(replace(each, shares_port=shares_port) for each in launches))
        watching = asyncio.create_task(supervisor.watch())
        frozen, other = supervisor.pid("target"), supervisor.pid("draft")
        os.kill(frozen, signal.SIGSTOP)
        await record.until(f"is back on {address}")
        assert record.reports[0].startswith("The target service did not answer 3 times within 1 s and was killed")
        assert (supervisor.pid("target") != frozen, supervisor.pid("draft")) == (True, other)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_only_silence_is_a_hang() -> None:
    """A service that says that it is not well answers, and so does one that takes no more calls."""
    child = await ServiceProcess.start(launch(NOT_WELL), lambda line: None)
    assert not await misses(child.address, 30)
    freeze(child.pid)
    assert await misses(child.address, 0.1)
    child.kill()
    await child.wait()
    assert not await misses(child.address, 30)


async def test_keeps_trying_when_a_restart_fails(supervisor: Supervisor, record: Record, tmp_path: Path) -> None:
    """A service that cannot come back at once is tried again, and the reason is reported each time."""
    mark = tmp_path / "mark"
    once = f"import os, sys\nif os.path.exists('{mark}'): os.remove('{mark}'); sys.exit('The disk is busy.')\n"
    await supervisor.start(launch(once + SERVES, "target"))
    watching = asyncio.create_task(supervisor.watch())
    mark.touch()
    os.kill(supervisor.pid("target"), signal.SIGKILL)
    await record.until("is back")
    assert "The disk is busy." in record.reports[1]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("code", [64, 78])
async def test_gives_up_what_a_restart_cannot_change(
    supervisor: Supervisor, record: Record, tmp_path: Path, code: int
) -> None:
    """A restart that ends with wrong usage or bad configuration ends the watch, with the child's sentence and code."""
    mark = tmp_path / "mark"
    once = f"import os, sys\nif os.path.exists('{mark}'): print('It is a Mamba.', file=sys.stderr); sys.exit({code})\n"
    await supervisor.start(launch(SERVES, "draft"), launch(once + SERVES, "target"))
    watching = asyncio.create_task(supervisor.watch())
    mark.touch()
    os.kill(supervisor.pid("target"), signal.SIGKILL)
    with pytest.raises(ServiceFailed, match="It is a Mamba") as failure:
        await asyncio.wait_for(watching, 120)
    assert failure.value.code == code
    assert len(record.reports) == 1


async def test_a_service_that_gave_itself_up_is_started_again(supervisor: Supervisor, record: Record) -> None:
    """Exit code 70 is what a watchdog leaves: another incarnation may do better."""
    await supervisor.start(launch(SERVES, "target"))
    watching = asyncio.create_task(supervisor.watch())
    os.kill(supervisor.pid("target"), signal.SIGUSR1)
    await record.until("is back")
    assert "ended with code 70" in record.reports[0]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_stop_kills_what_does_not_drain(record: Record) -> None:
    """A child that ignores the end of its stdin is killed after the grace."""
    child = await ServiceProcess.start(launch(DEAF), lambda line: None)
    assert await child.stop(grace_s=0.1) == -signal.SIGKILL


async def test_kill_cuts_a_stop_short(supervisor: Supervisor) -> None:
    """A second Ctrl-C ends services that are slow to drain."""
    await supervisor.start(launch(DEAF, "target"))
    stopping = asyncio.create_task(supervisor.stop())
    supervisor.kill()
    await asyncio.wait_for(stopping, 120)


@pytest.mark.slow
async def test_child_ends_with_its_parent() -> None:
    """A child loses its stdin with a parent that is killed, and ends by itself."""
    parent = (
        "import asyncio, sys\nfrom outrider.process.children import Launch, ServiceProcess\n"
        f"launch = Launch('child', (sys.executable, '-c', {SERVES!r}))\n"
        "async def main():\n"
        "    child = await ServiceProcess.start(launch, print)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    child_pid = int(await process.stdout.readline())
    child = os.pidfd_open(child_pid)
    process.kill()
    await process.wait()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(child, ended.set)
    await asyncio.wait_for(ended.wait(), 120)
    asyncio.get_running_loop().remove_reader(child)
    os.close(child)


TAKES_A_PORT = """
import sys
from outrider.process.run import ProcessSettings, run_service
from outrider.rpc.channels import serve
run_service("child", lambda _: serve(sys.argv[sys.argv.index("--listen") + 1], {}), ProcessSettings())
"""


async def test_a_taken_port_is_told_by_the_child_alone(supervisor: Supervisor, record: Record) -> None:
    """gRPC's own lines about it stay out of the log, unless the operator's environment asks for them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        refused = Launch("child", (sys.executable, "-c", TAKES_A_PORT), address)
        with pytest.raises(ServiceFailed, match=f"Cannot listen on {address}: it is taken") as failure:
            await supervisor.start(refused)
    assert failure.value.code == 69
    assert record.log == []


@pytest.mark.slow
async def test_a_restart_keeps_all_ports(supervisor: Supervisor, record: Record) -> None:
    """Also that of the metrics, which was any free one, so that its scraper goes on."""
    child = Launch("target", (sys.executable, "-c", SERVES_METRICS), further=ANYWHERE)
    await supervisor.start(child)
    before = dict(supervisor.addresses("target"))
    watching = asyncio.create_task(supervisor.watch())
    os.kill(supervisor.pid("target"), signal.SIGKILL)
    await record.until("is back on")
    assert dict(supervisor.addresses("target")) == before
    assert before["metrics"] != before["address"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_child_that_cannot_be_started_is_tried_again(
    supervisor: Supervisor, record: Record, tmp_path: Path
) -> None:
    """A program that is away for a moment, as while it is replaced, is no end of the watch."""
    program, away = tmp_path / "python", tmp_path / "away"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    await supervisor.start(Launch("child", (str(program), "-c", SERVES), ready_timeout_s=30.0))
    watching = asyncio.create_task(supervisor.watch())
    program.rename(away)
    os.kill(supervisor.pid("child"), signal.SIGKILL)
    await record.until("was not started: No such file or directory. The next attempt is in")
    away.rename(program)
    await record.until("is back on")
    watching.cancel()
    await asyncio.wait({watching})


async def test_a_watch_that_fails_begins_again(record: Record) -> None:
    """Whatever it is: a service that is not watched would stay dead."""
    faults = iter([RuntimeError("cannot start a thread")])

    def observe(change: Change) -> None:
        if change.state is State.DIED and (fault := next(faults, None)):
            raise fault

    async with Supervisor(record.report, lambda _name, _line: None, QUICK, observe) as running:
        await running.start(launch(SERVES))
        watching = asyncio.create_task(running.watch())
        os.kill(running.pid("child"), signal.SIGKILL)
        await record.until("Watching the child service failed (RuntimeError('cannot start a thread')); it begins again")
        await record.until("is back on")
        watching.cancel()
        await asyncio.wait({watching})


async def test_a_log_that_cannot_be_passed_on_holds_up_no_child() -> None:
    """It is read all the same, so that the child can write and its end is seen."""

    def full(_line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    chatty = SERVES.replace("sys.stdin.read()", "sys.stdin.read(); print('x' * 99 + '\\n' * 9_999, file=sys.stderr)")
    process = await ServiceProcess.start(launch(chatty), full)
    assert await process.stop() == 0
