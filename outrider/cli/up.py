"""`outrider up`: the whole stack on this machine, kept alive and shown until a signal comes."""

import asyncio
import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.cli.doctor.checks import rest_text
from outrider.cli.local_stack import Addresses, Stack, metrics_address, port_error, start_stack
from outrider.cli.model_facts import ModelFacts, model_facts, model_line, model_table
from outrider.cli.output import is_rich, write
from outrider.cli.race import RaceQuestion, race
from outrider.cli.running import Interrupts, Work, note, service_log
from outrider.errors import NotReady, OutriderError
from outrider.model_files.memory import gibibytes
from outrider.process.children import HOST, Change, RestartPolicy, State, Supervisor
from outrider.process.progress import FITTING, FileProgress

REFRESH_S = 1.0
# For a target to read its weights again, from a slow disk too.
LOAD_S = 120.0
BUDGET_VARIABLE, BUDGET_FLAG = "OUTRIDER_REBUILD_BUDGET_SECONDS", "--rebuild-budget-seconds"
MAX_METRICS_BYTES = 1 << 20
# What listens on all addresses is no address to open.
LOCAL = {"0.0.0.0": HOST, "[::]": "[::1]"}
METRIC_PREFIX = "outrider_"
RUNNING, WAITING, DRAFT_COUNT = "num_requests_running", "num_requests_waiting", "current_draft_tokens"
TOKENS = "generation_tokens_total"
EVALUATED, ACCEPTED = "spec_decode_num_evaluated_tokens_total", "spec_decode_num_accepted_tokens_total"
# The word is what counts, the colour only helps.
STYLES = {State.SERVING: "green", State.STARTING: "yellow", State.DIED: "bold red", State.STOPPED: "dim"}


@dataclass(slots=True)
class ServiceView:
    """State of one process: its current incarnation, and how often it had to be started again."""

    name: str
    state: State = State.STARTING
    pid: int | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Addresses by what is served there; empty until it has served once."""
    restarts: int = 0
    model: str = ""
    progress: FileProgress | None = None
    """While it starts: the file that it is at, once that takes a second."""

    @property
    def address(self) -> str:
        return self.addresses.get("address", "")


class ServiceViews(dict[str, ServiceView]):
    """States of all processes of a stack by their names, in the order of their start."""

    def apply(self, change: Change) -> ServiceView:
        """Takes what the supervisor says, and returns what has changed."""
        view = self.setdefault(change.service, ServiceView(change.service))
        # Who has an address already has served before.
        view.restarts += change.state is State.SERVING and bool(view.addresses)
        view.state, view.pid, view.progress = change.state, change.pid, change.progress
        view.addresses = change.addresses or view.addresses
        return view


def memory_bytes(pid: int | None) -> int | None:
    """Memory that a process and its workers have in use, None when it is gone or the system does not say."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    workers = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread that ended after it was listed has none.
        with suppress(OSError):
            workers += map(int, path.read_text().split())
    return int(found[1]) * 1024 + sum(memory_bytes(worker) or 0 for worker in workers) if found else None


def status_table(services: Iterable[ServiceView], lines: Sequence[str], hint: str) -> RenderableType:
    """Table with a row for each process; below it what is loaded, the lines and, unless it has ended, a hint.

    Fits 80 columns.
    """
    table = Table("service", "state", "address", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("pid", "restarts", "memory"):
        table.add_column(name, justify="right")
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=16)
    shown = list(services)
    for each in shown:
        used = memory_bytes(each.pid)
        share = each.progress.share if each.progress else ""
        state = Text(f"{each.state} {share}".rstrip(), STYLES[each.state])
        cells = (each.address, str(each.pid or ""), str(each.restarts), gibibytes(used) if used else "")
        table.add_row(each.name, state, *cells, Text(each.model))
    if all(each.state is State.STOPPED for each in shown):
        return table
    files = (f"{each.name}: {each.progress.sentence}" for each in shown if each.progress)
    below = [Text(line, overflow="ellipsis", no_wrap=True) for line in (*files, *lines)]
    return Group(table, *below, Text(hint, "dim"))


