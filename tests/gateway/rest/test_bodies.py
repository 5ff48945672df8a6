"""Bodies are limited in size, time, kind and depth before any route sees them."""

import asyncio
import gc
import json
import threading
import weakref
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, field_validator
from starlette.types import Receive, Scope, Send
from support.basics import eventually
from support.network import GET, connected, served
from support.rest.echo import JSON, SETTINGS, client, echo, posted, surface

from gateway.rest.asking.json_body import read_json
from gateway.rest.bodies import BodyLimits, ParsedBodyRoute
from gateway.rest.ids import RequestIds
from gateway.rest.server import HEAD_BYTES
from gateway.rest.settings import RestSettings
from gateway.rest.validation import TolerantBodyRoute, handle_error
from outrider.rpc.memory import RequestMemory


async def test_a_body_in_order_arrives() -> None:
    """Whole, whatever kind of JSON it says to be; and without a body there is nothing to say."""
    for kind in ("application/json", "Application/JSON; charset=UTF-8", "application/vnd.x+json"):
        assert (await posted(b'{"a": 1}', **{"content-type": kind}))[1] == {"got": '{"a": 1}'}
    assert (await posted(b"", **{"content-type": "text/plain"}))[0] == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "param"),
    [
        (b"{" + b" " * 100_000, {}, 413, None),
        (b"{}", {"content-type": "application/x-www-form-urlencoded"}, 415, "content-type"),
        (b"{}", {"content-type": "application/json; charset=utf-16"}, 415, "content-type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "content-encoding"),
        (b'{"a": {"b": NaN}}', {}, 400, "a.b"),
        (b'{"a": 1, "a": 2}', {}, 400, "a"),
        (b"[" * 65 + b"]" * 65, {}, 400, None),
        (b"[" + b"[]," * 30_000 + b"[" * 3000, {}, 400, None),
        (b"[" * 60_000, {}, 400, "body"),
    ],
)
async def test_a_body_out_of_order_is_refused(
    content: bytes, headers: dict[str, str], status: int, param: str | None
) -> None:
    """In the shape of all errors, naming the place."""
    got, told, _ = await posted(content, **headers)
    assert (got, told["error"]["param"]) == (status, param)


async def test_a_body_without_a_length_is_limited_too() -> None:
    """Chunks are counted as they come."""

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 10_000

    async with client() as http:
        assert (await http.post("/", content=chunks(), headers=JSON)).status_code == 413


async def test_a_client_that_sends_too_much_reads_why() -> None:
    """The rest of its body is dropped; closing would take the answer from it."""
    app = surface(SETTINGS)
    async with served(app) as running, httpx.AsyncClient(base_url=f"http://{running.address}") as http:
        for _ in range(2):
            reply = await http.post("/", content=b" " * 8_000_000, headers=JSON)
            assert reply.status_code == 413


