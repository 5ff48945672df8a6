"""The hostile side, in processes of its own that stand for other machines: of this one they take the time that nobody
else wants. Knows no stack.
"""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from typing import Any

import grpc
from attack.messages import LINKS, Garbage, Method
from support.requests.garbage import PYTHON_TEXT, check_refusal
from support.requests.silent_calls import CALL, PREFACE
from support.rest.random_bodies import RandomBodies
from support.rest.rest_stack import exchange

from outrider.rpc.channels import open_channel
from outrider.rpc.errors import UNEXPECTED_TEXT, session_error_from
from outrider.v1.draft_service_pb2 import DraftServiceLinkResponse
from outrider.v1.target_service_pb2 import TargetServiceLinkResponse

AT_A_TIME = 16
PATIENCE_S = 120.0
MAX_FAULTS = 20
# A caller that watches hears of changes for as long as it likes.
ENDLESS = {"/grpc.health.v1.Health/Watch"}
# What says whose fault it is that a call has no answer: the caller's.
REFUSALS = {
    *(grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION),
    *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND),
}
# In whatever a service answers, also as bytes.
LEAK = re.compile(rb"Traceback|object at 0x|<class '|" + UNEXPECTED_TEXT.encode())
MAX_TEXT_LEN = 2000
# What gRPC's client says of a write into a stream that has its answer already; no process of ours says so.
CUT_OFF = "Internal error from Core"
HTTP_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
# How connections begin: with nothing, half a head, a head without its body; and with nothing, half a greeting, a
# greeting, the head of a call, bytes of TLS.
BEGUN = {
    "http": (b"", HTTP_HEAD + b"x: ", HTTP_HEAD + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n"),
    "grpc": (b"", PREFACE[:10], PREFACE, PREFACE + CALL, b"\x16\x03\x01\x02\x00"),
}
TRICKLE_S = 1.0
LOWEST_PRIORITY = 19  # that of a process which takes what no other one wants


def stand_apart() -> None:
    """Leaves the processors to those who are attacked and to those who measure."""
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)


@dataclass
class Tally:
    """What was sent in how many seconds, the answers by their status, and what was wrong with some."""

    sent: int = 0
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, status: str, fault: str | None) -> None:
        """Counts an answer."""
        self.answers[status] += 1
        if fault is not None and len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)


def send_messages(method: Method, addresses: Sequence[str], count: int, seed: int) -> Tally:
    """Calls a method of several processes in turn until so many messages are sent."""
    return asyncio.run(_send_messages(method, addresses, count, seed))


async def _send_messages(method: Method, addresses: Sequence[str], count: int, seed: int) -> Tally:
    tally, calls = Tally(), iter(Garbage(method, seed))
    started_s = time.perf_counter()
    async with AsyncExitStack() as exits:
        channels = [await exits.enter_async_context(open_channel(address)) for address in addresses]

        async def send(channel: grpc.aio.Channel) -> None:
            while tally.sent < count:
                messages, num_messages = next(calls)
                tally.sent += num_messages
                code, details, responses = await _answer(channel, method, messages)
                fault = _fault_of(method, code, details, responses)
                tally.add(code.name, fault and f"{fault} for {method.path} {messages!r:.2000}")

        await asyncio.gather(*(send(channels[number % len(channels)]) for number in range(AT_A_TIME)))
    tally.seconds = time.perf_counter() - started_s
    return tally


async def _answer(
    channel: grpc.aio.Channel, method: Method, messages: Sequence[bytes]
) -> tuple[grpc.StatusCode, str, list[bytes]]:
    responses: list[bytes] = []
    call: Any
    try:
        if method.takes_many:
            call = channel.stream_stream(method.path)(iter(messages), timeout=PATIENCE_S)
        elif method.gives_many:
            call = channel.unary_stream(method.path)(messages[0], timeout=PATIENCE_S)
        else:
            responses.append(await channel.unary_unary(method.path)(messages[0], timeout=PATIENCE_S))
            return grpc.StatusCode.OK, "", responses
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
            if method.path in ENDLESS:
                call.cancel()
                return grpc.StatusCode.OK, "", responses
        return await call.code(), await call.details() or "", responses
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", responses


