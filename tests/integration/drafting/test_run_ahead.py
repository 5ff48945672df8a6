"""A draft that runs ahead: real services and weights; every token is plain decoding's, and nothing is held at the end.

The target begins no step before the draft has nothing left to do, so that branches come in time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.basics import eventually, held
from support.models.tiny_models import TARGET, TRAINED
from support.services.lying_draft import Manner, lying_draft
from support.stack import (
    PATIENT,
    Answer,
    HaltedTarget,
    RunningStack,
    after_the_draft,
    answers,
    request_of,
    running_stack,
    token_ids,
)

from gateway.server import start as start_gateway
from gateway.settings import GatewaySettings
from outrider.cli.bench.common import OPENINGS
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

pytestmark = pytest.mark.early

AHEAD = {**PATIENT, "branches": 16, "lookup": False}
HASTY = {"draft_deadline_min_s": 0.05, "draft_deadline_max_s": 0.1}
COMMON: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
LIKELY_EOS = {0: 11.0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "likely EOS": {"logit_bias": LIKELY_EOS},
    "ignored EOS": {"logit_bias": LIKELY_EOS, "ignore_eos": True},
    "stops": {"stop": [" the"], "min_tokens": 6, "stop_token_ids": [11]},
    "numbers": {"logprob_count": 2, "return_rounds": True},
    "grammar": {"constraint": pb.Constraint(regex=r"([a-z]{2,7} ){3,9}[a-z]{2,7}\.")},
    "samples": {"sample_count": 3},
    "truncated": {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
    "short": {"max_tokens": 7, "ignore_eos": True},
}


@asynccontextmanager
async def running_ahead(
    target: str = str(TARGET), draft: str = str(TRAINED), gateway: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[RunningStack]:
    """A stack whose target waits for the draft."""
    async with running_stack(target, draft, gateway={**AHEAD, **(gateway or {})}, **options) as stack:
        after_the_draft(stack)
        yield stack


def outcomes(results: Sequence[Answer]) -> Counter[str]:
    """What came of branches in all rounds."""
    return Counter(each.facts.branches for result in results for each in result.rounds)


def by_sample(results: Sequence[Answer]) -> list[list[tuple[int, int]]]:
    """Tokens of each answer with the samples that said them."""
    return [
        sorted(
            ((each.sample_index, token.token_id) for each in result.rounds for token in each.tokens), key=lambda t: t[0]
        )
        for result in results
    ]


async def test_no_token_depends_on_branches() -> None:
    """Whatever a request asks for; alone and with others, branches are hit."""
    counted: Counter[str] = Counter()
    async with running_ahead() as stack:
        for name, fields in CASES.items():
            case = COMMON | fields
            plain = by_sample(await answers(stack, OPENINGS[:4], draft_count=0, **case))
            for count in ({"draft_count": 4}, {"draft_count": 1}, {}):
                results = await answers(stack, OPENINGS[:4], **count, **case)
                assert by_sample(results) == plain, (name, count)
                assert not any(each.facts.target_reopens for result in results for each in result.rounds)
                counted += outcomes(results)
            alone = await answers(stack, OPENINGS[:1], draft_count=4, **case)
            assert by_sample(alone) == plain[:1], name
            counted += outcomes(alone)
            await stack.quiet()
    assert counted["hit"] > 50
    assert counted["miss"] > 50


async def test_every_drafter_beside_a_hosted_one_and_lookups_says_the_same() -> None:
    """Those that make branches have hits, and of those that make none no round says anything."""
    prompts = [OPENINGS[0] * 4 + opening for opening in OPENINGS[:4]]
    options = {"target_options": {"draft_model": str(TRAINED)}, "gateway": {"lookup": True}}
    async with running_ahead(**options) as stack:
        plain = token_ids(await answers(stack, prompts, draft_count=0, **COMMON))
        for drafter in ("model", "coupled", "sampled", "hosted", ""):
            for count in ({"draft_count": 4}, {}):
                results = await answers(stack, prompts, drafter=drafter, **count, **COMMON)
                assert token_ids(results) == plain, (drafter, count)
                if count and drafter:
                    assert (outcomes(results)["hit"] > 0) == (drafter != "hosted"), drafter
                    assert (outcomes(results).keys() == {""}) == (drafter == "hosted"), drafter
        several = await answers(stack, prompts, drafters=["model", "lookup"], draft_count=4, **COMMON)
        assert token_ids(several) == plain
        assert outcomes(several).keys() == {""}


async def test_small_caches_and_contexts_change_no_token(tmp_path: Path) -> None:
    """Sessions give way to others on both sides, and prompts and answers go past the draft's context."""
    prompts = [OPENINGS[0] * (1 + number) + opening for number, opening in enumerate(OPENINGS[:8])]
    fields = {**COMMON, "ignore_eos": True, "cache_salt": "one"}
    async with running_ahead(gateway={"branches": 32}) as roomy:
        plain = token_ids(await answers(roomy, prompts, draft_count=0, **fields))
    small = {"target_options": {"kv_tokens": 256}, "draft_options": {"kv_tokens": 256, "context_len": 96}}
    async with running_ahead(gateway={"branches": 32}, **small) as stack:
        halted = HaltedTarget(stack)
        running = asyncio.create_task(answers(stack, prompts, draft_count=4, **fields))
        # All want room at the same time.
        await eventually(lambda: len(stack.target.table) == len(prompts))
        halted.let_go()
        results = await running
        assert token_ids(results) == plain
        assert (await stack.info(stack.target)).preemption_count > 0
        assert outcomes(results)["hit"] > 0
        reasons = {each.facts.fallback_reason for result in results for each in result.rounds}
        assert pb.FALLBACK_REASON_DRAFT_CONTEXT in reasons


