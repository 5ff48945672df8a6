"""Keeps a set of services running: starts them, restarts what dies on the same ports, stops them in reverse order.

Knows nothing about models or the terminal. What to do about a death, how long to wait before a restart or to give up,
is decided by pure functions.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Self

from outrider.service_process import Launch, ServiceFailed, ServiceProcess, ending

# Wrong usage and bad configuration, of sysexits.h: only the operator can change what a restart would find again.
HOPELESS_CODES = frozenset({64, 78})


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

    @staticmethod
    def may_retry(code: int) -> bool:
        """Whether a service whose restart ended with this exit code is tried once more."""
        return code not in HOPELESS_CODES


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


def unobserved(_: Change) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class _Service:
    """A launch and its current incarnation. The launch has the addresses of the first, which outlive it."""

    launch: Launch
    process: ServiceProcess


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
        observe: Callable[[Change], None] = unobserved,
    ) -> None:
        self._report = report
        self._observe = observe
        self._log = log
        self._policy = policy or RestartPolicy()
        self._services: list[_Service] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, *launches: Launch) -> list[str]:
        """Starts services side by side and returns their addresses in the same order, when all of them serve.

        Raises ServiceFailed about the first that does not; the others of the call are killed then.
        """
        tasks = [asyncio.create_task(self._spawn(launch)) for launch in launches]
        try:
            processes = await asyncio.gather(*tasks)
        except BaseException:
            await _abandon(tasks)
            raise
        started = [
            _Service(launch.at(process.addresses), process) for launch, process in zip(launches, processes, strict=True)
        ]
        self._services += started
        return [service.process.address for service in started]

    async def watch(self) -> None:
        """Restarts services that end, each on its own addresses, until it is cancelled.

        Raises ServiceFailed about the first whose restart fails for a reason that only the operator can remove.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for service in self._services:
                    group.create_task(self._keep_alive(service))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def stop(self) -> None:
        """Stops all services, the last started first: who asks goes before who answers. Cancel `watch` before."""
        while self._services:
            service = self._services[-1]
            await service.process.stop()
            self._services.pop()
            self._observe(Change(service.launch.name, State.STOPPED))

    def kill(self) -> None:
        """Ends all services at once, for a second Ctrl-C; a `stop` that waits for them returns then."""
        for service in self._services:
            service.process.kill()

    def pid(self, name: str) -> int:
        """Process id of the current incarnation of a service."""
        return next(service.process.pid for service in self._services if service.launch.name == name)

    def addresses(self, name: str) -> Mapping[str, str]:
        """Where the current incarnation of a service answers; see ServiceProcess.addresses."""
        return next(service.process.addresses for service in self._services if service.launch.name == name)

    async def _spawn(self, launch: Launch) -> ServiceProcess:
        self._observe(Change(launch.name, State.STARTING))
        process = await ServiceProcess.start(launch, launch.listen, partial(self._log, launch.name))
        self._observe(Change(launch.name, State.SERVING, process.pid, process.addresses))
        return process

    async def _keep_alive(self, service: _Service) -> None:
        loop = asyncio.get_running_loop()
        name, delay_s = service.launch.name, None
        while True:
            started_s = loop.time()
            code = await service.process.wait()
            delay_s = self._policy.delay_s(delay_s, loop.time() - started_s)
            self._observe(Change(name, State.DIED, ending=ending(code), delay_s=delay_s))
            self._report(f"The {name} service {ending(code)}; it is started again in {delay_s:g} s.")
            delay_s = await self._restart(service, delay_s)

    async def _restart(self, service: _Service, delay_s: float) -> float:
        """Tries until the service serves again, on the addresses that its peers know; returns the last wait."""
        while True:
            await asyncio.sleep(delay_s)
            try:
                service.process = await self._spawn(service.launch)
            except ServiceFailed as error:
                if not self._policy.may_retry(error.code):
                    raise
                delay_s = self._policy.delay_s(delay_s, 0.0)
                self._observe(Change(service.launch.name, State.DIED, ending=ending(error.code), delay_s=delay_s))
                self._report(f"{error.message} The next attempt is in {delay_s:g} s.")
            else:
                self._report(f"The {service.launch.name} service is back on {service.process.address}.")
                return delay_s


async def _abandon(tasks: list[asyncio.Task[ServiceProcess]]) -> None:
    """Ends what a failed start leaves: attempts under way, and services that serve already."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, ServiceProcess):
            result.kill()
            await result.wait()
