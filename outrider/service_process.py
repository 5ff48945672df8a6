"""One incarnation of a service as a child process. Knows nothing about models, restarts or gRPC.

The contract with a child: it takes `--listen HOST:PORT` and `--stop-with-stdin`, and a `--WHAT-listen` for whatever
else it serves; when it serves it prints one line of JSON with the event "listening" and its addresses to stdout; it
logs to stderr; at the end of its stdin it drains and exits 0. So a child never outlives this process, however this
process ends.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from outrider.errors import OutriderError

# Longer than a service takes to drain: it ends by itself, killed is only what hangs.
STOP_GRACE_S = 35.0
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
# gRPC's core writes lines of its own to stderr, for instance about a taken port; a child's last line is its sentence.
CHILD_DEFAULTS = {"GRPC_VERBOSITY": "NONE"}


class ServiceFailed(OutriderError):
    """A service did not start; the operator has to act on the sentence that it left. Carries its exit code."""

    status = "UNAVAILABLE"
    reason = "SERVICE_FAILED"

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code=code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Launch:
    """How a service is started: argv without addresses, those wanted (port 0: any), seconds until it serves."""

    name: str
    command: tuple[str, ...]
    listen: str = "127.0.0.1:0"
    ready_timeout_s: float = 600.0
    further: Mapping[str, str] = field(default_factory=dict)
    """Where else it listens, by what is served there; empty for nowhere."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that hold for it whatever this process has."""

    def argv(self, listen: str) -> tuple[str, ...]:
        """The whole command line for an address."""
        further = (word for what, where in self.further.items() for word in (f"--{what}-listen", where))
        return (*self.command, *further, "--listen", listen, "--stop-with-stdin")

    def at(self, addresses: Mapping[str, str]) -> Self:
        """The same on the addresses that an incarnation got, for the next one."""
        further = {what: addresses.get(what, where) for what, where in self.further.items()}
        return replace(self, listen=addresses["address"], further=further)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines, and pieces of those that are too long to be held; StreamReader.readline would refuse these."""
    rest = b""
    while chunk := await stream.read(READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
        if len(rest) >= MAX_LINE_BYTES:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")


def _listening_addresses(line: str) -> dict[str, str] | None:
    """The texts of the line that says that the service serves, its address among them; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("event") != "listening" or not isinstance(event.get("address"), str):
        return None
    return {name: value for name, value in event.items() if isinstance(value, str)}


def ending(code: int) -> str:
    """How a process ended, for a sentence; exit codes below 0 are signals, as asyncio has it."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


class ServiceProcess:
    """A running child that serves on `address`. Made by `start`."""

    def __init__(self, launch: Launch, process: asyncio.subprocess.Process, log: Callable[[str], None]) -> None:
        self.address = ""
        self.addresses: Mapping[str, str] = {}
        """All that the child said about where it serves: `address`, and `rest` and `metrics` where it has them."""
        self._launch = launch
        self._process = process
        self._log = log
        # Until the child serves, its last line is held back: when it ends, that is the sentence that tells why.
        self._held_line = ""
        self._serving: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._pumps = [asyncio.create_task(self._pump_stdout()), asyncio.create_task(self._pump_stderr())]

    @classmethod
    async def start(cls, launch: Launch, listen: str, log: Callable[[str], None]) -> Self:
        """Starts the child and returns when it serves. `log` gets every line of its stderr.

        Raises ServiceFailed with the child's own last sentence when it ends first, or when the time is up.
        """
        pipe = asyncio.subprocess.PIPE
        environment = {**CHILD_DEFAULTS, **os.environ, **launch.environment}
        # A session of its own, so that Ctrl-C in the terminal reaches the parent alone and services stop in order.
        process = await asyncio.create_subprocess_exec(
            *launch.argv(listen), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=environment
        )
        service = cls(launch, process, log)
        try:
            service.addresses = await service._await_serving()
            service.address = service.addresses["address"]
            service._release()
        except BaseException:
            service.kill()
            await service.wait()
            raise
        return service

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    async def wait(self) -> int:
        """Waits for the end of the child and of its output; returns its exit code, negative for a signal."""
        code = await self._process.wait()
        # Unlike gather, this leaves the pumps running when the waiting itself is cancelled.
        await asyncio.wait(self._pumps)
        return code

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Asks the child to drain, kills it when it takes longer than `grace_s`, and returns its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def kill(self) -> None:
        """Ends the child at once. Without an effect when it has ended already."""
        if self._process.returncode is None:
            self._process.kill()

    async def _await_serving(self) -> dict[str, str]:
        ended = asyncio.create_task(self.wait())
        timeout_s = self._launch.ready_timeout_s
        waited: set[asyncio.Future[Any]] = {self._serving, ended}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            ended.cancel()
            return self._serving.result()
        if ended.done():
            raise self._ended_early(ended.result())
        ended.cancel()
        self._release()
        raise ServiceFailed(f"The {self._launch.name} service was not ready within {timeout_s:g} s.", 69)

    def _ended_early(self, code: int) -> ServiceFailed:
        """The child's own sentence and code; 70, an internal fault, when it died of a signal or said 0."""
        said = self._held_line or "It said nothing."
        message = f"The {self._launch.name} service {ending(code)} before it was ready: {said}"
        return ServiceFailed(message, code if code > 0 else 70)

    async def _pump_stdout(self) -> None:
        if self._process.stdout is None:
            return
        async for line in _lines(self._process.stdout):
            addresses = _listening_addresses(line)
            if addresses and not self._serving.done():
                self._serving.set_result(addresses)

    async def _pump_stderr(self) -> None:
        if self._process.stderr is None:
            return
        async for line in _lines(self._process.stderr):
            if self.address:
                self._log(line)
            elif line.strip():
                self._release()
                self._held_line = line.strip()

    def _release(self) -> None:
        if self._held_line:
            self._log(self._held_line)
            self._held_line = ""
