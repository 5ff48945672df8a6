"""A client that does not read, over a real connection with a small window."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.basics import eventually
from support.network import SMALL_WINDOW
from support.services.markov import EOS, MarkovModel, plain_decoding
from support.services.markov_services import TargetServicer, serving
from support.stack import request_of, running_stack

from gateway.server import start
from gateway.settings import GatewaySettings
from outrider.model_files.vocabulary import Vocabulary
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

TOKENIZER = str(Path(__file__).resolve().parents[3] / "models" / "target")


@asynccontextmanager
async def gateway(
    client_stall_s: float, max_requests: int = 1
) -> AsyncIterator[tuple[TargetServicer, GenerationServiceStub]]:
    """A target that talks for long, and a client of a gateway that serves so many requests at a time."""
    model = MarkovModel()
    for row in model._rows:
        row[EOS] = 1e-9
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, model, Vocabulary.read(TOKENIZER).digests)
    target.vocabulary_size = 4096
    async with serving(target) as address:
        settings = GatewaySettings(
            address,
            TOKENIZER,
            listen="127.0.0.1:0",
            rest_listen="",
            max_requests=max_requests,
            client_stall_seconds=client_stall_s,
        )
        running = await start(settings)
        try:
            async with grpc.aio.insecure_channel(running.address, options=SMALL_WINDOW) as channel:
                yield target, GenerationServiceStub(channel)
        finally:
            await running.stop(0)


def request(max_tokens: int, seed: int = 1) -> pb.GenerateRequest:
    """A plain request."""
    speculation = pb.SpeculationSettings(enabled=False)
    prompt = types_pb2.TokenIds(token_ids=[3, 5])
    return pb.GenerateRequest(token_ids=prompt, max_tokens=max_tokens, seed=seed, speculation=speculation)


async def test_a_client_that_does_not_read_loses_its_request() -> None:
    """Its sessions are closed, the next request has its place, and the call says why it ended."""
    async with gateway(client_stall_s=0.2) as (target, stub):
        stalled = stub.Generate(request(400))
        await eventually(lambda: target.sessions == 1)
        await eventually(lambda: target.sessions == 0, 5)
        responses = [response async for response in stub.Generate(request(3))]
        assert responses[-1].HasField("completion")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stalled:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "The client read nothing for 0.2 seconds"


@pytest.mark.slow
async def test_a_first_message_that_nobody_reads_does_not_keep_its_call_open() -> None:
    """It has more log-probabilities of the prompt than a connection takes in before it is read."""
    async with running_stack(draft=None, gateway={"client_stall_seconds": 0.2}) as stack:
        fields = {"token_ids": [5] * 3000, "logprob_count": 20, "echo": True}
        async with grpc.aio.insecure_channel(stack.gateway.address, options=SMALL_WINDOW) as channel:
            stalled = GenerationServiceStub(channel).Generate(request_of(**fields, max_tokens=400))
            await eventually(lambda: stack.gateway.frontend.admission.running == 1)
            await eventually(lambda: stack.gateway.frontend.admission.running == 0)
            with pytest.raises(grpc.aio.AioRpcError, match="The client read nothing"):
                async for _ in stalled:
                    pass


@pytest.mark.slow
async def test_a_client_that_does_not_read_holds_nobody_up() -> None:
    """Its session waits, on the link that it shares with 64 others, which run to the tokens of plain decoding."""
    others, num_tokens = range(64), 32
    async with gateway(client_stall_s=600, max_requests=65) as (target, stub):

        async def said(seed: int) -> tuple[int, ...]:
            found = [response.round.tokens async for response in stub.Generate(request(num_tokens, seed))]
            return tuple(token.token_id for tokens in found for token in tokens)

        stalled = stub.Generate(request(400))
        await eventually(lambda: target.sessions == 1)
        answers = await asyncio.gather(*map(said, others))
        assert answers == [plain_decoding(target.model, (3, 5), seed, 2 + num_tokens)[2:] for seed in others]
        await eventually(lambda: target.sessions == 1)
        assert target.answers - len(others) * num_tokens < 400
        assert target.links == 1
        stalled.cancel()
        await eventually(lambda: target.sessions == 0)


async def test_a_client_that_reads_late_loses_nothing() -> None:
    """A pause that is shorter than the limit is back-pressure and no fault."""
    async with gateway(client_stall_s=30) as (target, stub):
        slow = stub.Generate(request(400))
        await eventually(lambda: target.sessions == 1)
        responses = [response async for response in slow]
        assert responses[-1].completion.usage.completion_tokens == 400


@pytest.mark.slow
async def test_what_was_said_before_an_error_comes_before_it() -> None:
    """Also to a client that reads nothing until the answer has failed, and has a long message to read then."""
    fields = {"token_ids": [5] * 3000, "logprob_count": 20, "echo": True, "enabled": False, "max_tokens": 9}
    schema = {"properties": {f"p{number}": {"type": "integer"} for number in range(400)}, "additionalProperties": False}
    constraint = pb.Constraint(json_schema=json.dumps({"type": "object", **schema}))
    tokens: list[types_pb2.Token] = []
    async with (
        running_stack(draft=None) as stack,
        grpc.aio.insecure_channel(stack.gateway.address, options=SMALL_WINDOW) as channel,
    ):
        call = GenerationServiceStub(channel).Generate(request_of(**fields, constraint=constraint))

        async def read() -> None:
            async for response in call:
                tokens.extend(response.round.tokens)

        await eventually(lambda: len(stack.target.table) == 1)
        await eventually(lambda: len(stack.target.table) == 0)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await read()
        assert f"behind {len(tokens)} token of the answer it has " in failed.value.details()
