"""The gateway's end of a session's stream, without a gateway: empty pings, and plain decoding one message at a time.

What it measures is the way of the messages and nothing that the gateway does. Knows no rounds and no recovery: an
answer that is not the expected one ends the benchmark.
"""

import os
import time
from typing import Generic, TypeVar, cast

import grpc.aio
from google.protobuf.message import Message

from outrider.errors import ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.rpc import messages
from outrider.rpc.errors import error_from
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.v1.target_service_pb2_grpc import TargetServiceStub

Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)


class SessionStream(Generic[Sent, Received]):
    """A stream and the fence of its session."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[Sent, Received]", spec: SessionSpec) -> None:
        self._call: grpc.aio.StreamStreamCall[Sent, Received] = call
        self._session_id = os.urandom(16)
        self.spec = spec
        self.base_len = spec.prompt_len

    @property
    def fence(self) -> pb.Fence:
        """Where the session is now."""
        return pb.Fence(session_id=self._session_id, epoch=1, base_len=self.base_len)

    async def exchange(self, request: Sent, expected: str) -> Received:
        """Sends a message and returns its answer, which must be of the expected kind. Raises OutriderError."""
        try:
            await self._call.write(request)
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        if not isinstance(response, Message) or response.WhichOneof("answer") != expected:
            raise ProtocolViolation(f"a session's stream was to answer with a {expected}, but said {response}")
        return cast("Received", response)

    async def close(self, request: Sent) -> None:
        """Ends the session with a message that says so, and its stream."""
        await self._call.write(request)
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            # An answer that was under way is nobody's any more.
            continue


class TargetStream(SessionStream[target_pb.VerifyRequest, target_pb.VerifyResponse]):
    """A session of the target that is decoded without a draft."""

    def __init__(self, channel: grpc.aio.Channel, spec: SessionSpec) -> None:
        super().__init__(TargetServiceStub(channel).Verify(), spec)

    async def open(self) -> int:
        """Opens the session and returns its first token."""
        session = messages.open_message(self.spec, self.spec.token_ids)
        opening = target_pb.TargetOpen(session=session, step=target_pb.TargetStep())
        return await self._token(target_pb.VerifyRequest(fence=self.fence, open=opening))

    async def step(self) -> int:
        """Asks for one token and returns it."""
        return await self._token(target_pb.VerifyRequest(fence=self.fence, step=target_pb.TargetStep()))

    async def ping_ms(self) -> float:
        """Milliseconds from an empty message to its answer."""
        started_ns = time.perf_counter_ns()
        await self.exchange(target_pb.VerifyRequest(fence=self.fence, ping=pb.Ping()), "pong")
        return (time.perf_counter_ns() - started_ns) / 1e6

    async def end(self) -> None:
        """Ends the session."""
        await self.close(target_pb.VerifyRequest(fence=self.fence, close=pb.CloseSession()))

    async def _token(self, request: target_pb.VerifyRequest) -> int:
        response = await self.exchange(request, "verdict")
        self.base_len += 1
        return response.verdict.next_token_id


class DraftStream(SessionStream[draft_pb.ProposeRequest, draft_pb.ProposeResponse]):
    """A session of the draft that is asked for no guess."""

    def __init__(self, channel: grpc.aio.Channel, spec: SessionSpec) -> None:
        super().__init__(DraftServiceStub(channel).Propose(), spec)

    async def open(self) -> None:
        """Opens the session, so that its prompt is cached."""
        session = messages.open_message(self.spec, self.spec.token_ids)
        await self.exchange(
            draft_pb.ProposeRequest(fence=self.fence, open=draft_pb.DraftOpen(session=session)), "proposal"
        )

    async def ping_ms(self) -> float:
        """Milliseconds from an empty message to its answer."""
        started_ns = time.perf_counter_ns()
        await self.exchange(draft_pb.ProposeRequest(fence=self.fence, ping=pb.Ping()), "pong")
        return (time.perf_counter_ns() - started_ns) / 1e6

    async def end(self) -> None:
        """Ends the session."""
        await self.close(draft_pb.ProposeRequest(fence=self.fence, close=pb.CloseSession()))


async def one_by_one(channel: grpc.aio.Channel, spec: SessionSpec) -> tuple[list[int], list[float]]:
    """Decodes plainly with a message for each token; returns tokens and, for each, the seconds since the beginning."""
    started = time.perf_counter()
    stream = TargetStream(channel, spec)
    token_ids, times_s = [await stream.open()], [time.perf_counter() - started]
    while len(token_ids) < spec.max_len - spec.prompt_len:
        token_ids.append(await stream.step())
        times_s.append(time.perf_counter() - started)
    await stream.end()
    return token_ids, times_s
