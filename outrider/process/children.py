"""Processes that this one starts, restarts and stops: services that know when they serve.

A child takes `--listen HOST:PORT`, a `--WHAT-listen` for whatever else it serves, and `--stop-with-stdin`. It serves
when it says so on stdout, as `outrider.process.run` does. It logs to stderr, and drains and exits with 0 at the end of
its stdin: so it never outlives this process, however this process ends.
"""

import asyncio
import http.client
import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import OutriderError
from outrider.process.metrics import scraped
from outrider.process.progress import FileProgress, log_line
from outrider.process.run import LISTENING
from outrider.rpc.channels import open_channel

HOST = "127.0.0.1"
# Longer than a service takes to drain: it ends by itself, killed is only what hangs.
STOP_GRACE_S = 35.0
# Processes of one gateway.
MAX_WORKERS = 256
MAX_LINE_BYTES = 1 << 20
# A scrape of these only shows that there is somebody.
NO_SERIES = ("none",)
# gRPC's core writes lines of its own to stderr, for instance about a taken port; a child's last line is its sentence.
QUIET_GRPC = {"GRPC_VERBOSITY": "NONE"}
# Wrong usage and bad configuration, of sysexits.h: only the operator can change what a restart would find again.
HOPELESS_CODES = frozenset({64, 78})


class ServiceFailed(OutriderError):
    """A service did not start; the operator has to act on the sentence that it left, `said`. Carries its exit code."""

    status = "UNAVAILABLE"
    reason = "SERVICE_FAILED"

    def __init__(self, message: str, code: int, said: str = "") -> None:
        super().__init__(message, code=code)
        self.code = self.exit_code = code
        self.said = said


def family_of(host: str) -> socket.AddressFamily:
    """Family of a host's addresses; one of IPv6 is in brackets."""
    return socket.AF_INET6 if host.startswith("[") else socket.AF_INET


def free_port(host: str) -> int:
    """A port that is free, and for a minute is not given to processes that want any port.

    Its last connection has just been closed from this side, and until the system forgets that connection the port goes
    only to those who name it. So a child has the time to load its model.
    """
    place, family = (host.strip("[]"), 0), family_of(host)
    with (
        socket.create_server(place, family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]),
    ):
        listener.accept()[0].close()
        port: int = listener.getsockname()[1]
        return port