Counts = Mapping[str, float]


def parse_counts(text: str) -> Counts | None:
    """Reads the text format of Prometheus, by names without their prefix; None where it is not that of a gateway."""
    try:
        by_name: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # A gateway of several workers has each figure of each.
                if sample.labels.keys() <= {"worker"}:
                    by_name.setdefault(sample.name.removeprefix(METRIC_PREFIX), []).append(sample.value)
    except ValueError:
        return None
    counts = {name: max(values) if name == DRAFT_COUNT else sum(values) for name, values in by_name.items()}
    return counts if counts.keys() >= {RUNNING, WAITING, DRAFT_COUNT, TOKENS, EVALUATED, ACCEPTED} else None


def work_line(before: Counts | None, now: Counts, seconds: float) -> str:
    """Requests that run and wait, and speed and acceptance since the counts before; that is accepted / evaluated."""
    parts = [f"{now[RUNNING]:.0f} running", f"{now[WAITING]:.0f} waiting"]
    if before is not None and seconds > 0 and now[TOKENS] >= before[TOKENS]:
        parts.append(f"{(now[TOKENS] - before[TOKENS]) / seconds:.0f} tokens/s")
        evaluated = now[EVALUATED] - before[EVALUATED]
        if evaluated > 0:
            parts.append(f"acceptance rate {(now[ACCEPTED] - before[ACCEPTED]) / evaluated:.2f}")
    return ", ".join([*parts, f"K {now[DRAFT_COUNT]:.0f}", f"{now[TOKENS]:,.0f} tokens"])


def page_of(rest: str | None) -> str | None:
    """Address of the page, by that of REST, as a browser on this machine opens it."""
    if not rest:
        return None
    host, _, port = rest.rpartition(":")
    return f"http://{LOCAL.get(host, host)}:{port}/"


def gateway_lines(addresses: Addresses) -> list[str]:
    """Lines about the addresses of the gateway and of its metrics."""
    metrics = addresses.metrics.get("gateway")
    place = f"{metrics}, with REST" if metrics == addresses.rest else metrics
    lines = [f"The gateway's metrics are on {place}."] if metrics else []
    return [*lines, f"The gateway answers on {addresses.gateway}."]


class Display:
    """Shows what becomes of a stack. What a kind of display has no place of its own for goes to stderr, or nowhere."""

    def observe(self, change: Change) -> None:
        """A process has come into another state, or has said what it loads."""
        if change.progress is not None:
            self.report(f"{change.service}: {change.progress.sentence}")

    def report(self, sentence: str) -> None:
        """A sentence about a death or a restart."""
        note(sentence)

    def log(self, name: str, line: str) -> None:
        """Shows a line of a service's log."""
        service_log(name, line)

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        """Shows that everything is up, for the first time."""

    async def run(self) -> None:
        """Keeps what is shown up to date until it is cancelled."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Ends the display, when all processes have stopped, whatever happened."""


