"""A client that is closed while somebody reads, and calls of it afterwards, against a gateway that never ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.command_line import ScriptedGateway, scripted_gateway

from outrider.client import AsyncClient, AsyncStream, Cancelled, Client

CLOSED_MEANWHILE = r"^The client was closed before the answer had ended\.$"
CLOSED_BEFORE = r"^The client is closed; make another one for further requests\.$"
CALL_CANCELLED = r"^The call was cancelled before its answer had ended\.$"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as servicer:
        yield servicer


async def next_of(stream: AsyncStream) -> object:
    return await anext(stream)


async def pieces_of(stream: AsyncStream) -> object:
    return [piece async for piece in stream.text()]


async def result_of(stream: AsyncStream) -> object:
    return await stream.result()


@pytest.mark.parametrize("read", [next_of, pieces_of, result_of])
async def test_closing_ends_a_task_that_reads(
    gateway: ScriptedGateway, read: Callable[[AsyncStream], Awaitable[object]]
) -> None:
    """With an error of the client: no caller cancelled the task."""
    client = AsyncClient(gateway.address)
    stream = client.generate("wait")
    await anext(stream)
    reading = asyncio.ensure_future(read(stream))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(Cancelled, match=CLOSED_MEANWHILE):
        await reading
    with pytest.raises(Cancelled, match=CLOSED_MEANWHILE):
        await anext(stream)


async def test_closing_is_an_error_for_a_task_group(gateway: ScriptedGateway) -> None:
    """The group raises it, instead of taking its task for one that was cancelled."""

    async def close_while_a_group_reads() -> None:
        client = AsyncClient(gateway.address)
        async with asyncio.TaskGroup() as group:
            group.create_task(client.generate("wait").result())
            await asyncio.sleep(0)
            await client.close()

    with pytest.raises(ExceptionGroup) as raised:
        await close_while_a_group_reads()
    [error] = raised.value.exceptions
    assert isinstance(error, Cancelled)


async def test_a_time_limit_of_asyncio_stays_one(gateway: ScriptedGateway) -> None:
    """TimeoutError, though the call is cancelled by it; reading on raises why it ended."""
    async with AsyncClient(gateway.address) as client:
        stream = client.generate("wait")
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await stream.result()
        with pytest.raises(Cancelled, match=CALL_CANCELLED):
            await stream.result()


async def test_closing_ends_a_thread_that_reads(gateway: ScriptedGateway) -> None:
    """The same without an event loop: the gateway still answers, so its loss is not what is reported."""
    client = Client(gateway.address)
    stream = client.generate("wait")
    await asyncio.to_thread(next, stream)
    reading = asyncio.ensure_future(asyncio.to_thread(stream.result))
    await asyncio.to_thread(client.close)
    with pytest.raises(Cancelled, match=CLOSED_MEANWHILE):
        await reading


@pytest.mark.parametrize("ask", [lambda client: client.generate("Hello"), lambda client: client.chat(MESSAGES)])
async def test_a_closed_client_says_so(gateway: ScriptedGateway, ask: Callable[[Any], object]) -> None:
    """Whether or not it was ever connected; closing again does nothing."""
    never_used, used, blocking = AsyncClient(gateway.address), AsyncClient(gateway.address), Client(gateway.address)
    await used.generate("Hello").result()
    for client in (never_used, used):
        await client.close()
        await client.close()
    blocking.close()
    blocking.close()
    for closed in (never_used, used, blocking):
        with pytest.raises(Cancelled, match=CLOSED_BEFORE):
            ask(closed)
    assert len(gateway.requests) == 1
