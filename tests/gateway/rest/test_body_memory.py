"""Bodies that become far more than they are: a gateway as a process, with the memory that it has at most."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from support.rest.heavy_bodies import BODIES, path_of
from support.rest.rest_stack import exchange
from support.services.gateway_process import GatewayProcess, gateway_process

# Of the smallest budget that there may be; what is beside it are the bodies' text while it is parsed, and connections.
BUDGET_MIB, BESIDE_MIB = 256, 128
AT_A_TIME = 60


async def posted(gateway: GatewayProcess, body: bytes) -> str:
    """The status of the answer to a body, which is read to its end."""
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path_of(body).encode()
    return (await exchange(gateway.rest, head + b"content-length: %d\r\n\r\n%b" % (len(body), body)))[9:12].decode()


async def left(gateway: GatewayProcess, body: bytes) -> None:
    """Sends a body and does not wait for the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await posted(gateway, body)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_bodies_take_more_memory_than_they_may(words: str) -> None:
    """Sixty at once of any kind, and as many whose clients leave; each is refused by name or asked to come again, and
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
