"""Bytes that are no request, or one that no honest client sends: a clear refusal, and nothing stays."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest
import pytest_asyncio
from support.basics import eventually
from support.requests.garbage import PYTHON_TEXT
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, exchange, rest_stack, said

from gateway.rest.settings import RestSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOST = b"Host: localhost\r\n"
TYPED = HOST + b"Content-Type: application/json\r\n"
GOOD = json.dumps({"model": "target", **said("Once"), "max_tokens": 2}).encode()
DEEP = 10_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rest() -> AsyncIterator[RestStack]:
    """One stack, which takes all of it; bodies must come within a moment."""
    of = RestSettings.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestSettings, "of", lambda *given: replace(of(*given), body_wait_s=0.3))
        async with rest_stack() as running:
            yield running


def post(body: bytes, headers: bytes = TYPED, path: str = CHAT) -> bytes:
    """A request with a body of the length it says."""
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), headers, len(body), body)


def with_prompt(text: bytes) -> bytes:
    """A body whose prompt is so written."""
    return b'{"model":"target","max_tokens":2,"prompt":%b}' % text


# What is sent, the status, and a word of the answer.
BODIES: dict[str, tuple[bytes, int, str]] = {
    "empty": (post(b""), 400, ""),
    "no JSON": (post(b"Once upon a time"), 400, "JSON"),
    "half": (post(GOOD[:-5]), 400, "JSON"),
    "two": (post(GOOD + GOOD), 400, "JSON"),
    "a list": (post(b"[%b]" % GOOD), 400, ""),
    "null": (post(b"null"), 400, ""),
    "a number": (post(b"1e999"), 400, ""),
    "a text": (post(b'"' + b"x" * 1000 + b'"'), 400, ""),
    "bad UTF-8": (post(GOOD.replace(b"Once", b"\xff\xfe")), 400, "UTF-8"),
    "half a character": (post(GOOD.replace(b"Once", b"\xe6\x97")), 400, "UTF-8"),
    "surrogate in UTF-8": (post(GOOD.replace(b"Once", b"\xed\xa0\xbd")), 400, "UTF-8"),
    "UTF-16": (post(GOOD.decode().encode("utf-16")), 400, ""),
    "byte order mark": (post(b"\xef\xbb\xbf" + GOOD), 400, ""),
    "deep lists": (post(b"[" * DEEP + b"]" * DEEP), 400, "deep"),
    "deep objects": (post(b'{"a":' * DEEP + b"1" + b"}" * DEEP), 400, "deep"),
    "deep prompt": (post(with_prompt(b"[" * DEEP + b"]" * DEEP), path=COMPLETIONS), 400, "deep"),
    "deep and open": (post(b"[" * 1_000_000), 400, ""),
    "many digits": (post(GOOD.replace(b": 2}", b": " + b"9" * 100_000 + b"}")), 400, "max_tokens"),
    "many digits alone": (post(b"9" * 100_000), 400, "body"),
    "a long name": (post(GOOD[:-1] + b',"%b":1}' % (b"x" * 1_000_000)), 400, "xxx"),
    "a long name twice": (post(b'{"%b":1,"%b":1}' % (b"x" * 1_000_000, b"x" * 1_000_000)), 400, "xxx"),
    "control characters": (post(GOOD.replace(b"Once", b"\x00\x01")), 400, ""),
    "repeated key": (post(GOOD[:-1] + b',"max_tokens":3}'), 400, "max_tokens"),
    "repeated key within": (post(GOOD[:-1] + b',"speculation":{"rule":"match","rule":"ratio"}}'), 400, "rule"),
    "lone surrogate as a key": (post(GOOD[:-1] + rb',"\ud83d":1}'), 400, ""),
    "five megabytes": (post(with_prompt(b'"%b"' % (b"x" * 5_000_000)), path=COMPLETIONS), 413, "bytes"),
    "many keys": (post(b"{%b}" % b",".join(b'"%d":1' % number for number in range(140_000))), 400, "keys"),
    "more keys": (post(b"{%b}" % b",".join(b'"%d":1' % number for number in range(200_000))), 400, "200000 strings"),
    "many keys in many messages": (
        post(json.dumps({"messages": [dict.fromkeys(map(str, range(100)), 1)] * 1400}).encode()),
        400,
        "keys",
    ),
    "many keys and one twice": (
        post(b'{%b,"last":1,"last":2}' % b",".join(b'"%d":1' % number for number in range(49_000))),
        400,
        "last",
    ),
    "many messages": (post(json.dumps({**json.loads(GOOD), "messages": [{}] * 49_000}).encode()), 400, "messages"),
    "more messages": (
        post(json.dumps({**json.loads(GOOD), "messages": [{}] * 60_000}).encode()),
        400,
        "lists and objects",
    ),
    "a form": (post(b"model=target", HOST + b"Content-Type: application/x-www-form-urlencoded\r\n"), 415, ""),
    "no type": (post(GOOD, HOST), 415, "content-type"),
    "another encoding": (post(GOOD, HOST + b"Content-Type: application/json; charset=utf-16\r\n"), 415, "content-type"),
    "compressed": (post(GOOD, TYPED + b"Content-Encoding: gzip\r\n"), 415, ""),
}
LINES: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\r\n\r\n", 400),
    "no version": (b"POST /v1/chat/completions\r\n\r\n", 400),
    "negative length": (b"POST %b HTTP/1.1\r\n%bContent-Length: -1\r\n\r\n" % (CHAT.encode(), TYPED), 400),
    "two lengths": (
        b"POST %b HTTP/1.1\r\n%bContent-Length: 4\r\nContent-Length: 5\r\n\r\n" % (CHAT.encode(), TYPED),
        400,
    ),
    "no such chunk": (
        b"POST %b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\nZZ\r\n" % (CHAT.encode(), TYPED),
        400,
    ),
    "huge header": (b"GET /live HTTP/1.1\r\n%bX: %b\r\n\r\n" % (HOST, b"x" * 200_000), 431),
    "many headers": (b"GET /live HTTP/1.1\r\n%b%b\r\n" % (HOST, b"X: x\r\n" * 40_000), 431),
}


def parts(reply: bytes) -> tuple[int, bytes]:
    """Status and body of a response."""
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


@pytest.mark.parametrize("name", BODIES)
async def test_bad_body(rest: RestStack, name: str) -> None:
    """The status says whose fault it is, the sentence which, in the shape of every other error."""
    sent, status, word = BODIES[name]
    got, body = parts(await exchange(rest.address, sent))
    error = json.loads(body)["error"]
    assert (got, error["type"]) == (status, "invalid_request_error"), error
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"]
    assert len(error["message"]) < 1000
    assert not PYTHON_TEXT.search(error["message"]), error["message"]


@pytest.mark.parametrize("name", LINES)
async def test_no_http(rest: RestStack, name: str) -> None:
    """It is refused before any route sees it."""
    sent, status = LINES[name]
    reply = await exchange(rest.address, sent)
    # Who sends so much that it is not read to its end may lose the answer with it.
    if reply or len(sent) < 100_000:
        got, body = parts(reply)
        assert got == status
        assert not PYTHON_TEXT.search(body.decode())


async def test_long_body_without_a_length(rest: RestStack) -> None:
    """In chunks, too, it is refused where it passes the limit."""
    head = b"POST %b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n" % (CHAT.encode(), TYPED)
    chunk = b"%x\r\n%b\r\n" % (1 << 16, b" " * (1 << 16))
    status, body = parts(await exchange(rest.address, head + chunk * 80))
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


async def test_body_that_does_not_come(rest: RestStack) -> None:
    """It is waited for, for a while; a client that may try again learns so."""
    status, body = parts(await exchange(rest.address, post(GOOD)[:-5]))
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")


async def test_half_a_body_and_gone(rest: RestStack) -> None:
    """There is no client to answer, and nothing is kept."""
    assert rest.stack.gateway is not None
    for cut in (1, 40, len(GOOD) - 1):
        await exchange(rest.address, post(GOOD)[: -len(GOOD) + cut], ends=True)
    await rest.quiet()


async def test_bytes_that_come_one_by_one(rest: RestStack) -> None:
    """A slow client is a client."""
    host, _, port = rest.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for byte in post(GOOD):
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_requests_behind_each_other(rest: RestStack) -> None:
    """Two at once on a connection are answered in turn; a refused body takes no second request with it."""
    host, _, port = rest.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(post(GOOD) + post(GOOD))
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
    writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/none", 404),
        ("POST", "/", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/static/../app.py", 404),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/v1/models/..%2f..%2fetc", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
async def test_what_is_not_there(rest: RestStack, method: str, path: str, status: int) -> None:
    """Unknown paths and methods are refused in the same shape."""
    line = b"%b %b HTTP/1.1\r\n%bContent-Length: 0\r\n\r\n" % (method.encode(), path.encode(), TYPED)
    got, body = parts(await exchange(rest.address, line))
    assert got == status
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.slow
async def test_others_are_served_meanwhile(rest: RestStack) -> None:
    """While all of it comes at once, a good request says what it says alone, and in the end all is quiet."""
    ask = partial(rest.ask, COMPLETIONS, prompt="Once", max_tokens=24, seed=1)
    expected = (await ask())["choices"]
    attack = [sent for sent, *_ in BODIES.values()] + [sent for sent, _ in LINES.values()]
    hostile = [asyncio.create_task(exchange(rest.address, sent)) for sent in attack]
    replies = await asyncio.gather(*(ask() for _ in range(4)))
    await asyncio.gather(*hostile, return_exceptions=True)
    assert [reply["choices"] for reply in replies] == [expected] * 4
    await rest.quiet()


async def test_connections_are_closed_at_the_end(rest: RestStack) -> None:
    """No task of a request is left when all clients are gone."""
    await rest.quiet()
    names = ("departure", "companion")
    await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name() in names])