def _chosen(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{free_port(host)}" if port == "0" else address


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of a service: argv without addresses, those wanted (port 0: any), seconds until it serves."""

    name: str
    command: tuple[str, ...]
    listen: str = f"{HOST}:0"
    ready_timeout_s: float = 600.0
    further: Mapping[str, str] = field(default_factory=dict)
    """Further addresses to listen on, by what is served there; empty for none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that hold for it whatever this process has."""
    defaults: Mapping[str, str] = field(default_factory=lambda: QUIET_GRPC)
    """Variables that hold for it where this process has none; a server with TLS has no other word about refusals."""
    hides_info: bool = False
    """Whether lines of its log below warnings are read for its progress alone, and not passed on."""
    shares_port: bool = False
    """Whether others answer at `listen` too, so that an answer says nothing of this one: its metrics are asked."""

    @property
    def argv(self) -> tuple[str, ...]:
        further = (word for what, where in self.further.items() for word in (f"--{what}-listen", where))
        return (*self.command, *further, "--listen", self.listen, "--stop-with-stdin")

    @property
    def addresses(self) -> Mapping[str, str]:
        """Addresses that it serves on: `address` for gRPC, and what else there is by its name."""
        return {"address": self.listen, **{what: where for what, where in self.further.items() if where}}

    def on_chosen_ports(self) -> Self:
        """A launch with a free port wherever any will do."""
        further = {what: _chosen(where) for what, where in self.further.items()}
        return replace(self, listen=_chosen(self.listen), further=further)


def _ending(code: int) -> str:
    """End of a process, for a sentence; exit codes below 0 are signals, as asyncio has it."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


class ServiceProcess:
    """A running child, made by `start`. Its `launch` names the ports that it has."""

    def __init__(
        self,
        launch: Launch,
        process: asyncio.subprocess.Process,
        log: Callable[[str], None],
        progress: Callable[[FileProgress], None],
    ) -> None:
        self.launch = launch
        self._process = process
        self._log = log
        self._progress = progress
        self._serves = False
        # Until the child serves, its last line is held back: when it ends, that is the sentence that says why.
        self._held_line = ""
        self._logging = asyncio.create_task(self._log_stderr())

    @classmethod
    async def start(
        cls, launch: Launch, log: Callable[[str], None], progress: Callable[[FileProgress], None] = lambda _: None
    ) -> Self:
        """Starts the child and returns when it serves. `log` gets the lines of its stderr, `progress` what it loads.

        Raises ServiceFailed with the child's own last sentence when it ends first, or when the time is up.
        """
        launch = launch.on_chosen_ports()
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            # A session of its own, so that Ctrl-C in the terminal reaches the parent alone and services stop in order.
            start_new_session=True,
            env={**launch.defaults, **os.environ, **launch.environment},
        )
        service, the_service = cls(launch, process, log, progress), f"The {launch.name} service"
        ended, serving = asyncio.create_task(service.wait()), asyncio.create_task(service._until_listening())
        try:
            await asyncio.wait({ended, serving}, timeout=launch.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                code, last = ended.result(), service._held_line or "It said nothing."
                message = f"{the_service} {_ending(code)} before it was ready: {last}"
                # An end by a signal, or in order, is a fault of the child's.
                raise ServiceFailed(message, code if code > 0 else OutriderError.exit_code, service._held_line)
            service._release_held_line()
            if not serving.done():
                raise ServiceFailed(f"{the_service} was not ready within {launch.ready_timeout_s:g} s.", 69)
            await serving
            service._serves = True
        except BaseException:
            service.kill()
            await service.wait()
            raise
        finally:
            ended.cancel()
            serving.cancel()
            await asyncio.wait({ended, serving})
        return service

    @property
    def address(self) -> str:
        return self.launch.listen

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Waits for the end of the child and of its output; returns its exit code, negative for a signal."""
        code = await self._process.wait()
        # Unlike awaiting the task, this leaves it running when the waiting itself is cancelled.
        await asyncio.wait({self._logging})
        return code

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Lets the child drain, kills it when it takes longer than `grace_s`, and returns its exit code."""
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

    async def _until_listening(self) -> None:
        """Returns when the child has said that it serves; never when it ends without."""
        lines = self._process.stdout
        while lines is not None and (line := await lines.readline()):
            if json.dumps({"event": LISTENING})[:-1].encode() in line:
                return
        await asyncio.Event().wait()

    async def _log_stderr(self) -> None:
        stream = self._process.stderr
        while stream is not None:
            try:
                data = await stream.readuntil()
            except asyncio.LimitOverrunError as overrun:
                data = await stream.readexactly(overrun.consumed)
            except asyncio.IncompleteReadError as end:
                data = end.partial
            if not data:
                break
            line = data.decode(errors="replace").rstrip("\r\n")
            values = log_line(line)
            if (progress := FileProgress.of(values)) is not None:
                self._progress(progress)
            if values.get("level") in {"debug", "info"} and self.launch.hides_info:
                continue
            if self._serves:
                self._pass_on(line)
            elif line.strip():
                self._release_held_line()
                self._held_line = line.strip()

    def _release_held_line(self) -> None:
        if self._held_line:
            self._pass_on(self._held_line)
            self._held_line = ""

    def _pass_on(self, line: str) -> None:
        # Where it goes may be full or gone. Were it not read any more, the child would wait, and its end be missed.
        with suppress(OSError):
            self._log(line)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Waits before restarts, in seconds: `first_s`, doubled up to `longest_s`, and anew after `healthy_s` of life."""

    first_s: float = 0.5
    longest_s: float = 10.0
    healthy_s: float = 30.0
    hopeless: frozenset[int] = HOPELESS_CODES
    """Exit codes at start after which it is not tried again."""
    ask_every_s: float = 2.0
    """Seconds between questions for a service's health; whatever it answers, it does not hang."""
    answer_s: float = 10.0
    max_misses: int = 3
    """Answers in a row that did not come in time, after which it is killed: one of a busy machine may be late."""

    @property
    def replaced_s(self) -> float:
        """The longest from when a service hangs to the start of another one in its place."""
        return self.ask_every_s + self.max_misses * self.answer_s + self.longest_s

    def delay_s(self, previous_s: float | None, ran_s: float) -> float:
        """The wait after a run of `ran_s`; `previous_s` is the wait before that run, None when there was none."""
        if previous_s is None or ran_s >= self.healthy_s:
            return self.first_s
        return min(2 * previous_s, self.longest_s)


async def misses(address: str, answer_s: float) -> bool:
    """Whether the health service at an address is silent; one that takes no calls, because it drains, is not."""
    async with open_channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=answer_s)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return False


async def metrics_miss(address: str, answer_s: float) -> bool:
    """Whether the process that serves metrics at an address is silent."""
    try:
        await asyncio.to_thread(scraped, address, NO_SERIES, answer_s)
    except TimeoutError:
        return True
    except (OSError, http.client.HTTPException):
        return False
    return False


class State(StrEnum):
    """Stage in the life of a service."""

    STARTING = "starting"
    SERVING = "serving"
    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Change:
    """A service came into another state, or on in it.

    `ending` and `delay_s` are of one that died: how, and the wait before the next try.
    """

    service: str
    state: State
    pid: int | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    ending: str = ""
    delay_s: float | None = None
    progress: FileProgress | None = None
    """Progress of a process that is starting: the file that it is at."""


