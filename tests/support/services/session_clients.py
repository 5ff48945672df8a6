"""The other end of a service's links, message by message. Decides nothing, so a test can do it wrongly."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Self

import grpc
from google.protobuf.message import Message
from support.basics import PATIENCE_S

from outrider.parameters import SessionSpec
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from, session_error_from
from outrider.rpc.messages.session import open_message
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from outrider.v1.target_service_pb2_grpc import TargetServiceStub


class Link:
    """One link to a service, and what came over it for each session that has not read it yet.

    It begins where it is first used, because a service keeps none that says nothing at first.
    """

    def __init__(self, begin: Callable[[], "grpc.aio.StreamStreamCall"], frame_type: Callable[..., Message]) -> None:
        self._begin = begin
        self._frame_type = frame_type
        self._answers: defaultdict[bytes, deque[Any]] = defaultdict(deque)
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()

    @cached_property
    def call(self) -> "grpc.aio.StreamStreamCall":
        """The call that is the link."""
        return self._begin()

    async def send(self, *requests: Message) -> None:
        """Sends messages of any sessions, all in one frame."""
        async with self._writing:
            await self.call.write(self._frame_type(requests=requests))

    async def frame(self) -> Any:
        """The next frame; raises the OutriderError that ended the link, EOFError at its end."""
        try:
            frame = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        if frame is grpc.aio.EOF:
            raise EOFError
        return frame

    async def read(self, session_id: bytes) -> Any:
        """The next answer of a session, an error as well; raises what `frame` raises. Any number may read at a time."""
        while not (answers := self._answers[session_id]):
            async with self._reading:
                # Somebody else may have read it since.
                if not answers:
                    for response in (await self.frame()).responses:
                        self._answers[response.fence.session_id].append(response)
        return answers.popleft()


class Client(ABC):
    """One session of a service, on a link of its own or on that of another client."""

    def __init__(self, channel: grpc.aio.Channel, session_id: bytes | None = None, link: Link | None = None) -> None:
        self.channel = channel
        self.session_id = session_id or os.urandom(16)
        self.link = link or self.begin()

    @abstractmethod
    def begin(self) -> Link:
        """A link to the service."""

    @abstractmethod
    def request(self, fence: pb.Fence, **action: Message) -> Message:
        """A message of the service's kind."""

    @abstractmethod
    def unknown(self) -> Message:
        """A message of a session that is not open, which the device answers by asking for tokens."""

    @property
    def call(self) -> "grpc.aio.StreamStreamCall":
        """The call that is the link."""
        return self.link.call

    def beside(self, session_id: bytes | None = None) -> Self:
        """Another session on the same link."""
        return type(self)(self.channel, session_id, self.link)

    def fence(self, epoch: int, base_len: int) -> pb.Fence:
        """A fence of this session."""
        return pb.Fence(session_id=self.session_id, epoch=epoch, base_len=base_len)

    async def read(self):  # noqa: ANN201 - the message of either service
        """The session's next answer; raises the OutriderError that ended it or its link, EOFError at the link's end."""
        response = await self.link.read(self.session_id)
        if response.WhichOneof("answer") == "error":
            raise session_error_from(response.error)
        return response

    async def drain(self) -> None:
        """Reads to the end of the link, which must be a good one; a status comes after the last answer only."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.call.read() is not grpc.aio.EOF:
                pass
            assert await self.call.code() == grpc.StatusCode.OK

    async def part(self, epoch: int, base_len: int, start: int, token_ids: Sequence[int]) -> None:
        """Sends tokens of an open that follows."""
        part = pb.OpenPart(start=start, token_ids=token_ids)
        await self.send(self.request(self.fence(epoch, base_len), part=part))

    async def ping(self, epoch: int, base_len: int) -> None:
        """Asks for a pong."""
        await self.send(self.request(self.fence(epoch, base_len), ping=pb.Ping()))

    async def close(self, epoch: int, base_len: int = 1) -> None:
        """Closes the session and waits until the device has done it; the link goes on."""
        await self.settle(self.request(self.fence(epoch, base_len), close=pb.CloseSession()))

    async def settle(self, *requests: Message) -> None:
        """Sends messages and waits until the device has taken them and all that was sent before."""
        last = self.unknown()
        await self.send(*requests, last)
        answer = await self.link.read(last.fence.session_id)
        assert answer.WhichOneof("answer") == "tokens_wanted", answer

    async def rollback(self, epoch: int, base_len: int) -> model_pb.RollbackResponse:
        """Calls Rollback."""
        try:
            return await ModelServiceStub(self.channel).Rollback(
                model_pb.RollbackRequest(fence=self.fence(epoch, base_len))
            )
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None

    async def info(self) -> model_pb.GetModelInfoResponse:
        """Calls GetModelInfo."""
        return await ModelServiceStub(self.channel).GetModelInfo(model_pb.GetModelInfoRequest())

    async def send(self, *requests: Message) -> None:
        """Sends any messages, all in one frame."""
        await self.link.send(*requests)


class TargetClient(Client):
    """A session of a target service."""

    def begin(self) -> Link:
        """A link to the service."""
        return Link(TargetServiceStub(self.channel).Link, target_pb.TargetServiceLinkRequest)

    def request(self, fence: pb.Fence, **action: Message) -> target_pb.VerifyRequest:
        """A message to the target."""
        return target_pb.VerifyRequest(fence=fence, **action)

    def unknown(self) -> target_pb.VerifyRequest:
        """A step of a session that is not open."""
        return self.request(pb.Fence(session_id=os.urandom(16), epoch=1, base_len=1), step=target_pb.TargetStep())

    def opening(
        self,
        spec: SessionSpec,
        epoch: int = 1,
        proposal: Sequence[int] = (),
        plain_budget: int = 0,
        part_len: int = 0,
    ) -> target_pb.VerifyRequest:
        """What opens with all tokens of the spec, of which parts have brought the first part_len."""
        session = open_message(spec, spec.token_ids[part_len:])
        session.part_len = part_len
        step = target_pb.TargetStep(proposal=pb.TokenTree(token_ids=proposal), plain_budget=plain_budget)
        message = target_pb.TargetOpen(session=session, step=step)
        return self.request(self.fence(epoch, len(spec.token_ids)), open=message)

    async def open(self, *arguments: Any, **options: Any) -> None:
        """Sends an opening."""
        await self.send(self.opening(*arguments, **options))

    def stepping(
        self, epoch: int, base_len: int, proposal: Sequence[int] = (), plain_budget: int = 0
    ) -> target_pb.VerifyRequest:
        """A step with a chain."""
        step = target_pb.TargetStep(proposal=pb.TokenTree(token_ids=proposal), plain_budget=plain_budget)
        return self.request(self.fence(epoch, base_len), step=step)

    async def step(self, *arguments: Any, **options: Any) -> None:
        """Sends a step with a chain."""
        await self.send(self.stepping(*arguments, **options))

    async def acknowledge(self, epoch: int, base_len: int, plain_budget: int = 0) -> None:
        """Acknowledges the verdicts up to a length."""
        message = target_pb.Acknowledge(plain_budget=plain_budget)
        await self.send(self.request(self.fence(epoch, base_len), acknowledge=message))

    async def verdict(self) -> tuple[int, list[int], int | None]:
        """The next answer as (base_len, accepted rows, next token)."""
        response = await self.read()
        assert response.WhichOneof("answer") == "verdict", response
        token = response.verdict.next_token_id if response.verdict.HasField("next_token_id") else None
        return response.fence.base_len, list(response.verdict.accepted_rows), token


class DraftClient(Client):
    """A session of a draft service."""

    def begin(self) -> Link:
        """A link to the service."""
        return Link(DraftServiceStub(self.channel).Link, draft_pb.DraftServiceLinkRequest)

    def request(self, fence: pb.Fence, **action: Message) -> draft_pb.ProposeRequest:
        """A message to the draft."""
        return draft_pb.ProposeRequest(fence=fence, **action)

    def unknown(self) -> draft_pb.ProposeRequest:
        """An advance of a session that is not open."""
        return self.request(pb.Fence(session_id=os.urandom(16), epoch=1, base_len=1), advance=draft_pb.DraftAdvance())

    async def open(
        self, spec: SessionSpec, draft_count: int, epoch: int = 1, part_len: int = 0, shape: pb.TreeShape | None = None
    ) -> None:
        """Opens with all tokens of the spec, of which parts have brought the first part_len."""
        session = open_message(spec, spec.token_ids[part_len:])
        session.part_len = part_len
        message = draft_pb.DraftOpen(session=session, draft_count=draft_count, shape=shape)
        await self.send(self.request(self.fence(epoch, len(spec.token_ids)), open=message))

    async def advance(
        self,
        epoch: int,
        base_len: int,
        token_ids: Sequence[int],
        draft_count: int,
        shape: pb.TreeShape | None = None,
    ) -> None:
        """Commits tokens and asks for guesses."""
        message = draft_pb.DraftAdvance(token_ids=token_ids, draft_count=draft_count, shape=shape)
        await self.send(self.request(self.fence(epoch, base_len), advance=message))

    async def guesses(self) -> list[int]:
        """The next answer's guesses."""
        response = await self.read()
        assert response.WhichOneof("answer") == "proposal", response
        return list(response.proposal.token_ids)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that is closed at the end."""
    channel = open_channel(address)
    try:
        yield channel
    finally:
        await channel.close()
