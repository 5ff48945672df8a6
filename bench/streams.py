"""The gateway's end of a session's stream, without a gateway: sessions that are opened and answer empty pings."""

import os
import time
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


class BareStream:
    """A session of one service, opened without a draft or without a guess. Calls raise OutriderError."""

    _call: Any
    _request: Any

    def __init__(self, spec: SessionSpec) -> None:
        self.spec, self._base_len, self._session_id = spec, spec.prompt_len, os.urandom(16)

    async def ping_ms(self) -> float:
        """Milliseconds from an empty message to its answer."""
        started_ns = time.perf_counter_ns()
        await self._exchange("pong", ping=pb.Ping())
        return (time.perf_counter_ns() - started_ns) / 1e6

    async def end(self) -> None:
        """Ends the session and its stream."""
        await self._call.write(self._message(close=pb.CloseSession()))
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            # An answer that was under way is nobody's any more.
            continue

    async def _exchange(self, expected: str, **content: Message) -> Message:
        """The answer to a message, which must be of the expected kind."""
        try:
            await self._call.write(self._message(**content))
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        if not isinstance(response, Message) or response.WhichOneof("answer") != expected:
            raise ProtocolViolation(f"a session's stream was to answer with a {expected}, but said {response}")
        return response

    def _message(self, **content: Message) -> object:
        fence = pb.Fence(session_id=self._session_id, epoch=1, base_len=self._base_len)
        return self._request(fence=fence, **content)


class BareTargetStream(BareStream):
    """A session of the target."""

    def __init__(self, channel: grpc.aio.Channel, spec: SessionSpec) -> None:
        super().__init__(spec)
        self._call, self._request = TargetServiceStub(channel).Verify(), target_pb.VerifyRequest

    async def open(self) -> int:
        """Opens the session and returns its first token."""
        session = messages.open_message(self.spec, self.spec.token_ids)
        answer = await self._exchange(
            "verdict", open=target_pb.TargetOpen(session=session, step=target_pb.TargetStep())
        )
        self._base_len += 1
        return cast("target_pb.VerifyResponse", answer).verdict.next_token_id


class BareDraftStream(BareStream):
    """A session of the draft."""

    def __init__(self, channel: grpc.aio.Channel, spec: SessionSpec) -> None:
        super().__init__(spec)
        self._call, self._request = DraftServiceStub(channel).Propose(), draft_pb.ProposeRequest

    async def open(self) -> None:
        """Opens the session, so that its prompt is cached."""
        session = messages.open_message(self.spec, self.spec.token_ids)
        await self._exchange("proposal", open=draft_pb.DraftOpen(session=session))
