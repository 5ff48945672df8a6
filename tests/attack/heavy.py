"""Attackers whose messages become far more than they are, and who take connections; each in a process of its own."""

import asyncio
import time
from contextlib import suppress

import grpc
from attack.attackers import PATIENCE_S, REFUSALS, Tally, fault_in
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import eventually
from support.requests.heavy_messages import heavy_messages
from support.rest.heavy_bodies import BODIES, path_of
from support.rest.rest_stack import exchange

from outrider.rpc.channels import open_channel

AT_A_TIME = 8
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
# Of the connections that one attacker holds, one for a try whether others are served.
HELD_PER_TRY = 250


def post_heavy(address: str, count: int) -> Tally:
    """Posts so many bodies of all kinds in turn, and leaves every fourth before its answer."""
    return asyncio.run(_post_heavy(address, count))


async def _post_heavy(address: str, count: int) -> Tally:
    tally, kinds, started_s = Tally(), [*BODIES.values()], time.perf_counter()

    async def post() -> None:
        while tally.sent < count:
            number, body = tally.sent, kinds[tally.sent % len(kinds)]
            tally.sent += 1
            head = f"POST {path_of(body)} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            sent = head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)
            try:
                async with asyncio.timeout(0.1 if number % 4 == 0 else PATIENCE_S):
                    reply = await exchange(address, sent)
            except TimeoutError:
                tally.add("left", None)
                continue
            status, fault = fault_in(reply)
            tally.add(str(status), fault and f"{fault} for {body[:100]!r}: {reply[-500:]!r}")

    await asyncio.gather(*(post() for _ in range(AT_A_TIME)))
    tally.seconds = time.perf_counter() - started_s
    return tally


def send_heavy(address: str, count: int) -> Tally:
    """Sends so many messages of all kinds in turn."""
    return asyncio.run(_send_heavy(address, count))


async def _send_heavy(address: str, count: int) -> Tally:
    tally, kinds, started_s = Tally(), [*heavy_messages().items()], time.perf_counter()

    async def send() -> None:
        async with open_channel(address) as channel:
            while tally.sent < count:
                name, (path, message) = kinds[tally.sent % len(kinds)]
                tally.sent += 1
                call = channel.unary_stream(path)(message, timeout=PATIENCE_S)
                with suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                code = await call.code()
                is_refused = code in REFUSALS - {grpc.StatusCode.OK}
                tally.add(code.name, None if is_refused else f"{code.name} for {name}: {await call.details()}")

    await asyncio.gather(*(send() for _ in range(AT_A_TIME)))
    tally.seconds = time.perf_counter() - started_s
    return tally


def crowd_out(rest: str, gateway: str, count: int) -> Tally:
    """Opens so many connections to each of the two ports and holds them; a newcomer must be served all the same."""
    return asyncio.run(_crowd_out(rest, gateway, count))


async def _crowd_out(rest: str, gateway: str, count: int) -> Tally:
    tally, held, started_s = Tally(), list[asyncio.StreamWriter](), time.perf_counter()
    for number in range(count):
        for address in (rest, gateway):
            host, _, port = address.rpartition(":")
            tally.sent += 1
            with suppress(ConnectionError):
                held.append((await asyncio.open_connection(host, int(port)))[1])
        if number % HELD_PER_TRY == HELD_PER_TRY - 1:
            for name, address, is_served in (("REST", rest, _is_live), ("gRPC", gateway, _is_healthy)):
                fault = None
                try:
                    await eventually(lambda is_served=is_served, address=address: is_served(address), PATIENCE_S)  # type: ignore[misc]
                except TimeoutError:
                    fault = f"nobody is served over {name} beside {len(held)} connections"
                tally.add(f"{name} {'refuses' if fault else 'serves'}", fault)
    for writer in held:
        writer.close()
    tally.seconds = time.perf_counter() - started_s
    return tally


async def _is_live(address: str) -> bool:
    with suppress(OSError):
        return (await exchange(address, LIVE)).startswith(b"HTTP/1.1 200 ")
    return False


async def _is_healthy(address: str) -> bool:
    async with open_channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True
