"""A gateway that follows a script, for tests of the command line: no model, no service, real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.errors import InvalidRequest
from outrider.rpc import MAX_MESSAGE_BYTES, error_from, status_of
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

Call = grpc.aio.ServicerContext[Any, pb.GenerateResponse]


@dataclass
class ScriptedGateway(GenerationServiceServicer):
    """Answers every prompt with the same two rounds; "wait" is never answered, "refuse" is refused, and where a number
    of samples is named they come mixed.

    "lose" passes on the loss of a connection behind it, and "too large" is answered by more than a message may have.
    """

    address: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    chats: list[pb.ChatRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(  # noqa: N802, the protocol's name
        self, request: pb.GenerateRequest, context: Call
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        async for response in self._answer(request.text, request, context):
            yield response

    async def Chat(  # noqa: N802, the protocol's name
        self, request: pb.ChatRequest, context: Call
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The same script, by what the last message says."""
        self.chats.append(request)
        generation = request.generation
        async for response in self._answer(request.messages[-1].content, generation, context, generation.seed):
            yield response

    async def _answer(
        self, text: str, request: pb.GenerateRequest, context: Call, seed: int = 7
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if text == "refuse":
            await context.abort_with_status(status_of(InvalidRequest("temperature", -1.0, "at least 0")))
        if text == "lose":
            nothing = grpc.aio.Metadata()
            lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
            await context.abort_with_status(status_of(error_from(lost)))
        if text == "too large":
            yield said((pb.TOKEN_ORIGIN_PLAIN, "x" * MAX_MESSAGE_BYTES))
        for response in mixed_samples(request.sample_count):
            yield response
        if request.sample_count:
            return
        yield said((pb.TOKEN_ORIGIN_PLAIN, "Once"))
        if text == "wait":
            await self._wait_for_cancellation()
        yield said((pb.TOKEN_ORIGIN_ACCEPTED, " upon"), (pb.TOKEN_ORIGIN_CORRECTION, " a"))
        yield pb.GenerateResponse(completion=completion(seed))

    async def _wait_for_cancellation(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def said(*tokens: tuple[pb.TokenOrigin.ValueType, str]) -> pb.GenerateResponse:
    """A round of tokens, whose ids are the lengths of their texts."""
    parts = [pb.GeneratedToken(token_id=len(text), origin=origin, text=text) for origin, text in tokens]
    return pb.GenerateResponse(round=pb.Round(tokens=parts, text_delta="".join(text for _, text in tokens)))


@asynccontextmanager
async def scripted_gateway() -> AsyncIterator[ScriptedGateway]:
    """One that answers on `address`."""
    server = grpc.aio.server()
    servicer = ScriptedGateway()
    add_GenerationServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(0)


def completion(seed: int = 7) -> pb.Completion:
    """The end of the script."""
    return pb.Completion(
        finish_reason=types_pb2.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=2, completion_tokens=3, cached_prompt_tokens=1),
        seed=seed,
        speculation=pb.SpeculationFigures(rounds=1, draft_tokens=2, accepted_tokens=1, acceptance_rate=0.5),
        timings=pb.Timings(first_token_us=10, total_us=3_000),
        text_delta="!",
    )


def mixed_samples(count: int) -> Iterator[pb.GenerateResponse]:
    """Two rounds of each sample by turns, with log-probabilities and the rule `lenient`; the last sample ends first."""
    for half in ("one", " two"):
        for index in range(count):
            token = pb.GeneratedToken(token_id=len(half), origin=pb.TOKEN_ORIGIN_ACCEPTED, text=half)
            token.logprob.CopyFrom(
                types_pb2.TokenLogprob(logprob=-0.5, top_token_ids=[3, 9], top_logprobs=[-0.5, -1.5])
            )
            prompt = [pb.PromptToken(token_id=8, text="Hello")] if half == "one" and index == 0 else []
            told = pb.Round(tokens=[token], text_delta=half, sample_index=index, prompt_tokens=prompt)
            yield pb.GenerateResponse(round=told)
    for index in reversed(range(count)):
        ending = completion()
        ending.sample_index, ending.seed, ending.rule = index, 70 + index, types_pb2.ACCEPTANCE_RULE_LENIENT
        ending.acceptance.lenience = 0.25
        yield pb.GenerateResponse(completion=ending)
