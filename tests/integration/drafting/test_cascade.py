"""A draft service with a cascade and a real gateway: every token is plain decoding's, and no block is lost."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.basics import check_empty, eventually, grid
from support.models.tiny_models import write_tiny_model
from support.stack import DRAFT, PATIENT, HaltedTarget, RunningStack, answers, request_of, running_stack, token_ids

from draft_service.server import DraftSettings, start
from outrider.errors import InvalidRequest, ModelRefused
from outrider.v1 import types_pb2

PROMPTS = [
    "Once upon a time there was a miller who had three sons.",
    "The king said: go away. The king said: go away. The king said:",
    "A fox met a wolf. A fox met a bear. A fox met",
    "Long ago, in a deep forest",
] * 2
CASCADES: list[Mapping[str, object]] = [
    {"cascade": f"{DRAFT}+lookup"},
    {"cascade": "lookup"},
    {"cascade": DRAFT},
    {"cascade": "lookup", "cascade_depth": 2},
    {"cascade": DRAFT, "cascade_depth": 2},
]
# A draft larger than the model that guesses for it.
LARGE = "sized:draft-10m"


async def check_both_pools(stack: RunningStack) -> None:
    """Waits until nothing is held, by the draft or by what guesses for it."""
    await stack.quiet()
    for runner in stack.draft.facts.hosted.values():
        await stack.draft.worker.call(runner.pool.check_integrity)
        await stack.draft.worker.call(lambda runner=runner: check_empty(runner.pool))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cascade",
    [*CASCADES[::2], *grid(*CASCADES[1::2])],
    ids=lambda each: "-".join(map(str, each.values())).replace(DRAFT, "small"),
)
async def test_tokens_are_those_of_plain_decoding(cascade: Mapping[str, object]) -> None:
    """At temperatures 0 and 0.8, eight at a time; what is proposed is what the same draft proposes alone."""
    async with running_stack(draft=LARGE, draft_options=cascade, gateway=PATIENT) as stack:
        for temperature in (0.0, 0.8):
            fields = {"max_tokens": 48, "temperature": temperature, "ignore_eos": True}
            plain = token_ids(await answers(stack, PROMPTS, enabled=False, **fields))
            found = await answers(stack, PROMPTS, enabled=True, draft_count=6, return_rounds=True, **fields)
            assert token_ids(found) == plain
            rounds = [each for answer in found for each in answer.rounds]
            assert any(each.facts.draft_count for each in rounds)
        await check_both_pools(stack)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*grid(types_pb2.ACCEPTANCE_RULE_RATIO), types_pb2.ACCEPTANCE_RULE_BLOCK])
async def test_rules_with_laws_say_the_same_with_a_cascade(rule: int) -> None:
    """The same proposals with the same distributions meet the same uniforms, so that not one token differs."""
    said = []
    for cascade in ({}, *CASCADES[:3]):
        async with running_stack(draft=LARGE, draft_options=cascade, gateway=PATIENT) as stack:
            fields = {
                "max_tokens": 32,
                "temperature": 0.9,
                "ignore_eos": True,
                "draft_count": 5,
                "drafter": "model",
                "rule": rule,
            }
            said.append(token_ids(await answers(stack, PROMPTS[:4], **fields)))
            await check_both_pools(stack)
    assert all(each == said[0] for each in said[1:])


@pytest.mark.slow
async def test_cancelled_and_lost_requests_leave_no_block() -> None:
    """In neither pool, whether a client goes away or the draft service is killed and comes back."""
    async with running_stack(draft=LARGE, draft_options={"cascade": DRAFT}, gateway=PATIENT) as stack:
        halted = HaltedTarget(stack, 16)
        calls = [
            stack.call(request_of(text=prompt, seed=seed, max_tokens=400, ignore_eos=True, draft_count=6))
            for seed, prompt in enumerate(PROMPTS)
        ]
        for call in calls:
            await call.read()
        await halted.make()
        [smaller] = stack.draft.facts.hosted.values()
        await eventually(lambda: smaller.pool.num_free < smaller.pool.num_blocks)
        for call in calls[::2]:
            call.cancel()
        lost = stack.draft
        await stack.stop_draft()
        check_empty(lost.runner.pool)
        check_empty(smaller.pool)
        await stack.start_draft()
        for call in calls[1::2]:
            call.cancel()
        await check_both_pools(stack)


@pytest.mark.slow
async def test_a_full_pool_costs_guesses_and_no_token() -> None:
    """Where the smaller model's cache is too small for all, and where the draft's is."""
    async with running_stack(draft=LARGE, draft_options={"cascade": DRAFT, "kv_tokens": 192}, gateway=PATIENT) as stack:
        fields = {"max_tokens": 48, "temperature": 0.8, "ignore_eos": True}
        plain = token_ids(await answers(stack, PROMPTS, enabled=False, **fields))
        assert token_ids(await answers(stack, PROMPTS, enabled=True, draft_count=6, **fields)) == plain
        await check_both_pools(stack)


async def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """By the name of the option, as is what is no model, and a depth of nothing or of too much."""
    other = write_tiny_model(tmp_path / "other", "llama", vocab_size=300)
    settings = DraftSettings(DRAFT, "127.0.0.1:0", threads=1, kv_tokens=1024)
    with pytest.raises(ModelRefused, match=r"--cascade .*other does not fit the draft: "):
        await start(replace(settings, cascade=str(other)))
    with pytest.raises(ModelRefused, match=r"--cascade is '/nowhere', but must be a folder"):
        replace(settings, cascade="/nowhere+lookup")
    with pytest.raises(InvalidRequest, match=r"--cascade-depth is 2, but must be left out without --cascade"):
        replace(settings, cascade_depth=2)
    with pytest.raises(InvalidRequest, match=r"--cascade-depth is 65, but must be in \[0, 64\]"):
        replace(settings, cascade="lookup", cascade_depth=65)
    assert replace(settings, cascade="sized:10m+lookup").cascade == "sized:draft-10m+lookup"
