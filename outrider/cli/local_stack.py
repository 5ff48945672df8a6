"""The processes of a stack on this machine: which there are, how they start, restart and stop, and when they serve.

A child takes `--listen HOST:PORT`, a `--WHAT-listen` for whatever else it serves, and `--stop-with-stdin`. It serves
when its gRPC health service says so. It logs to stderr, and drains and exits with 0 at the end of its stdin: so it
never outlives this process, however this process ends.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import OutriderError
from outrider.model_names import SIM_DRAFT, embedded_model, parse, parse_simulated
from outrider.model_service.settings import check_model

HOST = "127.0.0.1"
# Longer than a service takes to drain: it ends by itself, killed is only what hangs.
STOP_GRACE_S = 35.0
POLL_S = 0.02
# Else the pauses between attempts grow, while a model loads, to what would delay every start.
QUICK_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100))
MAX_LINE_BYTES = 1 << 20
# gRPC's core writes lines of its own to stderr, for instance about a taken port; a child's last line is its sentence.
CHILD_DEFAULTS = {"GRPC_VERBOSITY": "NONE"}
# Read by the hub's library.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
# Wrong usage and bad configuration, of sysexits.h: only the operator can change what a restart would find again.
HOPELESS_CODES = frozenset({64, 78})


class ServiceFailed(OutriderError):
    """A service did not start; the operator has to act on the sentence that it left. Carries its exit code."""

    status = "UNAVAILABLE"
    reason = "SERVICE_FAILED"

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code=code)
        self.code = code


def free_port(host: str) -> int:
    """A port that is free, and for a minute is given to nobody who wants any port.

    Its last connection has just been closed from this side, and until the system forgets that connection the port goes
    only to those who name it. So a child has the time to load its model.
    """
    with socket.create_server((host, 0)) as listener, socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()
        port: int = listener.getsockname()[1]
        return port


def port_error(port: int) -> OSError | None:
    """Why no process can listen on a port of this machine; None where one can."""
    with socket.socket() as probe:
        # Without this, connections that ended a moment ago would look like a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error
    return None


def _chosen(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{free_port(host)}" if port == "0" else address


@dataclass(frozen=True, slots=True)
class Launch:
    """How a service is started: argv without addresses, those wanted (port 0: any), seconds until it serves."""

    name: str
    command: tuple[str, ...]
    listen: str = f"{HOST}:0"
    ready_timeout_s: float = 600.0
    further: Mapping[str, str] = field(default_factory=dict)
    """Where else it listens, by what is served there; empty for nowhere."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that hold for it whatever this process has."""

    @property
    def argv(self) -> tuple[str, ...]:
        further = (word for what, where in self.further.items() for word in (f"--{what}-listen", where))
        return (*self.command, *further, "--listen", self.listen, "--stop-with-stdin")

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where it serves: `address` for gRPC, and what else there is by its name."""
        return {"address": self.listen, **{what: where for what, where in self.further.items() if where}}

    def on_chosen_ports(self) -> Self:
        """The same with a free port wherever any will do."""
        further = {what: _chosen(where) for what, where in self.further.items()}
        return replace(self, listen=_chosen(self.listen), further=further)

    async def until_serving(self) -> None:
        """Returns when the health service says SERVING, and all other addresses take connections."""
        async with grpc.aio.insecure_channel(self.listen, options=QUICK_RECONNECT) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                # A broken connection is no failure: of a child that died, its exit code shows it.
                with suppress(grpc.aio.AioRpcError):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                await asyncio.sleep(POLL_S)
        # The gateway answers gRPC a moment before REST.
        for address in filter(None, self.further.values()):
            host, _, port = address.rpartition(":")
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                    break
                await asyncio.sleep(POLL_S)


def _ending(code: int) -> str:
    """How a process ended, for a sentence; exit codes below 0 are signals, as asyncio has it."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


