"""The main of every service: starts it, says where it listens, and stops it in order. Knows no service, and no torch.

Standard output carries one line of JSON, when the service serves; everything else goes to stderr. The first SIGTERM or
SIGINT, or the end of stdin when that is asked for, drains and exits 0; a second signal exits at once, and so does a
service that cannot be drained.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Annotated, NoReturn, Protocol

import structlog
import typer

from outrider import logs, tracing
from outrider.command_line import between
from outrider.errors import OutriderError
from outrider.rpc.channels import DRAIN_S

log = structlog.get_logger()


MAX_DRAIN_S = 86_400.0


class LogLevel(StrEnum):
    """The least important messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelFlag = Annotated[LogLevel, typer.Option("--log-level", envvar="OUTRIDER_LOG_LEVEL", help="What is logged.")]
StopWithStdinFlag = Annotated[
    bool,
    typer.Option(
        "--stop-with-stdin",
        envvar="OUTRIDER_STOP_WITH_STDIN",
        help="Drain and exit 0 when stdin ends, so that the process never outlives its parent.",
    ),
]


DrainFlag = Annotated[
    float,
    typer.Option(
        "--drain-seconds",
        callback=between(0, MAX_DRAIN_S),
        envvar="OUTRIDER_DRAIN_SECONDS",
        help="How long what is under way may take to end after the first SIGTERM.",
    ),
]


class Service(Protocol):
    """What runs until it is stopped."""

    @property
    def address(self) -> str:
        """Where it answers."""
        ...

    @property
    def further_addresses(self) -> Mapping[str, str]:
        """Where else it answers, by what is served there."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ends it; what is under way has grace_s seconds."""
        ...


def run_service(
    name: str,
    start: Callable[[], Awaitable[Service]],
    *,
    log_level: str = "info",
    stop_with_stdin: bool = False,
    drain_s: float = DRAIN_S,
) -> NoReturn:
    """Runs a service until it is told to stop, drains it for at most drain_s seconds, and exits with 0.

    An OutriderError that keeps it from starting is the last line on stderr, one sentence for the operator, and names
    the exit code.
    """
    logs.configure(log_level)
    try:
        finish_tracing = tracing.configure(name)
        try:
            asyncio.run(_run(name, start, stop_with_stdin, drain_s))
        finally:
            # Before the sentence below, which has to be the last line.
            finish_tracing()
    except OutriderError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(error.exit_code)
    except Exception as error:
        log.exception("service failed", service=name)
        sys.stderr.write(f"The {name} service failed: {type(error).__name__}.\n")
        sys.exit(OutriderError.exit_code)
    sys.exit(0)


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(name: str, start: Callable[[], Awaitable[Service]], stop_with_stdin: bool, drain_s: float) -> None:
    stop = _StopRequest()
    stop.listen(with_stdin=stop_with_stdin)
    starting = asyncio.ensure_future(start())
    stopping = asyncio.create_task(stop.requested.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # A thread that loads a model cannot be interrupted, and there is nothing to drain yet.
        exit_now(0)
    service = await starting
    # What was imported stays for ever; looking through all of it again now and then would hold up a round.
    gc.collect()
    gc.freeze()
    _announce(name, service)
    await stopping
    log.info("draining", service=name, reason=stop.reason)
    try:
        await service.stop(drain_s)
    except OutriderError as error:
        log.error("not stopped in order", service=name, reason=error.message)
        # What did not end may keep a thread, for which the interpreter would wait.
        exit_now(error.exit_code)
    log.info("stopped", service=name)


def _announce(name: str, service: Service) -> None:
    addresses = {"address": service.address, **service.further_addresses}
    sys.stdout.write(json.dumps({"event": "listening", "service": name, **addresses, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    log.info("listening", service=name, **addresses)


class _StopRequest:
    """Signals and the end of stdin, as one event of the running loop."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.reason = ""
        self._loop = asyncio.get_running_loop()

    def listen(self, *, with_stdin: bool) -> None:
        """Handles signals of this process from now on, and watches stdin when that is wanted."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        if with_stdin:
            # A thread, because the loop cannot watch every kind of file that stdin may be.
            threading.Thread(target=self._await_stdin_end, name="stdin", daemon=True).start()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            exit_now(128 + number)
        self._request(number.name)

    def _request(self, reason: str) -> None:
        if not self.requested.is_set():
            self.reason = reason
            self.requested.set()

    def _await_stdin_end(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self._loop.call_soon_threadsafe(self._request, "end of stdin")
