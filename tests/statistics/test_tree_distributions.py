"""Rounds with trees under `ratio` and `block`: several rounds' tokens follow the target's joint distribution.

The seeds are 0 to 199,999, so a test that passes once always passes. Noise that should be of a row alone and is not is
planted, and must be found; what shows in one round alone is in tests/target_service/rules/test_exact_trees.py.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.drafting.rules import BASE, Language, chance
from support.drafting.trees import SHAPES, TreeRounds, TreeRule, lane_keys

from outrider.engine.noise import Purpose, round_key
from target_service.rules.recursive_rejection import recursive_rejection
from target_service.rules.traversal import traversal

NUM_SEEDS = 200_000
LANGUAGE = Language.random(16, 0.7)
# A less likely draft, whose second sibling is neither kept nor rejected for certain where the first was not kept.
DOUBTFUL = Language.random(8, 0.3)
RULES: dict[str, TreeRule] = {"ratio": recursive_rejection, "block": traversal}
BY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operations gain nothing by a second thread, and on a busy machine they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@BY_RULE
def test_three_tokens_follow_the_joint_distribution(rule: TreeRule, shape: str) -> None:
    """Sixteen tokens, trees in every round: chi-square over up to 4,096 cells. Siblings repeat in two of the shapes."""
    rounds = TreeRounds(LANGUAGE, rule, SHAPES[shape], num_seeds=NUM_SEEDS, replacement=shape in {"4", "3x1"})
    assert chance(rounds.tokens(3), LANGUAGE.distribution(3)) > 1e-4


class WithoutLanes(TreeRounds):
    """All rows of a depth have one key for a purpose, that of the first of them."""

    purpose = Purpose.DRAFT

    def lane_keys(self, seeds: torch.Tensor, base_len: int, row: int, purpose: Purpose) -> torch.Tensor:
        first = self.tree.depths.index(self.tree.depths[row]) if purpose is self.purpose else row
        return super().lane_keys(seeds, base_len, first, purpose)


class CoinsWithoutLanes(WithoutLanes):
    """All rows of a depth are tested with one uniform."""

    purpose = Purpose.ACCEPTANCE


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["2", "2x2"])
@BY_RULE
def test_siblings_drawn_with_one_key_are_found(rule: TreeRule, shape: str) -> None:
    """B9: they are the same token, but tested as if they might have been others. With a quarter of the seeds."""
    rounds = WithoutLanes(LANGUAGE, rule, SHAPES[shape], num_seeds=NUM_SEEDS // 4, replacement=True)
    assert chance(rounds.tokens(3), LANGUAGE.distribution(3)) < 1e-6


@pytest.mark.slow
@BY_RULE
def test_siblings_tested_with_one_uniform_are_found(rule: TreeRule) -> None:
    """B9: that the first one failed says something about the uniform."""
    rounds = CoinsWithoutLanes(DOUBTFUL, rule, (4,), num_seeds=NUM_SEEDS)
    assert chance(rounds.tokens(3), DOUBTFUL.distribution(3)) < 1e-6
    right = TreeRounds(DOUBTFUL, rule, (4,), num_seeds=NUM_SEEDS)
    assert chance(right.tokens(3), DOUBTFUL.distribution(3)) > 1e-4


class WithoutTheRound(TreeRounds):
    """A position that is drafted again is drawn and tested with the noise of the round before."""

    def lane_keys(self, seeds: torch.Tensor, base_len: int, row: int, purpose: Purpose) -> torch.Tensor:
        position, lane = base_len + self.tree.depths[row] - 1, self.lanes[purpose][row - 1]
        keys = lane_keys(np.arange(self.num_seeds, dtype=np.uint64), BASE, position, purpose, lane)
        return torch.from_numpy(keys.view(np.int64))[seeds]


@pytest.mark.slow
def test_noise_that_serves_two_rounds_is_found_under_block() -> None:
    """Traversal looks at rows after the one where it ends, so what was drawn there depends on that end."""
    tokens = WithoutTheRound(LANGUAGE, traversal, (2, 1, 1), num_seeds=NUM_SEEDS).tokens(3)
    assert chance(tokens[:, :1], LANGUAGE.distribution(1)) > 1e-4
    assert chance(tokens, LANGUAGE.distribution(3)) < 1e-6


def test_keys_of_many_seeds_are_those_of_the_engine() -> None:
    """Bit for bit, in every lane."""
    seeds = np.random.default_rng(0).integers(2**63, size=50).astype(np.uint64)
    for lane in (0, 1, 5):
        expected = [round_key(int(seed), BASE + 2, BASE + 4, Purpose.DRAFT, lane) for seed in seeds]
        assert lane_keys(seeds, BASE + 2, BASE + 4, Purpose.DRAFT, lane).view(np.int64).tolist() == expected
