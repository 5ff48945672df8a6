"""What `outrider up` shows of a stack: events, the live table, figures of the gateway; and a whole life as JSON."""

import asyncio
import io
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from support.basics import eventually
from support.processes import children_of

from outrider.cli.doctor.checks import rest_text
from outrider.cli.local_stack import Addresses
from outrider.cli.model_facts import ModelFacts
from outrider.cli.output import is_rich
from outrider.cli.up import (
    Counts,
    JsonDisplay,
    LinesDisplay,
    ServiceViews,
    TableDisplay,
    choose_display,
    memory_bytes,
    page_of,
    parse_counts,
    work_line,
)
from outrider.process.children import Change, State
from outrider.process.progress import FileProgress

FACTS = [ModelFacts("target", "big", 11, "bfloat16", "cpu", 2, "cpu-x", 4096, 100, 16, "127.0.0.1:2")]
METRICS_PLACES = {"gateway": "127.0.0.1:4", "target": "127.0.0.1:5"}
ADDRESSES = Addresses("127.0.0.1:1", "127.0.0.1:2", None, "127.0.0.1:4", METRICS_PLACES)
METRICS = """\
outrider_num_requests_running 3.0
outrider_num_requests_waiting 2.0
outrider_current_draft_tokens 5.0
outrider_generation_tokens_total {tokens}
outrider_spec_decode_num_draft_tokens_total 40.0
outrider_spec_decode_num_evaluated_tokens_total 20.0
outrider_spec_decode_num_accepted_tokens_total 15.0
outrider_spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 9.0
"""
LIFE = (
    Change("target", State.STARTING),
    Change("target", State.SERVING, 7, {"address": "127.0.0.1:2", "metrics": "127.0.0.1:5"}),
    Change("gateway", State.STARTING),
    Change("gateway", State.SERVING, 8, {"address": "127.0.0.1:1", "rest": "127.0.0.1:4"}),
)
DEATH = (
    Change("target", State.DIED, ending="was ended by signal 9", delay_s=0.5),
    Change("target", State.STARTING),
    Change("target", State.SERVING, 9, {"address": "127.0.0.1:2", "metrics": "127.0.0.1:5"}),
    Change("target", State.STOPPED),
)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Says that it is a terminal."""
        return True


@pytest.mark.parametrize(
    ("variables", "is_drawn"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_when_tables_are_drawn(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_drawn: bool) -> None:
    """In a terminal that is not dumb, unless NO_COLOR is set; never into a pipe."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rich(Terminal()) is is_drawn
    assert not is_rich(io.StringIO())


def test_a_pipe_gets_lines_and_json_what_asks_for_it() -> None:
    """pytest's own stdout is no terminal."""
    assert isinstance(choose_display(as_json=False), LinesDisplay)
    assert isinstance(choose_display(as_json=True), JsonDisplay)


def test_a_service_that_came_back_counts_as_restarted() -> None:
    """Its first start does not, and it keeps its address while it is away."""
    services = ServiceViews()
    for change in (*LIFE, *DEATH[:1]):
        services.apply(change)
    view = services["target"]
    assert (view.state, view.restarts, view.address) == (State.DIED, 0, "127.0.0.1:2")
    for change in DEATH[1:]:
        services.apply(change)
    assert (view.restarts, list(services)) == (1, ["target", "gateway"])


def test_json_tells_every_event_on_a_line_of_its_own() -> None:
    """One `serving` with all addresses, and what became of each process afterwards."""
    output = io.StringIO()
    display = JsonDisplay(output)
    for change in LIFE:
        display.observe(change)
    display.serving(ADDRESSES, FACTS)
    for change in DEATH:
        display.observe(change)
    events = [json.loads(line) for line in output.getvalue().splitlines()]
    told = [(each["event"], each.get("service")) for each in events]
    assert told == [
        ("starting", "target"),
        ("starting", "gateway"),
        ("serving", None),
        ("died", "target"),
        ("starting", "target"),
        ("restarted", "target"),
        ("stopped", "target"),
    ]
    assert events[2]["page"] == "http://127.0.0.1:4/"
    assert (events[2]["gateway"], events[2]["models"], events[2]["pids"]["gateway"]) == (
        "127.0.0.1:1",
        {"target": "big"},
        8,
    )
    assert (events[3]["again_in_s"], events[5]["pid"]) == (0.5, 9)
    assert (events[2]["metrics"], events[5]["metrics"]) == (METRICS_PLACES, "127.0.0.1:5")
    times = [datetime.fromisoformat(each["timestamp"]) for each in events]
    assert times == sorted(times)
    assert all(each.tzinfo == UTC for each in times)


