"""The slow wire: what goes through it, when at the earliest, and how connections end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench.pair.wire import WireLink, carry, delayed

ONE_WAY_S = 0.01


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says what it hears, and closes at its end."""
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def slow_echo() -> AsyncIterator[str]:
    """Address of a proxy in front of a server that echoes."""
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        upstream = "{}:{}".format(*server.sockets[0].getsockname())
        [(proxy, address)] = await carry([WireLink(upstream, ONE_WAY_S)])
        async with proxy:
            yield address


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to HOST:PORT."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_every_byte_comes_in_order_and_not_before_its_time() -> None:
    """Many pieces there and back, the first of them after two ways; then both ends close."""
    async with slow_echo() as address:
        reader, writer = await connect(address)
        said, started_s = [bytes([number]) * (number * 37 + 1) for number in range(200)], time.perf_counter()
        for piece in said:
            writer.write(piece)
            await asyncio.sleep(0)
        first = await reader.readexactly(1)
        assert time.perf_counter() - started_s >= 2 * ONE_WAY_S
        assert first + await reader.readexactly(sum(map(len, said)) - 1) == b"".join(said)
        writer.write_eof()
        assert await reader.read() == b""


async def test_messages_share_the_way() -> None:
    """Twenty that follow one another at once are back before twenty of which each waits for the one before."""
    async with slow_echo() as address:
        ended: list[str] = []

        async def say(name: str, *, waits: bool) -> None:
            reader, writer = await connect(address)
            for _ in range(20):
                writer.write(b"x")
                if waits:
                    await reader.readexactly(1)
                await asyncio.sleep(0)
            if not waits:
                await reader.readexactly(20)
            ended.append(name)
            writer.close()

        await asyncio.gather(say("in turns", waits=True), say("at once", waits=False))
        assert ended == ["at once", "in turns"]


async def test_a_service_that_is_gone_refuses() -> None:
    """The connection ends instead of hanging."""
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        upstream = "{}:{}".format(*server.sockets[0].getsockname())
    [(proxy, address)] = await carry([WireLink(upstream, ONE_WAY_S)])
    async with proxy:
        reader, _ = await connect(address)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""


def test_without_a_delay_there_is_nothing_between() -> None:
    """And with one the other links are left alone; the proxies' process ends with the context."""
    with delayed([WireLink("127.0.0.1:1", 0.0)]) as places:
        assert places == ["127.0.0.1:1"]
    with delayed([WireLink("127.0.0.1:1", 0.0), WireLink("127.0.0.1:2", ONE_WAY_S)]) as places:
        assert places[0] == "127.0.0.1:1"
        assert places[1] != "127.0.0.1:2"
