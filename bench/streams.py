"""The gateway's end of a session's stream, without a gateway: empty pings, and plain decoding one message at a time.

An answer that is not the expected one ends the benchmark.
"""

import os
import time
from collections.abc import Callable
from typing import Any, cast

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


class PingStream:
    """A session of one service with the fence that it has now."""

    def __init__(self, call: object, request: Callable[..., Message], spec: SessionSpec) -> None:
        # The two services' calls have nothing in common that gRPC's types could say.
        self._call: Any = call
        self._request, self._session_id = request, os.urandom(16)
        self.spec, self.base_len = spec, spec.prompt_len

    async def exchange(self, expected: str, **content: Message) -> Message:
        """Sends a message and returns its answer, which must be of the expected kind. Raises OutriderError."""
        try:
            await self._call.write(self._message(**content))
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        if not isinstance(response, Message) or response.WhichOneof("answer") != expected:
            raise ProtocolViolation(f"a session's stream was to answer with a {expected}, but said {response}")
        return response

    async def ping_ms(self) -> float:
        """Milliseconds from an empty message to its answer."""
        started_ns = time.perf_counter_ns()
        await self.exchange("pong", ping=pb.Ping())
        return (time.perf_counter_ns() - started_ns) / 1e6

    async def end(self) -> None:
        """Ends the session with a message that says so, and its stream."""
        await self._call.write(self._message(close=pb.CloseSession()))
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            # An answer that was under way is nobody's any more.
            continue

    def _message(self, **content: Message) -> Message:
        fence = pb.Fence(session_id=self._session_id, epoch=1, base_len=self.base_len)
        return self._request(fence=fence, **content)


class BareTargetStream(PingStream):
    """A session of the target that is decoded without a draft."""

    def __init__(self, channel: grpc.aio.Channel, spec: SessionSpec) -> None:
        super().__init__(TargetServiceStub(channel).Verify(), target_pb.VerifyRequest, spec)

    async def open(self) -> int:
        """Opens the session and returns its first token."""
        session = messages.open_message(self.spec, self.spec.token_ids)
        return await self._token(open=target_pb.TargetOpen(session=session, step=target_pb.TargetStep()))

    async def step(self) -> int:
        """Asks for one token and returns it."""
        return await self._token(step=target_pb.TargetStep())

    async def _token(self, **content: Message) -> int:
        response = cast("target_pb.VerifyResponse", await self.exchange("verdict", **content))
        self.base_len += 1
        return response.verdict.next_token_id


class BareDraftStream(PingStream):
    """A session of the draft that is asked for no guess."""

    def __init__(self, channel: grpc.aio.Channel, spec: SessionSpec) -> None:
        super().__init__(DraftServiceStub(channel).Propose(), draft_pb.ProposeRequest, spec)

    async def open(self) -> None:
        """Opens the session, so that its prompt is cached."""
        session = messages.open_message(self.spec, self.spec.token_ids)
        await self.exchange("proposal", open=draft_pb.DraftOpen(session=session))
