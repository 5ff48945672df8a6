"""A draft in the target's process: real processes, real weights; every token is plain decoding's, in fewer messages."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
import torch
from support.basics import grid
from support.heads.tiny_heads import dflash, eagle1, write_head
from support.network import SMALL_WINDOW
from support.stack import request_of

from outrider.cli.local_stack import Addresses, Stack, start_stack
from outrider.engine.models.weights import NUMERICS
from outrider.errors import InvalidRequest
from outrider.model_files.model_names import embedded_model
from outrider.process.children import RestartPolicy, Supervisor
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

pytestmark = pytest.mark.slow

REQUEST = {"text": "Once upon a time there was a miller who had", "seed": 3, "max_tokens": 200, "ignore_eos": True}
QUICK = RestartPolicy(first_s=0.05, longest_s=0.2)
TARGET, DRAFT = embedded_model("target"), embedded_model("draft")


@asynccontextmanager
async def served(stack: Stack) -> AsyncIterator[tuple[GenerationServiceStub, Supervisor, Addresses]]:
    """A stack as `outrider up` runs it, with a supervisor that restarts what dies."""
    async with Supervisor(lambda text: None, lambda name, line: None, QUICK) as supervisor:
        addresses = await start_stack(supervisor, stack)
        watching = asyncio.create_task(supervisor.watch())
        try:
            async with open_channel(addresses.gateway, further=SMALL_WINDOW) as channel:
                yield GenerationServiceStub(channel), supervisor, addresses
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def answer(stub: GenerationServiceStub, **fields: object) -> tuple[list[int], list[pb.Round], pb.Completion]:
    """Tokens, rounds and completion of a request."""
    said: list[int] = []
    rounds: list[pb.Round] = []
    async for message in stub.Generate(request_of(**REQUEST | fields)):
        said += [token.token_id for token in message.round.tokens]
        if message.HasField("round"):
            rounds.append(message.round)
    return said, rounds, message.completion


@pytest.fixture(scope="module")
def alone() -> Stack:
    return Stack(TARGET, None, target_flags={"--draft-model": DRAFT})


async def test_tokens_are_those_of_plain_decoding(alone: Stack) -> None:
    """At temperature 0 and 0.8, for fixed K and the gateway's choice, named or not."""
    async with served(alone) as (stub, _, addresses):
        async with open_channel(addresses.target) as channel:
            info = await ModelServiceStub(channel).GetModelInfo(model_pb.GetModelInfoRequest())
            assert list(info.drafters) == ["hosted"]
            assert [offer.makes_trees for offer in info.drafter_offers] == [True]
        for temperature in (0.0, 0.8):
            plain, _, _ = await answer(stub, temperature=temperature, draft_count=0)
            for fields in ({"draft_count": 4}, {"draft_count": 4, "drafter": "hosted"}, {}):
                said, rounds, completion = await answer(stub, temperature=temperature, **fields)
                assert said == plain
                if fields:
                    assert completion.speculation.drafts > 0.8 * completion.speculation.rounds
                    assert completion.speculation.acceptance_rate > 0.4
                    assert {each.facts.draft_bytes for each in rounds} == {0}
                    assert {each.facts.drafter for each in rounds if each.facts.draft_count} == {"hosted"}
            for shape in ({}, {"max_width": 2}, {"is_static": True}, {"expansions": [2, 1, 1]}):
                fields = {"draft_count": 6, "shape": types_pb2.TreeShape(**shape), "return_rounds": True}
                said, rounds, completion = await answer(stub, temperature=temperature, **fields)
                assert said == plain
                assert completion.speculation.accepted_tokens > 60
                # Guesses that were rejected beside each other.
                parents = [[guess.parent for guess in each.rejected] for each in rounds]
                assert sum(len(set(each)) < len(each) for each in parents) > 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(stub, drafter="model")
        refused = error_from(caught.value)
        assert isinstance(refused, InvalidRequest)
        assert refused.message.startswith("speculation.drafter is 'model', but must be one of lookup, hosted")


@pytest.mark.parametrize(("dtype", "write"), [("int8", dflash), ("int4", eagle1)])
async def test_packed_weights_draft_for_packed_weights(tmp_path: Path, dtype: str, write: Callable[..., Path]) -> None:
    """A head and a draft, each in the target's process and in its type, give the tokens of plain decoding."""
    head = str(write(tmp_path / "head", hidden=384, vocab=4096, scale=0.3))
    stack = Stack(TARGET, None, target_flags={"--head": head, "--draft-model": DRAFT}, dtype=dtype)
    async with served(stack) as (stub, _, _):
        plain, _, completion = await answer(stub, temperature=0.8, draft_count=0)
        assert f"cpu-{NUMERICS.get(dtype, dtype)}-" in completion.numerics_id
        for drafter in ("hosted", write.__name__):
            said, _, completion = await answer(stub, temperature=0.8, draft_count=4, drafter=drafter)
            assert said == plain
            assert completion.speculation.drafts > 0.8 * completion.speculation.rounds