async def test_bodies_together_are_limited() -> None:
    """A client that comes with more than all may hold is to come again; what an answered request held is free again."""
    app = BodyLimits(echo, RestSettings(memory=RequestMemory(240, wait_s=0)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for content, status in ((b'"' + b"x" * 20 + b'"', 200), (b'"' + b"x" * 30 + b'"', 429)) * 2:
            reply = await http.post("/", content=content, headers=JSON)
            assert (reply.status_code, "retry-after" in reply.headers) == (status, status == 429)


async def test_long_bodies_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the loop; the parser keeps every other thread from running, and several of them would keep the loop."""
    threads = []

    def parse(body: bytes, max_depth: int) -> Any:
        threads.append(threading.get_ident())
        return read_json(body, max_depth)

    monkeypatch.setattr("gateway.rest.bodies.read_json", parse)
    async with client() as http:
        long = json.dumps(["x" * 40_000])
        await asyncio.gather(*(http.post("/", content=long, headers=JSON) for _ in range(6)))
    assert len(threads) == 6
    assert len({*threads}) == 1
    assert threading.get_ident() not in threads


async def test_nothing_is_parsed_for_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others are before it; who is still there has its turn."""
    begun, goes_on, parsed = threading.Event(), threading.Event(), list[int]()

    def parse(body: bytes, max_depth: int) -> Any:
        parsed.append(len(body))
        begun.set()
        assert goes_on.wait(60)
        return read_json(body, max_depth)

    monkeypatch.setattr("gateway.rest.bodies.read_json", parse)
    memory = RequestMemory(256 << 20)
    app = RequestIds(BodyLimits(echo, RestSettings(memory=memory)), CollectorRegistry())

    def posting(num_bytes: int) -> bytes:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % num_bytes
        return head + b'"' + b"x" * (num_bytes - 2) + b'"'

    async with served(app) as running, connected(running, posting(40_000)) as (first, _):
        await asyncio.to_thread(begun.wait, 60)
        async with (
            connected(running, posting(50_000)) as (_, leaving),
            connected(running, posting(60_000)) as (last, _),
        ):
            await eventually(lambda: memory.coming.held == 150_000)
            leaving.transport.abort()
            await eventually(lambda: memory.coming.held == 100_000)
            goes_on.set()
            for reader in (first, last):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert parsed == [40_000, 60_000]
    assert memory.held == 0


async def test_what_a_refused_body_became_is_gone_with_it() -> None:
    """No circle of references keeps it until somebody looks for such."""
    app = FastAPI()
    router = APIRouter(route_class=ParsedBodyRoute)
    values = weakref.WeakSet[Held]()

    @router.post("/")
    async def take(body: Words) -> int:
        return len(body.words)

    app.include_router(router)
    app.add_exception_handler(RequestValidationError, handle_error)

    class Holding:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            held = Held(scope["state"]["json"])
            values.add(held)
            scope["state"]["json"] = held
            del held
            await app(scope, receive, send)

    limits = RequestIds(BodyLimits(Holding(), SETTINGS), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limits), base_url="http://test") as http:
        gc.disable()
        try:
            for count in (2, 20_000):
                assert (await http.post("/", json={"words": [*["x"] * count, 5]})).status_code == 400
            await eventually(lambda: not list(values))
        finally:
            gc.enable()


class Held(dict[str, Any]):
    """A body to which there can be weak references."""

    __hash__ = object.__hash__


class Words(BaseModel):
    """A body that says which thread it was checked in."""

    model_config = ConfigDict(extra="forbid", strict=True)

    words: list[str]
    threads: ClassVar[list[int]] = []

    @field_validator("words")
    @classmethod
    def note(cls, words: list[str]) -> list[str]:
        """Takes any list of words."""
        cls.threads.append(threading.get_ident())
        return words


@pytest.mark.parametrize("route", [ParsedBodyRoute, TolerantBodyRoute])
async def test_long_bodies_are_checked_where_they_were_parsed(
    route: type[APIRoute], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not on the loop as short ones are; what is wrong with one is said in the same words."""
    threads: list[int] = []
    monkeypatch.setattr(Words, "threads", threads)
    app, router = FastAPI(), APIRouter(route_class=route)

    @router.post("/")
    async def count(body: Words) -> int:
        return len(body.words)

    app.include_router(router)
    app.add_exception_handler(RequestValidationError, handle_error)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(BodyLimits(app, SETTINGS)), base_url="http://test")
    async with http:
        assert [(await http.post("/", json={"words": ["x"] * count})).json() for count in (2, 20_000)] == [2, 20_000]
        refused = [await http.post("/", json={"words": [*["x"] * count, 5]}) for count in (2, 20_000)]
    assert threads[0] == threading.get_ident()
    assert len(threads) == 2
    assert threads[1] != threading.get_ident()
    assert {reply.status_code for reply in refused} == {400}
    short, long = (reply.json()["error"]["message"] for reply in refused)
    assert long == short.replace("words.2", "words.20000")


async def test_a_body_with_two_lengths_is_refused() -> None:
    """And the connection closed: a proxy in front may have read another request than this server."""
    lengths = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + lengths
    smuggled = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    async with (
        served(surface(SETTINGS)) as running,
        connected(running, request + smuggled) as (reader, _),
    ):
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1") == 1
    assert b"ambiguous_body" in received


@pytest.mark.parametrize("num_bytes", [HEAD_BYTES // 2, HEAD_BYTES, HEAD_BYTES + 1, 40_000])
async def test_a_head_has_a_limit_to_the_byte(num_bytes: int) -> None:
    """However it comes: path and headers together, in one piece or after another request."""
    start = b"GET / HTTP/1.1\r\nhost: test\r\nx-long: "
    # Of the first line only the path counts.
    long = b"x" * (num_bytes - len("/") - len("host: test\r\n") - len("x-long: \r\n"))
    is_long = num_bytes > HEAD_BYTES
    for before in (b"", GET):
        request = before + start + long + b"\r\n\r\n"
        async with served(surface(SETTINGS)) as running, connected(running, request) as (reader, writer):
            writer.write_eof()
            answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
        assert [each[:3] for each in answers] == [b"200"] * bool(before) + [b"431" if is_long else b"200"]
        assert (b"headers_too_large" in answers[-1]) == is_long


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    """408 lets a client try again."""
    app = surface(RestSettings(body_wait_s=0.02))
    request = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
    async with served(app) as running, connected(running, request) as (reader, _):
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
