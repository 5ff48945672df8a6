"""Proxies that make a network slower: what comes in goes out a fixed time later, either way, in order and unlimited.

They live in a process of their own, so that no other work makes them late, and in a loop whose timers are not rounded
up to milliseconds, as those of epoll are.
"""

import asyncio
import multiprocessing
import selectors
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
PATIENCE_S = 60.0
SLACK = Path("/proc/self/timerslack_ns")


class WireLink(NamedTuple):
    """A service's HOST:PORT, and the seconds that each way to or from it takes longer."""

    upstream: str
    one_way_s: float


class End(asyncio.Protocol):
    """One end of a connection: what it is to say waits here for its time."""

    def __init__(self, one_way_s: float) -> None:
        self._one_way_s = one_way_s
        self._held: deque[bytes | None] = deque()
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.say_later(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self.other is not None:
            self.other.say_later(None)

    def say_later(self, data: bytes | None) -> None:
        """Sends it when its time has come; None closes the connection then."""
        self._held.append(data)
        self._loop.call_later(self._one_way_s, self._say)

    def _say(self) -> None:
        # The oldest, whichever timer this is: two of one moment may come in any order.
        data = self._held.popleft()
        assert self.transport is not None
        if data is None:
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write(data)


class Receiver(End):
    """The client's end, which is not read before the service's is there."""

    def __init__(self, link: WireLink) -> None:
        super().__init__(link.one_way_s)
        self._link = link
        self._joining: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._joining = self._loop.create_task(self._join(self.transport))

    async def _join(self, transport: asyncio.Transport) -> None:
        host, _, port = self._link.upstream.rpartition(":")
        try:
            _, self.other = await self._loop.create_connection(lambda: End(self._link.one_way_s), host, int(port))
        except OSError:
            transport.abort()
            return
        self.other.other = self
        if transport.is_closing():
            self.other.say_later(None)
        else:
            transport.resume_reading()


async def carry(links: Sequence[WireLink]) -> list[tuple[asyncio.Server, str]]:
    """Listens for each link on a free port; returns the servers with their HOST:PORT."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(partial(Receiver, link), HOST, 0) for link in links]
    return [(each, "{}:{}".format(*each.sockets[0].getsockname())) for each in servers]


@contextmanager
def delayed(links: Sequence[WireLink]) -> Iterator[list[str]]:
    """Addresses at which the links are served while the context lasts; without a delay the service's own.

    Raises RuntimeError when the proxies do not start.
    """
    slow = [link for link in links if link.one_way_s]
    if not slow:
        yield [link.upstream for link in links]
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(slow, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            if not ours.poll(PATIENCE_S):
                raise EOFError
            places = iter(ours.recv())
        except EOFError:
            raise RuntimeError("the proxies did not start") from None
        yield [next(places) if link.one_way_s else link.upstream for link in links]
    finally:
        ours.close()
        process.join()


def _serve(links: Sequence[WireLink], parent: Connection) -> None:
    """Carries until the parent closes its end, or has ended."""
    if SLACK.exists():
        # Else the system may wake a process this much later than it asked for, 50 us by default.
        SLACK.write_text("1")

    async def serve() -> None:
        carried = await carry(links)
        parent.send([address for _, address in carried])
        with suppress(EOFError):
            await asyncio.to_thread(parent.recv)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve())