class LinesDisplay(Display):
    """The models and addresses once on stdout; everything that happens later is a line on stderr."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        """Writes what a newcomer opens first, the models, and where the gateway answers."""
        page = page_of(addresses.rest)
        models = [model_line(fact, addresses.metrics.get(fact.role)) for fact in facts]
        lines = [*([f"The page: {page}"] if page else []), *models, *gateway_lines(addresses)]
        write(self._output, "".join(f"{line}\n" for line in lines))

    async def run(self) -> None:
        note("Serving until Ctrl-C.")
        await super().run()


class JsonDisplay(Display):
    """Display that writes one JSON object a line on stdout for each event; logs go to stderr as they are."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._services = ServiceViews()

    def observe(self, change: Change) -> None:
        """Writes starting, loading, died, restarted and stopped; that all serve for the first time is one event."""
        view = self._services.apply(change)
        if change.progress is not None:
            self._write({"event": "loading", "service": change.service, **asdict(change.progress)})
            return
        event: dict[str, Any] = {"event": change.state.value, "service": change.service}
        if change.state is State.SERVING and not view.restarts:
            return
        if change.state is State.SERVING:
            event |= {"event": "restarted", "pid": change.pid, "address": view.address}
            places = {"rest": change.addresses.get("rest"), "metrics": metrics_address(change.addresses)}
            event |= {name: place for name, place in places.items() if place}
        elif change.state is State.DIED:
            event |= {"ending": change.ending, "again_in_s": change.delay_s}
        self._write(event)

    def report(self, sentence: str) -> None:
        """Says nothing, because the events do."""

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        """Writes all addresses, and who serves them with which model."""
        places = {name: getattr(addresses, name) for name in ("rest", "gateway", "target", "draft")}
        by_service = {
            "metrics": dict(addresses.metrics),
            "models": {fact.role: fact.model for fact in facts},
            "pids": {view.name: view.pid for view in self._services.values()},
        }
        self._write({"event": "serving", "page": page_of(addresses.rest), **places, **by_service})

    def _write(self, event: Mapping[str, Any]) -> None:
        write(self._output, json.dumps({"timestamp": timestamp(), **event}) + "\n")


