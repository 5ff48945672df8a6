"""The services of a drill, each a process of its own on a simulated device, and what can happen to them.

They outlive the gateway of one drill, so that the next one need not wait for them; what has been hurt is replaced.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.cli.local_stack import Stack, gateway_launch, model_launch
from outrider.cli.running import service_log
from outrider.model_files.generation_defaults import NONE
from outrider.process.children import HOST, ServiceProcess
from outrider.process.progress import log_line

READ_BYTES = 1 << 16
TICKS_A_S = os.sysconf("SC_CLK_TCK")
# That services are lost is what a drill is about.
NO_NEWS = {"debug", "info", "warning"}


class Partition:
    """A TCP proxy in front of one service that can stop carrying, either way, and go on again.

    What is on its way stays there, connections stay open, and new ones are taken without a word.
    """

    def __init__(self, upstream: str) -> None:
        self.address = ""
        self._upstream = upstream
        self._carries = asyncio.Event()
        self._carries.set()
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._begin, HOST, 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for each in self._connections:
            each.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def cut(self) -> None:
        self._carries.clear()

    def heal(self) -> None:
        self._carries.set()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._carry(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._carries.wait()
        host, _, port = self._upstream.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            # As without a proxy: there is nothing to connect to.
            writer.transport.abort()
            return
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An end that is reset has ended.
        with suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await self._carries.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass(slots=True)
class GatewayLog:
    """What a gateway's log says of where its sessions went."""

    places: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of each request's targets, one after the other."""

    def hear(self, line: str) -> None:
        values: dict[str, Any] = log_line(line)
        if values.get("event") == "session placed":
            self.places.setdefault(values["request_id"], []).append(values["place"].partition(" ")[0])
        elif values.get("level") not in NO_NEWS:
            service_log("gateway", line)

    @property
    def reopened(self) -> list[str]:
        """Addresses to which sessions went that had been at another one before."""
        return [address for each in self.places.values() for address in each[1:]]


class DrillFleet:
    """Targets and drafts by name; leaving the context stops them."""

    def __init__(self, targets: int, drafts: int, stretch: float, folder: Path, renewed: int = 0) -> None:
        """The gateway reads the addresses of its services from files in the folder. So many targets have other weights,
        whose tokens are the same.
        """
        self.stack = Stack(
            target=f"sim:h100-8b@rows=0.13,stretch={stretch:g}",
            draft=f"sim:h100-1b@acceptance=0.75+0.1,rows=0.15,stretch={stretch:g}",
            gateway_flags={"--no-lookup": True, "--generation-defaults": NONE, "--log-level": "debug"},
            kv_tokens=65_536,
            rest_port=0,
        )
        self.names = {
            "target": [f"target {number + 1}" for number in range(targets)],
            "draft": [f"draft {number + 1}" for number in range(drafts)],
            "renewed": [f"renewed {number + 1}" for number in range(renewed)],
        }
        self.services: dict[str, ServiceProcess] = {}
        self._folder = folder

    async def __aenter__(self) -> Self:
        try:
            await self._start(name for names in self.names.values() for name in names)
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(each.stop() for each in self.services.values()))

    def kill(self) -> None:
        """Ends all services at once."""
        for each in self.services.values():
            each.kill()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a service that has not ended."""
        os.kill(self.services[name].pid, number)

    async def replace(self, *names: str) -> None:
        """Ends services that were hurt, and starts others in their places."""
        for name in names:
            self.services[name].kill()
            await self.services.pop(name).wait()
        await self._start(names)

    async def _start(self, names: Iterable[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(self._start_one(name))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _start_one(self, name: str) -> None:
        # A simulated model is its name: one that is slower by a ten-thousandth has other weights.
        renewed = replace(self.stack, target=self.stack.target.replace("rows=0.13", "rows=0.1301"))
        role, stack = ("target", renewed) if name in self.names["renewed"] else (name.partition(" ")[0], self.stack)
        launch = replace(model_launch(role, stack), name=name)
        self.services[name] = await ServiceProcess.start(launch, partial(service_log, name))

    def list_all(self, targets: Sequence[str], drafts: Sequence[str], at: Mapping[str, str] | None = None) -> None:
        """Makes these the services that the gateway knows, `at` other addresses where it names them."""
        for role, names in (("target", targets), ("draft", drafts)):
            addresses = [(at or {}).get(name) or self.services[name].address for name in names]
            fresh = self._path(role).with_suffix(".new")
            fresh.write_text("\n".join(addresses), encoding="utf-8")
            fresh.replace(self._path(role))

    @asynccontextmanager
    async def gateway(self, log: GatewayLog) -> AsyncIterator[ServiceProcess]:
        """A new gateway of the services that are listed."""
        target, draft = (f"file:{self._path(role)}" if self.names[role] else "" for role in ("target", "draft"))
        async with AsyncExitStack() as exits:
            gateway = await ServiceProcess.start(gateway_launch(self.stack, target, draft), log.hear)
            exits.push_async_callback(gateway.stop)
            yield gateway

    def _path(self, role: str) -> Path:
        return self._folder / f"{role}s.txt"


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that processes have used so far."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS_A_S