class ServiceProcess:
    """A running child, made by `start`. Its `launch` names the ports that it has."""

    def __init__(self, launch: Launch, process: asyncio.subprocess.Process, log: Callable[[str], None]) -> None:
        self.launch = launch
        self._process = process
        self._log = log
        self._serves = False
        # Until the child serves, its last line is held back: when it ends, that is the sentence that says why.
        self._held_line = ""
        self._logging = asyncio.create_task(self._log_stderr())

    @classmethod
    async def start(cls, launch: Launch, log: Callable[[str], None]) -> Self:
        """Starts the child and returns when it serves. `log` gets every line of its stderr.

        Raises ServiceFailed with the child's own last sentence when it ends first, or when the time is up.
        """
        launch = launch.on_chosen_ports()
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            # A session of its own, so that Ctrl-C in the terminal reaches the parent alone and services stop in order.
            start_new_session=True,
            env={**CHILD_DEFAULTS, **os.environ, **launch.environment},
        )
        service, the_service = cls(launch, process, log), f"The {launch.name} service"
        ended, serving = asyncio.create_task(service.wait()), asyncio.create_task(launch.until_serving())
        try:
            await asyncio.wait({ended, serving}, timeout=launch.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                code, last = ended.result(), service._held_line or "It said nothing."
                # An end by a signal, or in order, is a fault of the child's.
                raise ServiceFailed(
                    f"{the_service} {_ending(code)} before it was ready: {last}", code if code > 0 else 70
                )
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
            if self._serves:
                self._log(line)
            elif line.strip():
                self._release_held_line()
                self._held_line = line.strip()

    def _release_held_line(self) -> None:
        if self._held_line:
            self._log(self._held_line)
            self._held_line = ""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Waits before restarts, in seconds: `first_s`, doubled up to `longest_s`, and anew after `healthy_s` of life."""

    first_s: float = 0.5
    longest_s: float = 10.0
    healthy_s: float = 30.0

    def delay_s(self, previous_s: float | None, ran_s: float) -> float:
        """The wait after a run of `ran_s`; `previous_s` is the wait before that run, None when there was none."""
        if previous_s is None or ran_s >= self.healthy_s:
            return self.first_s
        return min(2 * previous_s, self.longest_s)


class State(StrEnum):
    """Where a service is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Change:
    """A service came into another state. The last two are of one that died: how, and the wait before the next try."""

    service: str
    state: State
    pid: int | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    ending: str = ""
    delay_s: float | None = None


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
        """Restarts services that end, each on its own addresses, until it is cancelled.

        Raises ServiceFailed about the first whose restart fails for a reason that only the operator can remove.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._processes:
                    group.create_task(self._keep_alive(name))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def stop(self) -> None:
        """Stops all services, the last started first: a client goes before its servers. Cancel `watch` before."""
        while self._processes:
            name, process = next(reversed(self._processes.items()))
            await process.stop()
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
        """Where a service answers; see Launch.addresses."""
        return self._processes[name].launch.addresses

    async def _spawn(self, launch: Launch) -> ServiceProcess:
        self._observe(Change(launch.name, State.STARTING))
        process = await ServiceProcess.start(launch, partial(self._log, launch.name))
        self._observe(Change(launch.name, State.SERVING, process.pid, process.launch.addresses))
        return process

    async def _keep_alive(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        delay_s: float | None = None
        while True:
            started_s = loop.time()
            code = await self._processes[name].wait()
            delay_s = self._policy.delay_s(delay_s, loop.time() - started_s)
            sentence = f"The {name} service {_ending(code)}; it is started again in {delay_s:g} s."
            while True:
                self._observe(Change(name, State.DIED, ending=_ending(code), delay_s=delay_s))
                self._report(sentence)
                await asyncio.sleep(delay_s)
                try:
                    # On the addresses that its peers know.
                    self._processes[name] = process = await self._spawn(self._processes[name].launch)
                    break
                except ServiceFailed as error:
                    if error.code in HOPELESS_CODES:
                        raise
                    code = error.code
                    delay_s = self._policy.delay_s(delay_s, 0.0)
                    sentence = f"{error.message} The next attempt is in {delay_s:g} s."
            self._report(f"The {name} service is back on {process.address}.")


@dataclass(frozen=True, slots=True)
class Stack:
    """What the three processes are started with; a port of 0 takes a free one, no draft means plain decoding.

    draft_dtype None means that of the target, top_n None the draft service's own default, and rest_port None no REST.
    """

    target: str
    draft: str | None
    dtype: str = "bfloat16"
    device: str = "cpu"
    draft_device: str = "cpu"
    threads: int = 1
    draft_threads: int = 1
    gateway_port: int = 0
    rest_port: int | None = None
    draft_port: int = 0
    target_port: int = 0
    draft_dtype: str | None = None
    top_n: int | None = None
    prefix_cache: bool = True
    offline: bool = False
    """Downloads nothing: a hub id that is not on this machine is refused."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the processes of a running stack answer."""

    gateway: str
    target: str
    draft: str | None
    rest: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    """HOST:PORT of /metrics by process; that of the gateway is its REST."""


def choose_models(target: str | None, draft: str | None, *, no_draft: bool) -> tuple[str, str | None]:
    """The pair to serve; sized and simulated models by their explicit names. Other targets need a draft of their own.

    The embedded draft fits the embedded target and the sized ones, which have its vocabulary, and a simulated target
    has a simulated draft. Raises ModelRefused when an embedded model is wanted and missing, and about a path that is no
    folder.
    """
    is_own = target is None or parse(target) is not None
    is_simulated = target is not None and parse_simulated(target) is not None
    target = embedded_model("target") if target is None else check_model("--target", target)
    if draft is not None:
        draft = check_model("--draft", draft, "draft")
    if no_draft:
        return target, None
    if draft is None and is_simulated:
        draft = SIM_DRAFT
    return target, draft or (embedded_model("draft") if is_own else None)


def model_launch(role: str, stack: Stack) -> Launch:
    """The draft or the target service."""
    is_target = role == "target"
    flags: dict[str, str | None] = {
        "--model": stack.target if is_target else stack.draft or "",
        "--device": stack.device if is_target else stack.draft_device,
        "--dtype": stack.dtype if is_target else stack.draft_dtype or stack.dtype,
        "--threads": str(stack.threads if is_target else stack.draft_threads),
    }
    if stack.top_n is not None and not is_target:
        flags["--top-n"] = str(stack.top_n)
    if not stack.prefix_cache:
        flags["--no-prefix-cache"] = None
    # Named, because a variable of the environment would name one port for all three.
    further = {"metrics": f"{HOST}:0"}
    port = stack.target_port if is_target else stack.draft_port
    return _launch(role, f"{role}_service", flags, port, further, stack)


def gateway_launch(stack: Stack, target_address: str, draft_address: str | None) -> Launch:
    """The gateway in front of services that serve already."""
    # Reflection, because whoever starts a stack by hand wants to look at it with grpcurl.
    draft_address = draft_address or ""
    flags = {"--target": target_address, "--draft": draft_address, "--tokenizer": stack.target, "--reflection": None}
    # REST has the metrics as well.
    further = {"rest": "" if stack.rest_port is None else f"{HOST}:{stack.rest_port}", "metrics": ""}
    return _launch("gateway", "gateway", flags, stack.gateway_port, further, stack)


def _launch(
    name: str, module: str, flags: Mapping[str, str | None], port: int, further: Mapping[str, str], stack: Stack
) -> Launch:
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    words = [word for flag in flags.items() for word in flag if word is not None]
    command = (sys.executable, "-P", "-m", module, *words, "--log-level", "warning")
    return Launch(name, command, f"{HOST}:{port}", further=further, environment=OFFLINE if stack.offline else {})


def metrics_address(addresses: Mapping[str, str]) -> str | None:
    """Where a process serves /metrics, among all its addresses; None where it has none."""
    return addresses.get("metrics") or addresses.get("rest")


async def start_stack(supervisor: Supervisor, stack: Stack) -> Addresses:
    """Starts the services side by side, then the gateway. Raises ServiceFailed."""
    roles = ["target", "draft"] if stack.draft else ["target"]
    target, *drafts = await supervisor.start(*(model_launch(role, stack) for role in roles))
    draft = drafts[0] if drafts else None
    [gateway] = await supervisor.start(gateway_launch(stack, target, draft))
    places = {role: metrics_address(supervisor.addresses(role)) for role in ("gateway", *roles)}
    metrics = {role: place for role, place in places.items() if place}
    return Addresses(gateway, target, draft, supervisor.addresses("gateway").get("rest"), metrics)
