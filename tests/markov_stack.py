"""The whole gateway over gRPC, in front of the services of the tiny model, whose twelve words a tokenizer knows."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
from markov import MarkovModel
from markov_services import DraftServicer, TargetServicer, serving

from gateway.server import RunningGateway, start
from gateway.settings import GatewaySettings
from outrider.rpc import error_from, open_channel
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.vocabulary import Vocabulary

WORDS = ["<end>", "king", "queen", "fox", "ring", "sea", "wolf", "gold", "tower", "dwarf", "apple", "moon"]
SEED = 9


@dataclass
class MarkovStack:
    """A running gateway and what is behind it."""

    gateway: RunningGateway
    target: TargetServicer
    draft: DraftServicer
    generate: Callable[..., "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"]

    async def run(self, request: pb.GenerateRequest) -> tuple[list[pb.Round], pb.Completion]:
        """All rounds and the completion, which must be the last message; raises what the gateway answered."""
        try:
            responses = [response async for response in self.generate(request)]
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        assert [response.WhichOneof("event") for response in responses[:-1]] == ["round"] * (len(responses) - 1)
        assert responses[-1].HasField("completion")
        return [response.round for response in responses[:-1]], responses[-1].completion


@asynccontextmanager
async def markov_stack(tokenizer: str, **changes: object) -> AsyncIterator[MarkovStack]:
    """Target, draft and gateway on free ports."""
    digests = Vocabulary.read(tokenizer).digests
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), digests)
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), digests)
    async with serving(target) as target_address, serving(draft) as draft_address:
        settings = GatewaySettings(target_address, tokenizer, draft_address, listen="127.0.0.1:0", rest_listen="")
        gateway = await start(replace(settings, **changes))  # type: ignore[arg-type]
        try:
            async with open_channel(gateway.address) as channel:
                yield MarkovStack(gateway, target, draft, GenerationServiceStub(channel).Generate)
        finally:
            await gateway.stop(0)


def request(max_tokens: int = 40, draft_count: int | None = 4, **fields: object) -> pb.GenerateRequest:
    """A request of two words with the test's seed."""
    speculation = pb.SpeculationSettings(draft_count=draft_count)
    fields = {"text": "fox sea", "seed": SEED, **fields}
    return pb.GenerateRequest(max_tokens=max_tokens, speculation=speculation, **fields)  # type: ignore[arg-type]
