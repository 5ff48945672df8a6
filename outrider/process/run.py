"""The main of every service: starts it, says where it listens, and stops it in order.

Standard output carries one line of JSON, when the service serves; everything else goes to stderr. The first SIGTERM or
SIGINT, or the end of stdin with --stop-with-stdin, drains and exits 0; a second signal exits at once, and so does a
service that cannot be drained. A SIGINT that was ignored at the start stays so.
"""

import asyncio
import errno
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NoReturn, Protocol, TypeVar

import structlog

from outrider.errors import InvalidRequest, OutriderError
from outrider.process import telemetry
from outrider.process.options import FileUnusable, Setting, check_settings, within
from outrider.process.streams import finish_streams, unfailing
from outrider.rpc.channels import DRAIN_S
from outrider.rpc.crowd import OncePerMinute, raise_descriptors
from outrider.rpc.tls import TlsFiles, files_of

log = structlog.get_logger()

MAX_DRAIN_S = 86_400.0
LISTENING = "listening"
STDIN = 0


class LogLevel(StrEnum):
    """The least important messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of every service process. Raises InvalidRequest about a value outside its limit."""

    drain_seconds: Annotated[
        float, Setting("How long what is under way may take to end after the first SIGTERM.", within(0, MAX_DRAIN_S))
    ] = DRAIN_S
    log_level: Annotated[LogLevel, Setting("What is logged.")] = LogLevel.INFO
    stop_with_stdin: Annotated[
        bool, Setting("Drain and exit 0 when stdin ends, so that the process never outlives its parent.")
    ] = False
    tls_cert: Annotated[str, Setting("Certificate in PEM; read again when it is replaced. Empty: no TLS.")] = ""
    tls_key: Annotated[str, Setting("Its private key.")] = ""
    tls_client_ca: Annotated[
        str, Setting("Authority that must have signed the certificates of clients. Empty: they need none.")
    ] = ""

    def __post_init__(self) -> None:
        check_settings(self)
        self.tls()

    def tls(self) -> TlsFiles | None:
        """The files of TLS, None where it is not wanted; raises InvalidRequest about those that cannot be used."""
        if self.tls_client_ca and not self.tls_cert:
            raise InvalidRequest("--tls-client-ca", self.tls_client_ca, "given with --tls-cert")
        files = {"ca": self.tls_client_ca, "cert": self.tls_cert, "key": self.tls_key}
        return files_of(files, {"ca": "--tls-client-ca", "cert": "--tls-cert", "key": "--tls-key"})


Settings = TypeVar("Settings", bound=ProcessSettings)


class Service(Protocol):
    """A service that runs until it is stopped."""

    @property
    def address(self) -> str: ...

    @property
    def further_addresses(self) -> Mapping[str, str]:
        """Further addresses, by what is served there."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ends it; what is under way has grace_s seconds."""
        ...


def run_service(
    name: str,
    start: Callable[[Settings], Awaitable[Service]],
    settings: Settings,
    *,
    worker: int | None = None,
    urgent: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Runs what `start` starts with the settings until it has to stop, drains it, and exits with 0.

    An OutriderError that keeps it from starting is the last line on stderr, one sentence for the operator, and names
    the exit code. The number of a worker is on every line of its log. `urgent` runs when a second signal came.
    """
    with unfailing(telemetry.loss_line):
        telemetry.configure_logs(settings.log_level, worker)
        raise_descriptors()
        try:
            finish_tracing = telemetry.configure_tracing(name)
            try:
                asyncio.run(_run(name, start, settings, urgent))
            finally:
                # Before the sentence below, which has to be the last line.
                finish_tracing()
        except OutriderError as error:
            sys.stderr.write(f"{error.message}\n")
            sys.exit(error.exit_code)
        except Exception as error:
            if unusable := FileUnusable.of(error) if isinstance(error, OSError) else None:
                sys.stderr.write(f"{unusable.message}\n")
                sys.exit(unusable.exit_code)
            log.exception("service failed", service=name)
            sys.stderr.write(f"The {name} service failed: {type(error).__name__}.\n")
            sys.exit(OutriderError.exit_code)
        # Everything has been stopped. To take the interpreter apart, torch above all, is half a second that somebody
        # waits.
        exit_now(0)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that stop this process.

    SIGINT is none where the parent process had it ignored, as shells do for what a script runs with `&`: Ctrl-C is then
    meant for somebody else.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGINT)


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    finish_streams()
    os._exit(code)


def _exception_handler() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """The loop's own, but for what comes a thousand times a second where a process has no descriptor left."""
    exhausted = OncePerMinute("no descriptor is left for a connection")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            exhausted.tell()
        else:
            loop.default_exception_handler(context)

    return handle


async def _run(
    name: str, start: Callable[[Settings], Awaitable[Service]], settings: Settings, urgent: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_exception_handler())
    # Why the service has to stop, once it has to.
    stopping: asyncio.Future[str] = loop.create_future()

    def stop(reason: str) -> None:
        if not stopping.done():
            stopping.set_result(reason)

    def on_signal(number: signal.Signals) -> None:
        if stopping.done():
            urgent()
            exit_now(128 + number)
        stop(number.name)

    def await_stdin_end() -> None:
        # What cannot be read, as a terminal that is gone, has ended.
        with suppress(OSError):
            while os.read(STDIN, 4096):
                pass
        loop.call_soon_threadsafe(stop, "end of stdin")

    for number in stop_signals():
        loop.add_signal_handler(number, on_signal, number)
    if settings.stop_with_stdin:
        # A thread, because the loop cannot watch every kind of file that stdin may be.
        threading.Thread(target=await_stdin_end, name="stdin", daemon=True).start()
    starting = asyncio.ensure_future(start(settings))
    waiting: set[asyncio.Future[Any]] = {starting, stopping}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # A thread that loads a model cannot be interrupted, and there is nothing to drain yet.
        exit_now(0)
    service = await starting
    # What was imported stays for ever; looking through all of it again now and then would hold up a round.
    gc.collect()
    gc.freeze()
    addresses = {"address": service.address, **service.further_addresses}
    sys.stdout.write(json.dumps({"event": LISTENING, "service": name, **addresses, "pid": os.getpid()}) + "\n")
    log.info(LISTENING, service=name, **addresses)
    reason = await stopping
    log.info("draining", service=name, reason=reason)
    try:
        await service.stop(settings.drain_seconds)
    except OutriderError as error:
        log.error("not stopped in order", service=name, reason=error.message)
        # What did not end may keep a thread, for which the interpreter would wait.
        exit_now(error.exit_code)
    log.info("stopped", service=name)
