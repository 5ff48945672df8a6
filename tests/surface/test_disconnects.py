"""Clients that leave at any moment, and one that does not read: nothing of them stays, and no other client is hurt."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.basics import eventually
from support.rest.event_streams import check_stream
from support.rest.rest_stack import CHAT, COMPLETIONS, PATIENCE_S, RestStack, rest_stack, said

from outrider.cli.bench.common import OPENINGS

NUM_CLIENTS = 100
PLACES = 6
LONG_PROMPT = " ".join(OPENINGS * 6)[:7000]
KINDS = ("queued", "prefill", "stream", "whole", "reset", "half", "finish")


@dataclass
class Client:
    """A connection of its own, with all bytes that came."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytes = b""

    async def until(self, sign: bytes, count: int) -> bool:
        """Reads until a sign has come so often; False when the connection ended before."""
        while self.received.count(sign) < count:
            part = await self.reader.read(4096)
            if not part:
                return False
            self.received += part
        return True


async def connect(rest: RestStack, path: str, body: dict[str, Any], *, room: int | None = None) -> Client:
    """Sends a request. `room` is how many bytes the kernel may keep for us."""
    host, _, port = rest.address.rpartition(":")
    pipe = socket.socket()
    if room is not None:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    pipe.setblocking(False)
    await asyncio.get_running_loop().sock_connect(pipe, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=pipe, limit=room or 2**16)
    content = json.dumps({"model": "target", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {rest.address}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return Client(reader, writer)


async def leave_at_random(rest: RestStack, number: int) -> str:
    """A client that leaves at a moment of its kind; returns what it was."""
    chance = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    is_stream = kind not in {"whole", "half"}
    text = LONG_PROMPT if kind == "prefill" else OPENINGS[number % 50]
    length = chance.randrange(1, 6) if kind == "finish" else 400
    body = {
        "seed": number,
        "stream": is_stream,
        "max_tokens": length,
        "ignore_eos": True,
        "n": chance.choice((1, 1, 3)),
    }
    path, prompt = chance.choice(((CHAT, said(text)), (COMPLETIONS, {"prompt": text})))
    client = await connect(rest, path, {**body, **prompt})
    try:
        if kind in {"stream", "reset"}:
            await client.until(b"data: ", chance.randrange(1, 40))
        elif kind == "prefill":
            await client.until(b"HTTP/1.1 200", 1)
        elif kind == "finish":
            await client.until(b"data: [DONE]", 1)
        else:
            # Some way into the queue or the answer, measured by what others do.
            await eventually(lambda: rest.admission.running > 0)
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
    finally:
        if kind == "reset":
            client.writer.transport.abort()
        client.writer.close()
    return kind


@pytest.mark.surface
async def test_a_hundred_clients_that_leave() -> None:
    """Queued, in their prompt, in mid-stream, without a stream, by a reset: no place, session or block is left."""
    async with rest_stack(gateway={"max_requests": PLACES, "max_queue": 2 * NUM_CLIENTS}) as rest:
        kinds = await asyncio.gather(*(leave_at_random(rest, number) for number in range(NUM_CLIENTS)))
        assert set(kinds) == set(KINDS)
        await rest.quiet()
        assert await rest.ask(COMPLETIONS, prompt="Once", max_tokens=4)


@pytest.fixture
async def narrow() -> AsyncIterator[RestStack]:
    """A gateway with one place and room for some in the queue."""
    async with rest_stack(gateway={"max_requests": 1, "max_queue": 4}) as running:
        yield running


def tokens_sent(rest: RestStack) -> float:
    """Tokens that all requests together have been given."""
    assert rest.stack.gateway is not None
    value = rest.stack.gateway.frontend.metrics.generation_tokens.total
    return float(value)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_costs_no_further_round(narrow: RestStack, *, is_stream: bool) -> None:
    """Its answer ends where it left, not at its length, streamed or not; then the next one has its place."""
    body = {**said("Once"), "max_tokens": 3000, "ignore_eos": True, "speculation": {"draft_count": 2}}
    client = await connect(narrow, CHAT, {**body, "stream": is_stream})
    await eventually(lambda: tokens_sent(narrow) > 20)
    assert narrow.admission.running == 1
    before = tokens_sent(narrow)
    client.writer.close()
    await narrow.quiet()
    # What was on its way, and the round that ran; far from the 3,000 that were asked for.
    assert tokens_sent(narrow) - before < 100
    assert await narrow.ask(COMPLETIONS, prompt="Once", max_tokens=4)


async def test_who_leaves_the_queue_is_forgotten(narrow: RestStack) -> None:
    """It never starts, and those after it come forward."""
    body = {**said("Once"), "max_tokens": 3000, "ignore_eos": True, "stream": True}
    running = await connect(narrow, CHAT, body)
    await running.until(b"data: ", 2)
    queued = [await connect(narrow, CHAT, {**body, "stream": number % 2 == 0}) for number in range(3)]
    await eventually(lambda: narrow.admission.waiting == 3)
    last = asyncio.create_task(narrow.ask(COMPLETIONS, prompt="Once", max_tokens=4))
    await eventually(lambda: narrow.admission.waiting == 4)
    for client in queued:
        client.writer.close()
    await eventually(lambda: narrow.admission.waiting == 1)
    running.writer.close()
    assert (await last)["choices"]


@pytest.mark.slow
async def test_who_does_not_read_is_cut_off() -> None:
    """Its places are free again, its connection is broken, and others read the same as ever meanwhile."""
    fields: dict[str, Any] = {**said("Once"), "max_tokens": 40, "seed": 1, "logprobs": True, "top_logprobs": 2}
    async with rest_stack(gateway={"client_stall_seconds": 0.4}) as rest:
        expected = (await rest.stream(CHAT, **fields)).text()
        flood = {**said("Once"), "max_tokens": 3500, "ignore_eos": True, "n": 8, "logprobs": True, "top_logprobs": 20}
        deaf = await connect(rest, CHAT, {**flood, "stream": True}, room=4096)
        await eventually(lambda: rest.admission.running == 8)
        others = 0
        async with asyncio.timeout(PATIENCE_S):
            while rest.admission.running:
                stream = await rest.stream(CHAT, **fields)
                check_stream(stream, is_chat=True)
                assert stream.text() == expected
                others += 1
        assert others
        assert not await ends_well(deaf)


async def ends_well(client: Client) -> bool:
    """Whether a stream that is read at last has its end."""
    try:
        return await client.until(b"data: [DONE]", 1)
    except ConnectionError:
        return False
    finally:
        client.writer.close()


def test_kinds_are_mixed() -> None:
    """Each kind of leaving has its share of the clients."""
    assert min(Counter(number % len(KINDS) for number in range(NUM_CLIENTS)).values()) >= NUM_CLIENTS // len(KINDS)