class TableDisplay(Display):
    """A table of the processes, redrawn every second and with each change, and the gateway's work below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._services = ServiceViews()
        self._addresses: Addresses | None = None
        self._counts: Counts | None = None
        self._counted_s = 0.0
        self._lines: list[str] = []
        # What is shown while everything starts makes room for what is said then.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def observe(self, change: Change) -> None:
        if self._addresses is None:
            self._live.start()
        self._services.apply(change)
        if change.progress is not None and change.progress.action == FITTING:
            # Said once, and not only until the next step.
            self.report(f"{change.service}: {change.progress.sentence}")
        self._draw()

    def report(self, sentence: str) -> None:
        """Prints it above the table, or where stderr goes."""
        if sys.stderr.isatty():
            self._console.print(Text(sentence), soft_wrap=True)
        else:
            note(sentence)

    def log(self, name: str, line: str) -> None:
        self.report(f"{name}: {line}")

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        self._live.stop()
        self._addresses = addresses
        for fact in facts:
            self._services[fact.role].model = fact.model
        page = page_of(addresses.rest)
        if page:
            self._console.print(Text(f"The page: {page}\n"), soft_wrap=True)
        self._console.print(model_table(facts, addresses.metrics))
        self._console.print(Text("\n".join(gateway_lines(addresses)) + "\n"), soft_wrap=True)

    async def run(self) -> None:
        """Draws the table until it is cancelled; what changes after that is still drawn, until it is closed."""
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        try:
            while True:
                self._lines = await self._work()
                self._draw()
                await asyncio.sleep(REFRESH_S)
        finally:
            # Nothing updates them any more.
            self._lines = []

    def close(self) -> None:
        """Leaves the last state in the terminal."""
        self._live.stop()

    def _draw(self) -> None:
        if self._live.is_started:
            hint = ""
            if self._addresses is not None:
                page = page_of(self._services["gateway"].addresses.get("rest"))
                hint = f"Ctrl-C stops it. The page: {page}" if page else "Ctrl-C stops it."
            self._live.update(status_table(self._services.values(), self._lines, hint), refresh=True)

    async def _work(self) -> list[str]:
        """The lines below the table: what the gateway does, or else what the services hold."""
        if self._addresses is None:
            return []
        place = metrics_address(self._services["gateway"].addresses)
        text = await asyncio.to_thread(rest_text, place, "/metrics", MAX_METRICS_BYTES) if place else None
        counts = parse_counts(text) if text else None
        if counts is not None:
            before, before_s = self._counts, self._counted_s
            self._counts, self._counted_s = counts, time.monotonic()
            return [f"gateway: {work_line(before, counts, self._counted_s - before_s)}"]
        lines = []
        for address in filter(None, (self._addresses.target, self._addresses.draft)):
            # Of a service that is away the table says so.
            with suppress(OutriderError):
                fact = await model_facts(address)
                held = f"{fact.blocks - fact.free_blocks:,} of {fact.blocks:,} blocks held"
                lines.append(f"{fact.role}: {fact.sessions} sessions, {held}")
        return lines


def choose_display(*, as_json: bool) -> Display:
    """JSON when wanted; otherwise a table in a terminal, and lines into a pipe or file."""
    if as_json:
        return JsonDisplay(sys.stdout)
    if is_rich(sys.stdout):
        return TableDisplay(Console(highlight=False))
    return LinesDisplay(sys.stdout)


def check_ports(stack: Stack) -> None:
    """Raises NotReady about the first port that something else listens on.

    A service would find it as well, but only after its model is loaded, and without the name of the option.
    """
    ports = {"port": (stack.gateway_port, stack.host), "target-port": (stack.target_port, HOST)}
    if stack.rest_port is not None:
        ports["rest-port"] = stack.rest_port, stack.host
    if stack.draft:
        ports["draft-port"] = stack.draft_port, HOST
    for option, (port, host) in ports.items():
        if error := port_error(port, host):
            if error.errno == errno.EADDRINUSE:
                found = f"Port {port} is taken; stop what listens there, or choose another"
            else:
                found = f"Port {port} cannot be used ({error.strerror}); choose another"
            raise NotReady(f"{found} with --{option}, 0 for a free one.", port=port)


def outlasting(policy: RestartPolicy, stack: Stack) -> Stack:
    """The stack, whose requests wait until a target that hangs has been replaced, unless the operator says how long."""
    if BUDGET_VARIABLE in os.environ:
        return stack
    return replace(stack, gateway_flags={**stack.gateway_flags, BUDGET_FLAG: policy.replaced_s + LOAD_S})


async def kept_up(display: Display) -> None:
    """Runs a display for ever: a stack does not end because its state cannot be shown."""
    while True:
        try:
            await display.run()
        except Exception as error:  # noqa: BLE001 - any fault of a terminal or of a figure
            display.report(f"The state cannot be shown ({error!r}); it is tried again.")
            await asyncio.sleep(REFRESH_S)


def lost_as_sentence(lost: int, reason: str) -> str:
    """Sentence for people about lines that could not be written here."""
    return f"{lost} lines of `outrider up` were lost: {reason}."


def lost_as_event(lost: int, reason: str) -> str:
    """Event of --json about lines that could not be written here."""
    return json.dumps({"timestamp": timestamp(), "event": "lines lost", "lines": lost, "reason": reason})


def timestamp() -> str:
    """The time in the form of the services' logs."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def serving(stack: Stack, display: Display, question: RaceQuestion | None) -> Work:
    """The work of the command: starts the stack, runs a race if there is a question, and shows it until it ends.

    Meanwhile what dies is restarted.
    """
    policy = RestartPolicy()

    async def work(interrupts: Interrupts) -> None:
        check_ports(stack)
        running: set[asyncio.Task[None]] = set()
        try:
            async with Supervisor(display.report, display.log, policy, display.observe) as supervisor:
                interrupts.urgent = supervisor.kill
                addresses = await start_stack(supervisor, outlasting(policy, stack))
                served = filter(None, (addresses.target, addresses.draft))
                display.serving(addresses, await asyncio.gather(*map(model_facts, served)))
                running.add(asyncio.create_task(supervisor.watch()))
                try:
                    if question is not None:
                        await race(addresses.gateway, question)
                    running.add(asyncio.create_task(kept_up(display)))
                    ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    # Neither ends by itself but with an error.
                    await ended.pop()
                finally:
                    for task in running:
                        task.cancel()
                    await asyncio.wait(running)
        finally:
            display.close()

    return work
