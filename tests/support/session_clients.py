"""The other end of a service's session streams, message by message. Decides nothing, so a test can do it wrongly."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from outrider.parameters import SessionSpec
from outrider.rpc import messages
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from outrider.v1.target_service_pb2_grpc import TargetServiceStub
from support.basics import PATIENCE_S


class Client:
    """A channel to one service and the fence of one session."""

    def __init__(self, channel: grpc.aio.Channel, session_id: bytes | None = None) -> None:
        self.channel = channel
        self.session_id = session_id or os.urandom(16)
        self.call = self.begin()

    def begin(self) -> "grpc.aio.StreamStreamCall":
        """Begins a stream."""
        raise AssertionError("a client knows its service")

    def fence(self, epoch: int, base_len: int) -> pb.Fence:
        """A fence of this session."""
        return pb.Fence(session_id=self.session_id, epoch=epoch, base_len=base_len)

    async def read(self):  # noqa: ANN201 - the message of either service
        """The next answer; raises the OutriderError that ended the stream, EOFError at its end."""
        try:
            message = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        if message is grpc.aio.EOF:
            raise EOFError
        return message

    async def drain(self) -> None:
        """Reads to the end of the stream, which must be a good one; a status comes behind the last answer only."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.call.read() is not grpc.aio.EOF:
                pass
            assert await self.call.code() == grpc.StatusCode.OK

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

    async def send(self, message: object) -> None:
        """Sends any message."""
        await self.call.write(message)


class TargetClient(Client):
    """A session of a target service."""

    def begin(self) -> "grpc.aio.StreamStreamCall":
        """Begins a stream."""
        return TargetServiceStub(self.channel).Verify()

    async def open(
        self, spec: SessionSpec, epoch: int = 1, proposal: Sequence[int] = (), plain_budget: int = 0
    ) -> None:
        """Opens with all tokens of the spec."""
        step = target_pb.TargetStep(proposal=pb.TokenTree(token_ids=proposal), plain_budget=plain_budget)
        message = target_pb.TargetOpen(session=messages.open_message(spec, spec.token_ids), step=step)
        await self.send(target_pb.VerifyRequest(fence=self.fence(epoch, len(spec.token_ids)), open=message))

    async def step(self, epoch: int, base_len: int, proposal: Sequence[int] = (), plain_budget: int = 0) -> None:
        """Takes a step with a chain."""
        step = target_pb.TargetStep(proposal=pb.TokenTree(token_ids=proposal), plain_budget=plain_budget)
        await self.send(target_pb.VerifyRequest(fence=self.fence(epoch, base_len), step=step))

    async def acknowledge(self, epoch: int, base_len: int, plain_budget: int = 0) -> None:
        """Acknowledges."""
        message = target_pb.Acknowledge(plain_budget=plain_budget)
        await self.send(target_pb.VerifyRequest(fence=self.fence(epoch, base_len), acknowledge=message))

    async def close(self, epoch: int, base_len: int = 1) -> None:
        """Closes the session and waits for the end of the stream."""
        await self.send(target_pb.VerifyRequest(fence=self.fence(epoch, base_len), close=pb.CloseSession()))
        await self.drain()

    async def verdict(self) -> tuple[int, list[int], int | None]:
        """The next answer as (base_len, accepted rows, next token)."""
        response = await self.read()
        assert response.WhichOneof("answer") == "verdict", response
        token = response.verdict.next_token_id if response.verdict.HasField("next_token_id") else None
        return response.fence.base_len, list(response.verdict.accepted_rows), token


class DraftClient(Client):
    """A session of a draft service."""

    def begin(self) -> "grpc.aio.StreamStreamCall":
        """Begins a stream."""
        return DraftServiceStub(self.channel).Propose()

    async def open(self, spec: SessionSpec, draft_count: int, epoch: int = 1) -> None:
        """Opens with all tokens of the spec."""
        message = draft_pb.DraftOpen(session=messages.open_message(spec, spec.token_ids), draft_count=draft_count)
        await self.send(draft_pb.ProposeRequest(fence=self.fence(epoch, len(spec.token_ids)), open=message))

    async def advance(self, epoch: int, base_len: int, token_ids: Sequence[int], draft_count: int) -> None:
        """Commits tokens and asks for guesses."""
        message = draft_pb.DraftAdvance(token_ids=token_ids, draft_count=draft_count)
        await self.send(draft_pb.ProposeRequest(fence=self.fence(epoch, base_len), advance=message))

    async def close(self, epoch: int, base_len: int = 1) -> None:
        """Closes the session and waits for the end of the stream."""
        await self.send(draft_pb.ProposeRequest(fence=self.fence(epoch, base_len), close=pb.CloseSession()))
        await self.drain()

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