LOADING = Change("target", State.STARTING, progress=FileProgress("reading weights", "a.gguf", 1 << 30, 4 << 30))
SENTENCE = "target: reading weights: a.gguf, 1.0 of 4.0 GiB (25%)"


def test_each_display_shows_what_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines on stderr, an event, and in the table the share beside the state and the file below, until it serves."""
    LinesDisplay(io.StringIO()).observe(LOADING)
    assert capsys.readouterr().err == SENTENCE + "\n"
    output = io.StringIO()
    JsonDisplay(output).observe(LOADING)
    event = json.loads(output.getvalue())
    assert (event["event"], event["service"], event["file"], event["done_bytes"]) == (
        "loading",
        "target",
        "a.gguf",
        1 << 30,
    )
    drawn = io.StringIO()
    display = TableDisplay(Console(file=drawn, width=80, force_terminal=True, color_system=None))
    display.observe(LIFE[0])
    display.observe(LOADING)
    assert "starting 25%" in drawn.getvalue()
    assert SENTENCE in drawn.getvalue()
    drawn.truncate(0)
    display.observe(LIFE[1])
    assert SENTENCE not in drawn.getvalue()
    display.close()


@pytest.mark.parametrize(("rest", "page"), [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("a:1", "a:1")])
def test_the_page_is_named_as_a_browser_here_opens_it(rest: str, page: str) -> None:
    """All addresses of a machine are none that could be opened."""
    assert page_of(rest) == f"http://{page}/"


def test_lines_name_the_page_first() -> None:
    """It is what a newcomer opens; without REST there is none."""
    output = io.StringIO()
    LinesDisplay(output).serving(ADDRESSES, FACTS)
    assert output.getvalue().splitlines()[0] == "The page: http://127.0.0.1:4/"
    output = io.StringIO()
    LinesDisplay(output).serving(Addresses("127.0.0.1:1", "127.0.0.1:2", None), FACTS)
    assert "page" not in output.getvalue()
    assert output.getvalue().rstrip().endswith("The gateway answers on 127.0.0.1:1.")


def test_lines_tell_all_of_the_table_without_drawing_one() -> None:
    """Who sets NO_COLOR reads lines: models, addresses and where the metrics are, in ASCII."""
    output = io.StringIO()
    LinesDisplay(output).serving(ADDRESSES, FACTS)
    text = output.getvalue()
    assert text.isascii()
    assert [line.partition(" ")[0] for line in text.splitlines()] == ["The"] * 4
    for words in (
        "The target: big,",
        "4,096 tokens",
        "answers on 127.0.0.1:2,",
        "metrics on 127.0.0.1:5",
        "are on 127.0.0.1:4,",
    ):
        assert words in text


def counts(tokens: float, evaluated: float = 20.0, accepted: float = 15.0) -> Counts:
    """Figures that a gateway serves."""
    text = METRICS.format(tokens=tokens).replace("evaluated_tokens_total 20.0", f"evaluated_tokens_total {evaluated}")
    parsed = parse_counts(text.replace("accepted_tokens_total 15.0", f"accepted_tokens_total {accepted}"))
    assert parsed is not None
    return parsed


def test_counts_of_a_gateway() -> None:
    """Read by name; what is no metrics text, and another program's metrics, are nothing."""
    assert work_line(counts(100.0), counts(300.0), 2.0) == "3 running, 2 waiting, 100 tokens/s, K 5, 300 tokens"
    assert [parse_counts(text) for text in ("", "python_info 1.0\n", "<html>")] == [None] * 3


