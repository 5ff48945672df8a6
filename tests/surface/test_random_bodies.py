"""Thousands of random bodies and of connections that idle or trickle, beside streams that say the same as ever."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import islice

import pytest
from support.garbage import PYTHON_TEXT
from surface.random_bodies import RandomBodies
from surface.rest_stack import COMPLETIONS, RestStack, exchange, rest_stack

from outrider.rpc.errors import UNEXPECTED_TEXT

pytestmark = pytest.mark.surface
# More of both where there is time: OUTRIDER_BODIES=20000.
NUM_BODIES = int(os.environ.get("OUTRIDER_BODIES", "600"))
NUM_CONNECTIONS, NUM_STREAMS, AT_A_TIME = max(100, NUM_BODIES // 10), 16, 8
# What they send and never end: nothing, half a head, half a body.
BEGUN = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nx: ",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n",
)
STORY = {"prompt": "Once upon a time", "max_tokens": 64, "seed": 7, "ignore_eos": True}


@pytest.fixture
async def rest() -> AsyncIterator[RestStack]:
    """A stack whose answers are short also where nothing limits them but the room that there is."""
    async with rest_stack(kv_tokens=8192, gateway={"target_stall_seconds": 300.0}) as running:
        yield running


def fault(reply: bytes) -> str | None:
    """What is wrong with a reply to whatever was sent."""
    head, _, body = reply.partition(b"\r\n\r\n")
    status, text = int(head.split()[1]) if head else 0, body.decode(errors="replace")
    if status == 0 or (status >= 500 and status not in {503, 504}) or UNEXPECTED_TEXT in text:
        return f"status {status}"
    if status >= 400 and (PYTHON_TEXT.search(text) or len(text) > 2000):
        return f"status {status} with {len(text)} characters"
    return None


async def trickle(address: str, begun: bytes) -> None:
    """A connection that sends a byte now and then, until it is cut off."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(begun)
        while not reader.at_eof():
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1024), 1.0)
            if begun:
                writer.write(b"x")
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.timeout(3600)
async def test_nothing_breaks_and_nobody_suffers(rest: RestStack) -> None:
    """No fault of the server's, no Python text, the same story in every stream, and all descriptors back."""
    document = (await rest.http.get("/openapi.json")).json()
    bodies = islice(RandomBodies(document, seed=7), NUM_BODIES)
    faults = list[str]()
    expected, is_over = (await rest.stream(COMPLETIONS, **STORY)).text(), False
    await rest.quiet()
    descriptors = len(os.listdir("/proc/self/fd"))

    async def ask() -> None:
        for path, body in bodies:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            reply = await exchange(rest.address, head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            if found := fault(reply):
                faults.append(f"{found} for {path} {body[:2000]!r}: {reply[-500:]!r}")

    async def listen() -> None:
        while not is_over:
            assert (await rest.stream(COMPLETIONS, **STORY)).text() == expected

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CONNECTIONS):
            group.create_task(trickle(rest.address, BEGUN[number % len(BEGUN)]))
        streams = [group.create_task(listen()) for _ in range(NUM_STREAMS)]
        await asyncio.gather(*(ask() for _ in range(AT_A_TIME)))
        is_over = True
        await asyncio.gather(*streams)
    assert not faults, "\n".join(faults[:10])
    await rest.quiet()
    # What the client keeps open for the next streams, of which both ends are this process's.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2 * NUM_STREAMS