async def test_a_request_that_is_left_in_the_middle_holds_nothing() -> None:
    """At any round; the others go on."""
    async with running_ahead() as stack:
        fields = {**COMMON, "ignore_eos": True, "max_tokens": 60}
        plain = token_ids(await answers(stack, OPENINGS[:1], draft_count=0, **fields))
        for number in range(1, 9):
            call = stack.call(request_of(text=OPENINGS[number], seed=number, draft_count=4, **fields))
            others = asyncio.create_task(answers(stack, OPENINGS[:1], draft_count=4, **fields))
            for _ in range(number):
                await call.read()
            call.cancel()
            assert token_ids(await others) == plain
        await stack.quiet()


async def test_a_frozen_draft_is_waited_for_at_its_deadline_alone() -> None:
    """Rounds that began by a branch wait for no draft; the tokens stay, and the work of the frozen one is dropped."""
    async with running_stack(str(TARGET), str(TRAINED), gateway={**AHEAD, **HASTY}) as stack:
        fields = {**COMMON, "text": OPENINGS[0], "seed": 3, "ignore_eos": True, "max_tokens": 120}
        plain = (await stack.generate(**fields, draft_count=0)).token_ids
        ended = after_the_draft(stack)
        rounds: list[pb.Round] = []
        async with AsyncExitStack() as frozen:
            async for message in stack.call(request_of(**fields, draft_count=4)):
                rounds.append(message.round)
                if message.round.facts.branches == "hit" and not ended.is_set():
                    ended.set()
                    await frozen.enter_async_context(held(stack.draft))
    assert [token.token_id for each in rounds for token in each.tokens] == list(plain)
    late = [each.facts for each in rounds if each.facts.fallback_reason == pb.FALLBACK_REASON_DRAFT_LATE]
    assert late
    assert all(not each.facts.draft_wait_us for each in rounds if each.facts.branches == "hit")
    # From the second deadline in a row that it misses on it rests.
    assert sum(bool(each.draft_wait_us) for each in late) <= 2
    assert not any(each.facts.target_reopens for each in rounds)


@pytest.mark.parametrize("stretch", [2.0, 20.0])
async def test_a_draft_that_is_slower_costs_no_token(stretch: float) -> None:
    """Ten times as slow; what comes too late is dropped. Messages are in time beside a busy machine's steps too."""
    async with running_stack(
        "sim:h100-8b@stretch=8", f"sim:h100-1b@acceptance=0.8,stretch={stretch}", gateway=AHEAD
    ) as stack:
        fields = {"temperature": 0.8, "max_tokens": 20}
        plain = token_ids(await answers(stack, OPENINGS[:4], draft_count=0, **fields))
        for at_a_time in (1, 4):
            results = await answers(stack, OPENINGS[:4], at_a_time=at_a_time, draft_count=3, **fields)
            assert token_ids(results) == plain
            assert outcomes(results)["hit" if stretch < 8 else "late"] > 0