def test_counts_of_several_workers() -> None:
    """They add up, but for K, of which the largest is shown."""
    text = METRICS.format(tokens=100.0)
    lines = [line for line in text.splitlines() if "{" not in line]
    both = "".join(f'{name}{{worker="{number}"}} {value}\n' for number in "01" for name, value in map(str.split, lines))
    assert work_line(None, parse_counts(both) or {}, 1.0) == "6 running, 4 waiting, K 5, 200 tokens"


def test_acceptance_is_that_of_the_last_second() -> None:
    """Accepted over evaluated since the counts before; a gateway that began anew has no speed yet."""
    before, now = counts(0, 0, 0), counts(30, 20, 15)
    assert "acceptance rate 0.75" in work_line(before, now, 1.0)
    assert "tokens/s" not in work_line(now, before, 1.0)
    assert "tokens/s" not in work_line(None, now, 1.0)


def test_memory_of_processes() -> None:
    """Our own is something, that of a process that is gone unknown."""
    assert (memory_bytes(1) or 1) > 0
    assert memory_bytes(None) is None


async def test_memory_of_workers_is_that_of_their_parent() -> None:
    """A gateway's row of the table is about all its processes."""
    alone = memory_bytes(os.getpid()) or 0
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    await eventually(lambda: (memory_bytes(os.getpid()) or 0) >= alone + (memory_bytes(child.pid) or alone) // 2)
    await child.communicate(b"\n")


@pytest.mark.slow
def test_memory_is_known_while_threads_end() -> None:
    """A thread that ends while a process is looked at takes nothing from its row."""
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            for thread in [threading.Thread(target=int) for _ in range(8)]:
                thread.start()

    churn = threading.Thread(target=come_and_go)
    churn.start()
    try:
        unknown = sum(memory_bytes(os.getpid()) is None for _ in range(1_000))
    finally:
        done.set()
        churn.join()
    assert unknown == 0


class Metrics(BaseHTTPRequestHandler):
    """Serves counters that grow with every scrape."""

    scrapes = iter(range(1, 1_000_000))

    def do_GET(self) -> None:
        """Answers any path."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.format(tokens=float(next(self.scrapes))).encode())

    def log_message(self, *_: object) -> None:
        """Writes no line about a request."""


@pytest.fixture
def metrics() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def shown(rest: str | None) -> str:
    """What a table shows until it has been drawn twice after a death."""
    output = io.StringIO()
    display = TableDisplay(Console(file=output, width=80, force_terminal=True, color_system=None))
    for change in LIFE[:3]:
        display.observe(change)
    places = {"address": "127.0.0.1:1", **({"rest": rest} if rest else {})}
    display.observe(Change("gateway", State.SERVING, 8, places))
    display.serving(Addresses("127.0.0.1:1", "127.0.0.1:2", None, rest), FACTS)
    running = asyncio.create_task(display.run())
    await eventually(lambda: "Ctrl-C" in output.getvalue())
    for change in DEATH[:3]:
        display.observe(change)
    running.cancel()
    await asyncio.wait({running})
    return output.getvalue()


async def test_the_table_shows_processes_and_the_gateway_s_work(metrics: str) -> None:
    """States are words, the restart is counted, and no line is wider than the terminal."""
    text = await shown(metrics)
    assert "3 running, 2 waiting" in text
    assert all(word in text for word in ("died", "starting", "serving", "restarts", f"http://{metrics}/"))
    assert max(len(line.strip("\r")) for line in text.splitlines() if "\x1b" not in line) <= 80


async def test_without_metrics_the_services_are_asked() -> None:
    """Where no process answers either, the table is drawn all the same."""
    assert "Ctrl-C stops it." in await shown(None)


async def test_the_last_table_says_that_everything_has_stopped() -> None:
    """After Ctrl-C no process is said to serve, with the id of one that is gone, and nothing is left to stop."""
    output = io.StringIO()
    display = TableDisplay(Console(file=output, width=80, force_terminal=True, color_system=None))
    for change in LIFE:
        display.observe(change)
    display.serving(Addresses("127.0.0.1:1", "127.0.0.1:2", None), FACTS)
    running = asyncio.create_task(display.run())
    await eventually(lambda: "Ctrl-C" in output.getvalue())
    running.cancel()
    await asyncio.wait({running})
    for name in ("gateway", "target"):
        display.observe(Change(name, State.STOPPED))
    display.close()
    last = output.getvalue().rpartition("service")[2]
    assert last.count("stopped") == 2
    assert not any(word in last for word in ("serving", "Ctrl-C", " 7 ", " 8 "))


COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "up", "--json", "--no-draft")
FREE_PORTS = ("--port", "0", "--rest-port", "0", "--target-port", "0")
READY_S, END_S = 120.0, 60.0


@dataclass
class Life:
    """A running command, whose lines are read one by one."""

    process: asyncio.subprocess.Process

    async def until(self, name: str) -> dict[str, Any]:
        """Reads to the next event of this name."""
        assert self.process.stdout is not None
        while True:
            event: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), READY_S))
            if event["event"] == name:
                return event


@asynccontextmanager
async def living(notes: int = asyncio.subprocess.DEVNULL) -> AsyncIterator[Life]:
    """The command while it runs, with its notes in a file; whatever happens, it does not outlive the test."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *FREE_PORTS, stdout=pipe, stderr=notes)
    try:
        yield Life(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def check_addresses(serving: dict[str, Any]) -> None:
    """The page and the metrics are where REST is answered, and the target's metrics can be scraped."""
    assert serving["models"] == {"target": "target"}
    assert serving["page"] == f"http://{serving['rest']}/"
    assert serving["metrics"]["gateway"] == serving["rest"]
    scraped = await asyncio.to_thread(rest_text, serving["metrics"]["target"], "/metrics", 1 << 20)
    assert "outrider_kv_blocks" in (scraped or "")


@pytest.mark.slow
async def test_a_life_in_lines() -> None:
    """Starting, serving with all addresses, a killed gateway that comes back, and everything stopped on SIGTERM."""
    async with living() as life:
        until = life.until
        assert (await until("starting"))["service"] == "target"
        serving = await until("serving")
        await check_addresses(serving)
        os.kill(serving["pids"]["target"], signal.SIGKILL)
        back = await until("restarted")
        assert (back["service"], back["metrics"]) == ("target", serving["metrics"]["target"])
        os.kill(serving["pids"]["gateway"], signal.SIGKILL)
        assert (await until("died"))["ending"] == "was ended by signal 9"
        back = await until("restarted")
        assert (back["service"], back["address"]) == ("gateway", serving["gateway"])
        assert back["pid"] != serving["pids"]["gateway"]
        assert (back["rest"], back["metrics"]) == (serving["rest"], serving["rest"])
        life.process.send_signal(signal.SIGTERM)
        assert [(await until("stopped"))["service"] for _ in range(2)] == ["gateway", "target"]
        assert await asyncio.wait_for(life.process.wait(), END_S) == 0


@pytest.mark.slow
async def test_a_stack_outlives_who_listens_to_it() -> None:
    """Its events have no reader any more, and its notes no room: what dies is restarted all the same."""
    full = os.open("/dev/full", os.O_WRONLY)
    async with living(full) as life:
        os.close(full)
        serving = await life.until("serving")
        transport: Any = life.process._transport  # type: ignore[attr-defined]
        transport.get_pipe_transport(1).close()
        for name in ("target", "gateway"):
            [pid] = child_of(life.process.pid, MODULES[name])
            os.kill(pid, signal.SIGKILL)

            async def is_back(name: str = name, pid: int = pid) -> bool:
                found = await asyncio.to_thread(rest_text, serving["rest"], "/ready", 1 << 10)
                return child_of(life.process.pid, MODULES[name]) not in ([], [pid]) and '"ready"' in (found or "")

            await eventually(is_back)
        life.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(life.process.wait(), END_S) == 0


MODULES = {"target": "target_service", "gateway": "gateway"}


def child_of(pid: int, module: str) -> list[int]:
    """The processes with a module that a process has started."""
    return [child for child, words in children_of(pid).items() if ("-m", module) in pairwise(words)]
