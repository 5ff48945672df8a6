"""Several requests at once through a gateway, and what came back so far of each. Knows no faults."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import eventually
from support.stack import request_of

from outrider.cli.bench.common import OPENINGS
from outrider.rpc.errors import error_from
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

MAX_TOKENS = 320
BEGUN_LEN = 4
PATIENCE_S = 120.0
# Speculative and plain, greedy and sampled; a pair with the same text and sampling says the same under `match`.
SPECULATIVE, PLAIN = (
    tuple(
        {"text": OPENINGS[index], "temperature": temperature, "seed": 11, "draft_count": draft_count}
        for index, temperature in enumerate([0.0, 0.8])
    )
    for draft_count in (4, 0)
)
REQUESTS: tuple[dict[str, Any], ...] = (*SPECULATIVE, *PLAIN)


@dataclass
class Request:
    """What one request has brought."""

    call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"
    token_ids: list[int] = field(default_factory=list)
    rounds: list[pb.Round] = field(default_factory=list)
    completion: pb.Completion | None = None
    num_messages: int = 0

    async def read(self) -> Self:
        """Reads to the end; raises the OutriderError that the gateway answered."""
        try:
            async for message in self.call:
                assert self.completion is None, "a message came behind the completion"
                if message.HasField("completion"):
                    self.completion = message.completion
                else:
                    self.rounds.append(message.round)
                    self.token_ids += [token.token_id for token in message.round.tokens]
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        assert self.completion is not None, "the call ended well without a completion"
        return self


class Load:
    """Requests that run until they end; leaving the context cancels what has not."""

    def __init__(self, channel: grpc.aio.Channel, max_tokens: int = MAX_TOKENS) -> None:
        self.requests: list[Request] = []
        self._stub = GenerationServiceStub(channel)
        self._max_tokens = max_tokens
        self._tasks: list[asyncio.Task[Request]] = []

    async def __aenter__(self) -> Self:
        for fields in SPECULATIVE:
            self.begin(**fields)
        # Their first round waits for a draft that may have no processor yet, while a plain request would come to its
        # end. From here on all are in the same steps of the target, which bring no request more than five tokens.
        await self._are_under_way()
        for fields in PLAIN:
            self.begin(**fields)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request in self.requests:
            request.call.cancel()
        await asyncio.wait(self._tasks)

    def begin(self, **fields: Any) -> Request:
        """One more request."""
        request = Request(self._stub.Generate(request_of(max_tokens=self._max_tokens, ignore_eos=True, **fields)))
        self.requests.append(request)
        self._tasks.append(asyncio.create_task(request.read()))
        return request

    async def begun(self) -> None:
        """Waits until each is in the middle of its output; fails when one has come to its end already."""
        await self._are_under_way()
        assert not any(task.done() for task in self._tasks)

    async def _are_under_way(self) -> None:
        await eventually(lambda: all(len(request.token_ids) >= BEGUN_LEN for request in self.requests), PATIENCE_S)

    async def ended(self) -> list[Request | BaseException]:
        """What became of each request, when all have an end."""
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*self._tasks, return_exceptions=True)

    async def token_ids(self) -> list[list[int]]:
        """What each request said in the end; raises the error of one that failed."""
        async with asyncio.timeout(PATIENCE_S):
            return [request.token_ids for request in await asyncio.gather(*self._tasks)]


async def said(channel: grpc.aio.Channel, max_tokens: int = MAX_TOKENS) -> Sequence[list[int]]:
    """What the requests say while nothing happens to them."""
    async with Load(channel, max_tokens) as load:
        return await load.token_ids()


async def until_health(channel: grpc.aio.Channel, status: str) -> None:
    """Waits until the gateway says so about itself."""
    stub = health_pb2_grpc.HealthStub(channel)
    wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(status)

    async def is_so() -> bool:
        return (await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status == wanted

    await eventually(is_so, PATIENCE_S)
