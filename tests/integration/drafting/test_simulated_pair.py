"""A stack of simulated models, named as an operator names them, through the whole house."""

from collections.abc import Sequence

import pytest
from support.stack import PATIENT, Answer, answers, running_stack, token_ids

from outrider.cli.bench.common import OPENINGS
from outrider.v1 import types_pb2

PROMPTS = OPENINGS[:16]
FAST = "stretch=0.01"
PAIR = (f"sim:h100-8b@{FAST}", f"sim:h100-1b@{FAST}")


def judged(results: Sequence[Answer]) -> tuple[int, int]:
    """Guesses that were kept, and those that were judged on their own: up to the first of a round that was not kept."""
    facts = [each.facts for result in results for each in result.rounds if each.facts.evaluated_count]
    kept = sum(each.accepted_count for each in facts)
    return kept, kept + sum(each.accepted_count < each.evaluated_count for each in facts)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.8, 0.0])
async def test_speculation_changes_no_token(temperature: float) -> None:
    """Sixteen streams at a time say the same with no draft token, few, many, and as many as the gateway likes."""
    async with running_stack(*PAIR, gateway=PATIENT) as stack:
        fields = {"temperature": temperature, "max_tokens": 40}
        plain = await answers(stack, PROMPTS, draft_count=0, **fields)
        assert len(set(token_ids(plain))) == len(PROMPTS)
        for draft_count in (2, 4, 8, None):
            results = await answers(stack, PROMPTS, draft_count=draft_count, **fields)
            assert token_ids(results) == token_ids(plain)
            assert all(len(each) == 40 for each in token_ids(results))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "acceptance"), [("match", 0.0), ("match", 0.6), ("match", 1.0), ("ratio", 0.6), ("block", 0.6)]
)
async def test_the_draft_is_accepted_as_often_as_its_name_says(rule: str, acceptance: float) -> None:
    """Under every exact rule, within five standard deviations of about 500 guesses."""
    async with running_stack(PAIR[0], f"sim:h100-1b@acceptance={acceptance},{FAST}", gateway=PATIENT) as stack:
        number = types_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.upper()}")
        results = await answers(stack, PROMPTS, temperature=0.8, max_tokens=48, draft_count=4, rule=number)
        kept, looked_at = judged(results)
    assert looked_at > 300
    assert abs(kept - acceptance * looked_at) <= 5 * (looked_at * acceptance * (1 - acceptance)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.8, 0.0])
async def test_a_tree_keeps_more_than_a_chain_as_deep(temperature: float) -> None:
    """And both, like whatever the gateway chooses, say what plain decoding says."""
    async with running_stack(*PAIR, gateway=PATIENT) as stack:
        # By the draft alone, because a lookup would find the answers before.
        fields = {"temperature": temperature, "max_tokens": 64, "drafters": ["model"]}
        plain = await answers(stack, PROMPTS, temperature=temperature, max_tokens=64, draft_count=0)
        chains = await answers(stack, PROMPTS, draft_count=4, **fields)
        trees = await answers(stack, PROMPTS, draft_count=24, shape=types_pb2.TreeShape(max_depth=4), **fields)
        chosen = await answers(stack, PROMPTS, draft_count=None, **fields)
    assert token_ids(plain) == token_ids(chains) == token_ids(trees) == token_ids(chosen)
    num_rounds = [sum(len(each.rounds) for each in some) for some in (chains, trees)]
    # At temperature 0 it should be 4.2 tokens a round for 3.2; the first rounds teach the tree's scale.
    assert num_rounds[0] > 1.1 * num_rounds[1]


@pytest.mark.slow
async def test_blocks_prefixes_and_preemption_are_the_real_ones() -> None:
    """With a pool that holds a few streams at a time, and prompts that begin alike, not one token differs."""
    prompts = [OPENINGS[0] * 6 + opening for opening in PROMPTS]
    async with running_stack(*PAIR, gateway=PATIENT) as stack:
        expected = token_ids(await answers(stack, prompts, temperature=0.0, max_tokens=40, draft_count=0))
    async with running_stack(*PAIR, gateway=PATIENT, kv_tokens=512) as stack:
        fields = {"temperature": 0.0, "max_tokens": 40, "cache_salt": "one"}
        for draft_count in (0, 4):
            assert token_ids(await answers(stack, prompts, draft_count=draft_count, **fields)) == expected
        counts = (await stack.info(stack.target)).preemption_count
        assert counts > 0


@pytest.mark.slow
async def test_every_report_names_it() -> None:
    """Model, device and numerics; its busy time is its formula's, and log-probabilities are those of its peaks."""
    async with running_stack(*PAIR, gateway=PATIENT, kv_tokens=2048) as stack:
        answer = await stack.generate(
            text=PROMPTS[0], max_tokens=12, seed=1, draft_count=4, temperature=0.8, logprob_count=2
        )
        info, draft = await stack.info(stack.target), await stack.info(stack.draft)
        busy_s = stack.target.runner.forward_counts.busy_s
    assert (info.model_name, draft.model_name) == PAIR
    assert (info.device, info.parameter_count) == ("simulated H100 SXM", 8_030_261_248)
    assert "simulated" in info.numerics_id
    assert "simulated" in answer.completion.numerics_id
    # Twelve tokens in at least three rounds, each of which takes 63 microseconds and a little more.
    assert 3 * 63e-6 < busy_s < 12 * 70e-6
    assert all(token.logprob.logprob == 0 for each in answer.rounds for token in each.tokens)