Responses = list[draft_pb.ProposeResponse]
Wrong = Callable[[Responses, Responses], Responses]
"""What comes in the place of some branches; the list is for what is kept for later."""


def doubled(branches: Responses, _kept: Responses) -> Responses:
    """Each comes again."""
    return [each for each in branches for _ in range(2)]


def lost(_branches: Responses, _kept: Responses) -> Responses:
    """None comes."""
    return []


def delayed(branches: Responses, kept: Responses) -> Responses:
    """Each comes when the next ones should."""
    come, kept[:] = list(kept), branches
    return come


def exchanged(branches: Responses, kept: Responses) -> Responses:
    """Each comes with what another one says."""
    for each in branches:
        kept.append(draft_pb.ProposeResponse(branches=each.branches))
        each.branches.CopyFrom(kept.pop(0).branches if len(kept) > 3 else types_pb2.Branches())
    return branches


def forged(branches: Responses, _kept: Responses) -> Responses:
    """Guesses are other ones, after the outcomes that may come."""
    for branch in (branch for each in branches for branch in each.branches.branches):
        branch.token_ids[:] = [(token_id + 7) % 4096 for token_id in branch.token_ids]
    return branches


def misplaced(branches: Responses, _kept: Responses) -> Responses:
    """For other lengths and epochs."""
    for number, each in enumerate(branches):
        each.fence.base_len += (-1, 1, 0)[number % 3]
        each.fence.epoch += (0, 0, 1)[number % 3]
    return branches


def malformed(branches: Responses, _kept: Responses) -> Responses:
    """What no draft may send."""
    for each in branches:
        each.branches.branches.add(next_token_id=4096, token_ids=[1])
    return branches


def by(wrong: Wrong) -> Manner:
    """The manner of a draft that does this to branches, and hands on the rest."""
    kept: Responses = []

    async def manner(frame: draft_pb.DraftServiceLinkResponse, _context: object) -> AsyncIterator[Any]:
        come: Responses = []
        for response in frame.responses:
            come += wrong([response], kept) if response.HasField("branches") else [response]
        copy = draft_pb.DraftServiceLinkResponse(
            responses=come, instance_id=frame.instance_id, numerics_id=frame.numerics_id
        )
        yield copy

    return manner


@pytest.mark.parametrize("wrong", [doubled, lost, delayed, exchanged, forged, misplaced, malformed])
async def test_whatever_becomes_of_branches_on_their_way_tokens_stay(wrong: Wrong) -> None:
    """They are doubled, lost, late, others' or forged: nobody is at fault, unless no draft may send them."""
    async with (
        running_stack(str(TARGET), str(TRAINED)) as stack,
        lying_draft(stack.draft.address) as (draft, address),
    ):
        settings = GatewaySettings(
            stack.target.address, str(TARGET), address, listen="127.0.0.1:0", rest_listen="", **AHEAD
        )
        gateway, stack.gateway = stack.gateway, await start_gateway(settings)
        assert gateway is not None
        await gateway.stop(0)
        fields = {**COMMON, "ignore_eos": True}
        plain = token_ids(await answers(stack, OPENINGS[:4], draft_count=0, **fields))
        after_the_draft(stack)
        draft.manner = by(wrong)
        results = await answers(stack, OPENINGS[:4], draft_count=4, **fields)
        assert token_ids(results) == plain
        assert draft.told > 0
        assert stack.gateway.backend.draft is not None
        faults = stack.gateway.backend.draft.peers[0].faults
        hits = outcomes(results)["hit"]
    # What was said for another place may not fit this one.
    assert wrong is exchanged or (faults > 0) == (wrong is malformed)
    assert wrong in (exchanged, delayed) or (hits > 0) == (wrong in (doubled, forged))
    assert not any(each.facts.target_reopens for result in results for each in result.rounds)