@pytest.mark.parametrize("drafter", ["hosted", *grid("eagle1", "dflash")])
async def test_a_target_killed_within_an_unasked_stretch_costs_time_and_no_token(
    alone: Stack, tmp_path: Path, drafter: str
) -> None:
    """Its successor fills the cache of the draft, or of a head that is mostly wrong, from the gateway's tokens."""
    if drafter == "eagle1":
        head = eagle1(tmp_path / "head", hidden=384, vocab=4096, scale=0.3)
        alone = Stack(TARGET, None, target_flags={"--head": head})
    elif drafter == "dflash":
        head = dflash(tmp_path / "head", hidden=384, vocab=4096, scale=0.3)
        alone = Stack(TARGET, None, target_flags={"--head": head})
    async with served(alone) as (stub, supervisor, _):
        for temperature in (0.0, 0.8):
            # More than the target may say unasked, and what is on its way.
            fields = {"temperature": temperature, "max_tokens": 300}
            plain, _, _ = await answer(stub, draft_count=0, **fields)
            said: list[int] = []
            num_rounds = drafted_after = 0
            async for message in stub.Generate(request_of(**REQUEST | fields, draft_count=4)):
                said += [token.token_id for token in message.round.tokens]
                num_rounds += 1
                if num_rounds == 20:
                    os.kill(supervisor.pid("target"), signal.SIGKILL)
                drafted_after += message.round.facts.draft_count if num_rounds > 30 else 0
            assert said == plain
            assert message.completion.survival.target_reopens >= 1
            assert drafted_after > 0


async def test_both_drafts_can_serve_one_gateway() -> None:
    """By name, or as the gateway likes: the same tokens, and rounds with K of either are distinguished by their way."""
    async with served(Stack(TARGET, DRAFT, target_flags={"--draft-model": DRAFT})) as (stub, supervisor, _):
        plain, _, _ = await answer(stub, temperature=0.8, draft_count=0)
        ways = {}
        for drafter in ("hosted", "model"):
            said, rounds, _ = await answer(stub, temperature=0.8, draft_count=4, drafter=drafter)
            assert said == plain
            ways[drafter] = sum(each.facts.draft_bytes for each in rounds)
        assert ways["hosted"] == 0
        assert ways["model"] > 0
        for _ in range(2):
            assert (await answer(stub, temperature=0.8))[0] == plain
        os.kill(supervisor.pid("draft"), signal.SIGKILL)
        said, rounds, _ = await answer(stub, temperature=0.8, draft_count=4, drafter="hosted")
        assert said == plain
        assert any(each.facts.draft_count for each in rounds)


async def test_drafters_that_need_no_model_of_their_own(tmp_path: Path) -> None:
    """Lookahead, and PaSS with embeddings that were never trained: tokens of plain decoding, on a new target too."""
    rows = torch.randn(3, 384, generator=torch.Generator().manual_seed(4))
    head = write_head(tmp_path / "pass", {"drafter": "pass"}, {"pass_embeddings": 0.05 * rows})
    stack = Stack(TARGET, None, target_flags={"--head": head, "--lookahead": True})
    async with served(stack) as (stub, supervisor, addresses):
        async with open_channel(addresses.target) as channel:
            info = await ModelServiceStub(channel).GetModelInfo(model_pb.GetModelInfoRequest())
            assert sorted(info.drafters) == ["lookahead", "pass"]
        for temperature in (0.0, 0.8):
            plain, _, _ = await answer(stub, temperature=temperature, draft_count=0)
            for drafter in ("lookahead", "pass"):
                said, rounds, completion = await answer(stub, temperature=temperature, draft_count=4, drafter=drafter)
                assert said == plain
                assert completion.speculation.draft_tokens > 100
                assert {each.facts.drafter for each in rounds if each.facts.draft_count} == {drafter}
                assert drafter == "pass" or completion.speculation.accepted_tokens > 10
            assert (await answer(stub, temperature=temperature))[0] == plain
        os.kill(supervisor.pid("target"), signal.SIGKILL)
        assert (await answer(stub, temperature=0.8, draft_count=4, drafter="lookahead"))[0] == plain