def _fault_of(method: Method, code: grpc.StatusCode, details: str, responses: Sequence[bytes]) -> str | None:
    if (details != CUT_OFF and code not in REFUSALS) or PYTHON_TEXT.search(details) or len(details) > MAX_TEXT_LEN:
        return f"{code.name}: {details[:MAX_TEXT_LEN]}"
    for response in responses:
        if found := LEAK.search(response):
            return f"{found[0]!r} in an answer"
        if method.request in LINKS:
            kind = TargetServiceLinkResponse if "Target" in method.request else DraftServiceLinkResponse
            for each in kind.FromString(response).responses:
                if each.HasField("error"):
                    try:
                        check_refusal(session_error_from(each.error))
                    except AssertionError as error:
                        return f"{each.error}: {error}"
    return None


def post_bodies(address: str, document: Mapping[str, Any], count: int, seed: int) -> Tally:
    """Posts so many bodies to the routes that a document describes."""
    return asyncio.run(_post_bodies(address, document, count, seed))


async def _post_bodies(address: str, document: Mapping[str, Any], count: int, seed: int) -> Tally:
    tally, bodies = Tally(), iter(RandomBodies(document, seed))
    started_s = time.perf_counter()

    async def post() -> None:
        while tally.sent < count:
            path, body = next(bodies)
            tally.sent += 1
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            try:
                reply = await exchange(address, head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            except TimeoutError:
                # A few ask for as many tokens as there is room for, eight times; that is left, as clients leave.
                tally.add("left", None)
                continue
            status, fault = fault_in(reply)
            tally.add(str(status), fault and f"{fault} for {path} {body[:2000]!r}: {reply[-500:]!r}")

    await asyncio.gather(*(post() for _ in range(AT_A_TIME)))
    tally.seconds = time.perf_counter() - started_s
    return tally


def fault_in(reply: bytes) -> tuple[int, str | None]:
    """The status of a reply to whatever was sent, 0 for none, and what is wrong with it."""
    head, _, body = reply.partition(b"\r\n\r\n")
    status, text = int(head.split()[1]) if head else 0, body.decode(errors="replace")
    if status == 0 or status >= 500 or LEAK.search(body):
        return status, f"status {status}"
    if status >= 400 and (PYTHON_TEXT.search(text) or len(text) > MAX_TEXT_LEN):
        return status, f"status {status} with {len(text)} characters"
    return status, None


def hold_connections(ports: Sequence[tuple[str, str]], count: int, over: Event) -> None:
    """Keeps so many connections to ports, each an address and what is spoken there, until it is over."""
    stand_apart()
    asyncio.run(_hold_connections(ports, count, over))


async def _hold_connections(ports: Sequence[tuple[str, str]], count: int, over: Event) -> None:
    tasks = []
    for number in range(count):
        address, kind = ports[number % len(ports)]
        begun = BEGUN[kind][number // len(ports) % len(BEGUN[kind])]
        tasks.append(asyncio.create_task(_hold(address, begun, trickles=number % 2 == 0)))
    await asyncio.to_thread(over.wait)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _hold(address: str, begun: bytes, *, trickles: bool) -> None:
    """A connection that says no more, or a byte now and then; when it is cut off, another one."""
    host, _, port = address.rpartition(":")
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(begun)
                while not reader.at_eof():
                    # `wait_for` would swallow a cancellation that comes with a byte, and this would never end.
                    with suppress(TimeoutError):
                        # Those that say no more wait as a socket does, so that they take no time from the streams.
                        async with asyncio.timeout(TRICKLE_S if trickles else None):
                            await reader.read(1024)
                    if trickles:
                        writer.write(b"x")
            finally:
                writer.close()
        await asyncio.sleep(TRICKLE_S)
