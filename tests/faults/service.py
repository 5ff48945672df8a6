"""Services as processes of their own, model services with a proxy in front: everything that a test can do to them.

The proxy keeps its address for life, so a gateway finds the next incarnation wherever it listens.
"""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from types import TracebackType
from typing import Self

from support.network import ChaosProxy
from support.stack import DRAFT, TARGET, until_quiet

from outrider.process.children import Launch, ServiceProcess
from outrider.rpc.channels import open_channel

MODELS = {"target": TARGET, "draft": DRAFT}
# Sessions of a service that was given up while it stood still have no other end.
LEASE_S = 1.0
KV_TOKENS = 32_768


def launch_of(module: str, **flags: object) -> Launch:
    """How `python -m module` is started with flags, which are named as parameters are."""
    words = (word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value)))
    return Launch(module, (sys.executable, "-P", "-m", module, "--log-level", "warning", *words))


class Process:
    """A launch and its last incarnation. `lines` has what it logged."""

    def __init__(self, launch: Launch) -> None:
        self.lines: list[str] = []
        self._launch = launch
        self._process: ServiceProcess | None = None
        self._ending: asyncio.Task[int] | None = None

    async def __aenter__(self) -> Self:
        await self.launch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def address(self) -> str:
        """Where the process itself listens, or listened last."""
        assert self._process is not None
        return self._process.address

    @property
    def has_ended(self) -> bool:
        """Whether there is none at the moment."""
        return self._ending is None or self._ending.done()

    async def launch(self, listen: str = "127.0.0.1:0") -> str:
        """Starts the process on an address, a free one by default, and returns the address when it serves."""
        self._process = await ServiceProcess.start(replace(self._launch, listen=listen), self.lines.append)
        self._ending = asyncio.create_task(self._process.wait())
        return self._process.address

    def signal(self, number: signal.Signals) -> None:
        """Sends the process a signal; without an effect when it has ended."""
        assert self._process is not None
        if not self.has_ended:
            os.kill(self._process.pid, number)

    async def ended(self) -> int:
        """Waits for the end of the process; returns its exit code, negative for a signal."""
        assert self._ending is not None
        return await asyncio.shield(self._ending)

    async def kill(self) -> None:
        """Ends the process at once, even while it is stopped."""
        self.signal(signal.SIGKILL)
        await self.ended()


class Service(Process):
    """A model service of the embedded pair and the proxy in front of it."""

    def __init__(self, role: str) -> None:
        flags = {"model": MODELS[role], "threads": 1, "kv_tokens": KV_TOKENS, "lease_seconds": LEASE_S}
        super().__init__(launch_of(f"{role}_service", **flags))
        self.proxy = ChaosProxy(None)

    async def __aenter__(self) -> Self:
        await self.proxy.__aenter__()
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
        await self.proxy.__aexit__(None, None, None)

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        """Starts the process and leads the proxy there."""
        self.proxy.upstream = await self.launch(listen)

    async def mend(self) -> None:
        """Makes whole what a test has broken."""
        self.proxy.reset_peer()
        self.proxy.heal()
        self.signal(signal.SIGCONT)
        if self.has_ended:
            await self.launch()
        self.proxy.upstream = self.address

    async def quiet(self) -> None:
        """Waits until the process holds no session and no block."""
        async with open_channel(self.address) as channel:
            await until_quiet(channel)