class Supervisor:
    """Async context manager around services; leaving it stops them, the last started first.

    `report` gets one sentence about every death and restart, `log` the name of a service and a line of its stderr,
    `observe` every change of state.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        log: Callable[[str, str], None],
        policy: RestartPolicy | None = None,
        observe: Callable[[Change], None] = lambda _: None,
    ) -> None:
        self._report = report
        self._observe = observe
        self._log = log
        self._policy = policy or RestartPolicy()
        # By name, in the order of their start.
        self._processes: dict[str, ServiceProcess] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, *launches: Launch) -> list[str]:
        """Starts services side by side and returns their addresses in the same order, when all of them serve.

        Raises ServiceFailed about the first that does not; those that do not serve yet are killed then.
        """
        tasks: list[asyncio.Task[ServiceProcess]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._spawn(launch)) for launch in launches]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            serving = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
            self._processes |= {process.launch.name: process for process in serving}
        return [process.address for process in serving]

    async def watch(self) -> None:
        """Restarts services that end or hang, each on its own addresses, until it is cancelled.

        Raises ServiceFailed about the first whose restart fails for a reason that only the operator can remove.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._processes:
                    group.create_task(self._keep_watched(name))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def stop(self) -> None:
        """Stops all services, the last started first: a client goes before its servers. Cancel `watch` before."""
        while self._processes:
            await self._stop_one(next(reversed(self._processes)), STOP_GRACE_S)

    async def stop_together(self, grace_s: float) -> None:
        """Stops services that know nothing of each other, all at once; after grace_s they are killed."""
        await asyncio.gather(*(self._stop_one(name, grace_s) for name in self._processes))

    async def _stop_one(self, name: str, grace_s: float) -> None:
        await self._processes[name].stop(grace_s)
        # Not before: `kill` is for those that drain, too.
        del self._processes[name]
        self._observe(Change(name, State.STOPPED))

    def kill(self) -> None:
        """Ends all services at once, for a second Ctrl-C; a `stop` that waits for them returns then."""
        for process in self._processes.values():
            process.kill()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def addresses(self, name: str) -> Mapping[str, str]:
        """Addresses of a service; see Launch.addresses."""
        return self._processes[name].launch.addresses

    async def _spawn(self, launch: Launch) -> ServiceProcess:
        self._observe(Change(launch.name, State.STARTING))
        process = await ServiceProcess.start(
            launch,
            partial(self._log, launch.name),
            lambda progress: self._observe(Change(launch.name, State.STARTING, progress=progress)),
        )
        self._observe(Change(launch.name, State.SERVING, process.pid, process.launch.addresses))
        return process

    async def _keep_watched(self, name: str) -> None:
        """Keeps a service alive like `_keep_alive`, whatever comes in between: while it is unwatched, it stays dead."""
        while True:
            try:
                await self._keep_alive(name)
            except ServiceFailed:
                raise
            except Exception as error:  # noqa: BLE001 - as when there is no memory for a thread or a process
                pause_s = self._policy.longest_s
                self._report(f"Watching the {name} service failed ({error!r}); it begins again in {pause_s:g} s.")
                await asyncio.sleep(pause_s)

    async def _keep_alive(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        delay_s: float | None = None
        while True:
            process, started_s, policy = self._processes[name], loop.time(), self._policy
            # A service that hangs is made to end.
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._kill_silent(process))
                ending = _ending(await process.wait())
                if asking.done():
                    ending = f"did not answer {policy.max_misses} times within {policy.answer_s:g} s and was killed"
                asking.cancel()
            delay_s = policy.delay_s(delay_s, loop.time() - started_s)
            sentence = f"The {name} service {ending}; it is started again in {delay_s:g} s."
            while True:
                self._observe(Change(name, State.DIED, ending=ending, delay_s=delay_s))
                self._report(sentence)
                await asyncio.sleep(delay_s)
                try:
                    # On the addresses that its peers know.
                    self._processes[name] = process = await self._spawn(self._processes[name].launch)
                    break
                except ServiceFailed as error:
                    if error.code in policy.hopeless:
                        raise
                    ending, sentence = _ending(error.code), error.message
                except OSError as error:
                    # A program that is being replaced, or no room for another process.
                    ending, sentence = "was not started", f"The {name} service was not started: {error.strerror}."
                delay_s = policy.delay_s(delay_s, 0.0)
                sentence += f" The next attempt is in {delay_s:g} s."
            self._report(f"The {name} service is back on {process.address}.")

    async def _kill_silent(self, process: ServiceProcess) -> None:
        """Ends a service that has not answered several times in a row."""
        policy, num_misses, launch = self._policy, 0, process.launch
        ask = partial(metrics_miss, launch.further["metrics"]) if launch.shares_port else partial(misses, launch.listen)
        while num_misses < policy.max_misses:
            if not num_misses:
                await asyncio.sleep(policy.ask_every_s)
            num_misses = num_misses + 1 if await ask(policy.answer_s) else 0
        process.kill()
