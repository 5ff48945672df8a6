"""Rounds that targets begin with branches follow the distribution of the target, through real services and a gateway.

Weights are random and the vocabulary is small, so that the joint distribution of three tokens can be tested. Seeds are
fixed. Verdicts wait for branches, which makes hits of outcomes that have one; on their way branches may be lost, come
late, twice, in another order, and be made up.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.basics import grid
from support.drafting.branches import (
    Way,
    Ways,
    doubled,
    forged,
    lost,
    mislabelled,
    peeking,
    picked,
    reordered,
    sent,
    swapped,
)
from support.drafting.rules import Floats, chance
from support.models.tiny_models import write_tiny_model
from support.stack import PATIENT, Answer, reference_model, running_stack

from outrider.v1 import types_pb2

pytestmark = pytest.mark.slow

NUM_TOKENS, AT_A_TIME = 8, 4
PROMPT = [5, 3, 2, 7]
FIELDS: dict[str, Any] = {"max_tokens": 6, "draft_count": 2, "drafter": "model", "temperature": 1.0, "ignore_eos": True}
# The third to the fifth token: those before are plain decoding and a round without branches.
PLACES, CELLS = slice(2, 5), (1, 4, 4)
NUM_REQUESTS = 1500
FOUL = (sent, lost, doubled, reordered, swapped, forged)


class Law(NamedTuple):
    """How likely some answers are by the target's distribution and by the draft's, and what came of branches."""

    by_target: float
    by_draft: float
    outcomes: Counter[str]

    @property
    def hit_share(self) -> float:
        """Share of the rounds with branches that began with one."""
        return self.outcomes["hit"] / sum(self.outcomes.values())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft of eight tokens, both with random weights."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = (write_tiny_model(folder / str(seed), "llama", NUM_TOKENS, seed) for seed in range(2))
    return target, draft


def distribution(model: Path) -> Floats:
    """The joint distribution [V, V, V] of the tokens at PLACES."""
    joint, prefixes = np.ones(1), torch.tensor([PROMPT])
    for _ in range(PLACES.stop):
        with torch.no_grad():
            probs = reference_model(model)(prefixes).logits[:, -1].double().softmax(dim=-1).numpy()
        joint = (joint[:, None] * probs).ravel()
        added = torch.arange(NUM_TOKENS).repeat(len(prefixes))[:, None]
        prefixes = torch.cat((prefixes.repeat_interleave(NUM_TOKENS, dim=0), added), dim=1)
    whole: Floats = joint.reshape((-1,) + (NUM_TOKENS,) * (PLACES.stop - PLACES.start)).sum(axis=0)
    return whole


def named(ways: tuple[Way, ...]) -> str:
    return "+".join(way.__name__ for way in ways)


async def law_of(pair: tuple[Path, Path], rule: str, num_requests: int) -> Law:
    """Asks with the seeds 0, 1, 2, ..., some at a time."""
    number = getattr(types_pb2, f"ACCEPTANCE_RULE_{rule.upper()}")
    slots = asyncio.Semaphore(AT_A_TIME)
    target, draft = map(str, pair)
    async with running_stack(target, draft, dtype="float32", gateway={**PATIENT, "branches": 32}) as stack:

        async def answer(seed: int) -> Answer:
            async with slots:
                return await stack.generate(token_ids=PROMPT, seed=seed, rule=number, **FIELDS)

        answers = await asyncio.gather(*map(answer, range(num_requests)))
    outcomes = Counter(each.facts.branches for answer in answers for each in answer.rounds if each.facts.branches)
    tokens = torch.tensor([each.token_ids[PLACES] for each in answers])
    by_target, by_draft = (chance(tokens, distribution(each), CELLS) for each in pair)
    return Law(by_target, by_draft, outcomes)


@pytest.mark.parametrize("rule", [*grid("match", "ratio"), "block"])
@pytest.mark.parametrize("ways", [*grid((sent,), (swapped,), (forged,)), FOUL], ids=named)
async def test_rounds_with_branches_follow_the_distribution_of_the_target(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, rule: str, ways: tuple[Way, ...]
) -> None:
    """Fifteen hundred requests: chi-square of three tokens, p > 1e-4, where a good part of the rounds are hits.

    What was drawn after another outcome is as good under its own law: the target tests it with the right distribution.
    """
    led = Ways(ways, num_tokens=NUM_TOKENS).lead(monkeypatch)
    law = await law_of(pair, rule, NUM_REQUESTS)
    assert law.by_target > 1e-4
    assert law.by_draft < 1e-6
    assert law.hit_share > 0.1
    assert (led.told > 1000) == (ways != (sent,))


@pytest.mark.parametrize("way", grid(mislabelled, picked))
async def test_branches_that_break_the_law_are_found(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """Laws that the guesses were not drawn from, and a choice of branches that depends on their guesses."""
    Ways((way,), num_tokens=NUM_TOKENS).lead(monkeypatch)
    law = await law_of(pair, "ratio", NUM_REQUESTS)
    assert law.by_target < 1e-4


@pytest.mark.grid
async def test_a_choice_that_knows_the_coins_changes_no_law_where_a_miss_has_a_proposal(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then what is verified is the same, hit or miss."""
    Ways((peeking,), num_tokens=NUM_TOKENS).lead(monkeypatch)
    law = await law_of(pair, "ratio", NUM_REQUESTS)
    assert law.by_target > 1e-4
