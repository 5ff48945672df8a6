"""A stream of events sends what its generator gives, keeps the connection alive, and ends the generator in time."""

import asyncio
import gc
import json
import weakref

import pytest
from starlette.types import Message, Receive, Scope, Send
from support.basics import PATIENCE_S, eventually
from support.network import GET, Source, connected, served, streaming

from gateway.rest.errors import ClientGone
from gateway.rest.sse import DONE, EventStream, data, typed, while_there
from outrider.errors import InvalidRequest

FOREVER = asyncio.Event


async def present() -> Message:
    """A client that stays."""
    await FOREVER().wait()
    return {}


async def gone() -> Message:
    """A client that has left."""
    return {"type": "http.disconnect"}


def test_frames_are_events() -> None:
    """One line of data each, with a type before it only where one is wanted."""
    assert data('{"a":"é"}') == 'data: {"a":"é"}\n\n'.encode()
    assert typed("round", "{}") == b"event: round\ndata: {}\n\n"


def test_no_reader_sees_a_line_end_in_a_payload() -> None:
    """Readers that split text as Python does take more characters for ends of lines than the standard has."""
    payload = json.dumps("a\x85b\u2028c\u2029d\r\n\x0b\x1c", ensure_ascii=False)
    for frame in (data(payload).decode(), typed("round", payload).decode()):
        line, empty = frame.splitlines()[-2:]
        assert (json.loads(line.removeprefix("data: ")), empty) == (json.loads(payload), "")


async def test_a_stream_is_its_frames_and_nothing_else() -> None:
    """In order, with the headers of an event stream; empty frames are not sent."""
    source = Source([b"", data("1"), data("2"), DONE])
    source.hold.set()
    async with served(streaming(source)) as running, connected(running) as (reader, _):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readuntil(b"0\r\n\r\n")
    assert b"content-type: text/event-stream; charset=utf-8" in head
    assert b"cache-control: no-store" in head
    assert b"x-accel-buffering: no" in head
    assert b"server:" not in head
    assert body == b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    assert source.is_closed


async def test_silence_is_filled_with_comments() -> None:
    """From the headers on, before the first frame and after the last."""
    source = Source([b""])
    async with served(streaming(source, keep_alive_s=0.01)) as running, connected(running) as (reader, _):
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await reader.readuntil(b": keep-alive\n\n")


async def test_the_generator_ends_when_the_client_leaves() -> None:
    """While nothing is sent, and in the task in which it began."""
    source = Source([data("1")])
    async with served(streaming(source)) as running:
        async with connected(running) as (reader, _):
            await reader.readuntil(b"data: 1\n\n")
            assert not source.is_closed
        await eventually(lambda: source.is_closed)


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """It loses its connection and its generator; another client of the same server goes on reading."""
    sources = [Source([data("x" * 10_000)] * 5_000), Source([data("1")])]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        source = sources[scope["path"] == "/reader"]
        await EventStream(source.run(), 60, 0.05)(scope, receive, send)

    async with served(app) as running, connected(running, GET.replace(b"/", b"/reader", 1)) as (reader, _):
        await reader.readuntil(b"data: 1\n\n")
        async with connected(running):
            await eventually(lambda: sources[0].is_closed)
            await eventually(lambda: len(running.server.server_state.connections) == 1)
        sources[1].hold.set()
        assert await reader.readuntil(b"0\r\n\r\n")


async def test_a_surprise_breaks_the_connection() -> None:
    """So that no client takes the beginning for the whole: the last chunk does not come."""
    source = Source([data("1")], error=ValueError("surprise"))
    async with served(streaming(source)) as running, connected(running) as (reader, _):
        await reader.readuntil(b"data: 1\n\n")
        source.hold.set()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"0\r\n\r\n")
    assert source.is_closed


async def test_begin_raises_what_comes_before_the_first_frame() -> None:
    """While a status can still be chosen."""
    source = Source(error=InvalidRequest("n", 9, "less"))
    source.hold.set()
    with pytest.raises(InvalidRequest):
        await EventStream(source.run(), 60, 60).begin(present)
    assert source.is_closed


async def test_begin_waits_no_longer_than_its_client() -> None:
    """A client that leaves a queue ends what waits for it."""
    source = Source()
    with pytest.raises(ClientGone):
        await EventStream(source.run(), 60, 60).begin(gone)
    source = Source([b""])
    stream = EventStream(source.run(), 60, 60)
    await stream.begin(present)
    assert not source.is_closed
    # What was begun goes on where it was.
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    source.hold.set()
    await stream({"type": "http"}, present, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert source.is_closed


class Held:
    """What an error is about."""


async def test_an_error_of_a_block_keeps_nothing_behind() -> None:
    """It is freed with all that it is about when nothing has hold of it any more, and not some time later."""

    async def fail(held: Held) -> None:
        async with while_there(present):
            raise ValueError(held)

    held = Held()
    seen = weakref.ref(held)
    gc.disable()
    try:
        try:
            await fail(held)
        except ValueError:
            del held
        # The loop forgets tasks that have ended in its next turn.
        await asyncio.sleep(0)
        assert seen() is None
    finally:
        gc.enable()
