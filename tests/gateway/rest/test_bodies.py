"""Bodies that become far more than they are: a gateway as a process, with the memory that it has at most."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from support.rest.rest_stack import exchange
from support.services.gateway_process import GatewayProcess, gateway_process

MAX_BYTES = 4 << 20
# Of the smallest budget that there may be; what is beside it are the bodies' text while it is parsed, and connections.
BUDGET_MIB, BESIDE_MIB = 256, 128
AT_A_TIME = 60


def filled(begin: bytes, unit: bytes, end: bytes) -> bytes:
    """As many units as a body may have."""
    return begin + unit * ((MAX_BYTES - len(begin) - len(end)) // len(unit)) + end


CALL = (
    b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"'
)
BODIES = {
    "empty lists": filled(b'{"prompt":[', b"[],", b"[]]}"),
    "empty objects": filled(b'{"prompt":[', b"{},", b"{}]}"),
    "nested lists": filled(b'{"prompt":[', b"[[[[]]]],", b"[]]}"),
    "deep lists": b'{"prompt":' + b"[" * 49_000 + b"]" * 49_000 + b"}",
    "texts": filled(b'{"prompt":[', b'"",', b'""]}'),
    "token ids": filled(b'{"prompt":[', b"257,", b"1]}"),
    "fractions": filled(b'{"prompt":[', b"1.5,", b"1]}"),
    "keys": b'{"prompt":"fox"' + b"".join(b',"x%d":1' % number for number in range(45_000)) + b"}",
    "parts": b'{"messages":[{"role":"user","content":[%b]}]}' % b",".join([b'{"type":"text","text":"a"}'] * 20_000),
    "a call's arguments": filled(CALL + rb"{\"a\":[", b"[],", b'[]]}"}}]}]}'),
    "wide text": filled('{"prompt":"\U0001f600'.encode(), b"fox ", b'"}'),
    "escapes": filled(b'{"prompt":"', rb"\u0066", b'"}'),
    "no JSON": filled(b"", b'["",', b""),
}


async def posted(gateway: GatewayProcess, body: bytes) -> str:
    """The status of the answer to a body, which is read to its end."""
    path = b"chat/completions" if b'"messages"' in body[:20] else b"completions"
    head = b"POST /v1/%b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path
    return (await exchange(gateway.rest, head + b"content-length: %d\r\n\r\n%b" % (len(body), body)))[9:12].decode()


async def left(gateway: GatewayProcess, body: bytes) -> None:
    """Sends a body and does not wait for the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await posted(gateway, body)


@pytest.mark.timeout(240)
async def test_no_bodies_take_more_memory_than_they_may(words: str) -> None:
    """Sixty at once of any kind, and as many whose clients leave; each is refused by name or told to come again, and
    ordinary requests are answered meanwhile.
    """
    async with gateway_process(words, "--request-memory-mib", str(BUDGET_MIB)) as gateway:
        assert await posted(gateway, b'{"prompt":"fox sea","max_tokens":4}') == "200"
        before = gateway.peak_bytes
        kinds = [*BODIES.values()]
        sent = asyncio.gather(*(posted(gateway, kinds[number % len(kinds)]) for number in range(AT_A_TIME)))
        leaving = asyncio.gather(*(left(gateway, BODIES["empty lists"]) for _ in range(AT_A_TIME)))
        short = [await posted(gateway, b'{"prompt":"fox sea","max_tokens":4}') for _ in range(5)]
        statuses = Counter(await sent)
        await leaving
        assert short == ["200"] * 5
        assert not {*statuses} - {"400", "429"}, statuses
        assert gateway.peak_bytes - before < (BUDGET_MIB + BESIDE_MIB) << 20
        for body in BODIES.values():
            assert await posted(gateway, body) == "400"
    assert not [line for line in gateway.lines if '"level": "error"' in line]
