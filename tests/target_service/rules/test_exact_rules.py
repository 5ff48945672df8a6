"""`ratio` and `block` follow the target's distribution exactly: every outcome is gone through, nothing is sampled."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from support.drafting.rules import (
    Floats,
    Pair,
    RuleFunction,
    acceptance,
    ask,
    chains,
    committed_distribution,
    mean_accepted,
)
from torch import Tensor

from target_service.rules.block import block
from target_service.rules.outcome import ChainOutcome
from target_service.rules.ratio import ratio

# Vocabulary, draft tokens a round, tokens of the distribution.
SIZES = [(3, 1, 1), (3, 1, 2), (3, 2, 2), (4, 2, 3), (3, 3, 3)]
RULES = {"ratio": ratio, "block": block}


def random_pair(num_tokens: int, seed: int = 3) -> Pair:
    """Both models' distributions, with tokens that only one of them has, and one row in which they are the same."""
    dice = np.random.default_rng(seed)
    weights = dice.integers(0, 4, (num_tokens + 1, num_tokens)) * dice.integers(1, 1000, (num_tokens + 1, num_tokens))
    weights[:, 0] += 1
    target = dice.dirichlet([0.6] * num_tokens, num_tokens + 1) * (dice.random((num_tokens + 1, num_tokens)) < 0.8)
    target[:, 1] += 0.1
    target /= target.sum(axis=1, keepdims=True)
    target[2] = weights[2] / weights[2].sum()
    return Pair(target, weights)


def distance(rule: RuleFunction, num_tokens: int, count: int, length: int, pair: Pair | None = None) -> float:
    """Largest difference between the distribution of what is committed and the target's own."""
    pair = pair or random_pair(num_tokens)
    return float(abs(committed_distribution(rule, pair, count, length) - pair.distribution(length)).max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RULES)
def test_the_joint_distribution_is_the_target_s(name: str, size: tuple[int, int, int]) -> None:
    """Every chain, every side of every uniform, and the tokens that the target adds where a round commits too few."""
    assert distance(RULES[name], *size) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_models_that_agree_keep_everything(name: str) -> None:
    """Nothing is rejected where both distributions are the same, and the distribution is still right: 0/0 in `block` is
    no accident.
    """
    weights = random_pair(3).weights
    pair = Pair(weights / weights.sum(axis=1, keepdims=True), weights)
    assert mean_accepted(RULES[name], pair, 2) == pytest.approx(2, abs=1e-9)
    assert distance(RULES[name], 3, 2, 2, pair) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_a_distribution_outside_the_target_s_support_is_rejected(name: str) -> None:
    """The draft guesses only what the target never says."""
    pair = Pair(np.tile([0.0, 0.25, 0.75], (4, 1)), np.tile([7, 0, 0], (4, 1)))
    assert mean_accepted(RULES[name], pair, 2) == 0
    assert distance(RULES[name], 3, 2, 2, pair) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_block_keeps_as_many_tokens_as_ratio_and_more(seed: int) -> None:
    """In expectation; the same for chains of one token."""
    pair = random_pair(4, seed)
    assert mean_accepted(block, pair, 1) == pytest.approx(mean_accepted(ratio, pair, 1), abs=1e-12)
    assert mean_accepted(block, pair, 3) >= mean_accepted(ratio, pair, 3) - 1e-12
    assert mean_accepted(block, random_pair(4, 3), 3) > mean_accepted(ratio, random_pair(4, 3), 3) + 1e-3


@pytest.mark.parametrize("lenience", [0.3, 0.7, 1.0])
def test_a_lenient_output_is_bounded(lenience: float) -> None:
    """No token is more probable than the target's probability over the lenience, and 1 is `ratio`."""
    pair = random_pair(4)
    rule = partial(ratio, lenience=lenience)
    distribution = committed_distribution(rule, pair, 1, 1)
    assert distribution.sum() == pytest.approx(1)
    assert (distribution <= pair.distribution(1) / lenience + 1e-12).all()
    assert (abs(distribution - pair.distribution(1)).max() < 1e-12) == (lenience == 1)
    assert mean_accepted(rule, pair, 2) >= mean_accepted(ratio, pair, 2) - 1e-12


Bug = Callable[[RuleFunction], RuleFunction]


def only_the_drafted_token(rule: RuleFunction) -> RuleFunction:
    """The residual loses the drafted token's share, and not the whole distribution."""

    def wrong(probs: Tensor, drafts: Tensor, ids: Tensor, weights: Tensor, uniforms: Tensor) -> ChainOutcome:
        outcome = rule(probs, drafts, ids, weights, uniforms)
        places = outcome.accepted_count.clamp(max=drafts.shape[1] - 1)[:, None]
        own = (ids == drafts[:, :, None]) * weights
        rows = probs[torch.arange(len(drafts)), outcome.accepted_count]
        share = (own.sum(dim=2).double() / weights.sum(dim=2)).gather(1, places)
        left = rows.scatter_add(1, drafts.gather(1, places), -share).clamp(min=0)
        kept = (outcome.accepted_count == drafts.shape[1])[:, None]
        return ChainOutcome(outcome.accepted_count, torch.where(kept, rows, left))

    return wrong


def no_residual(rule: RuleFunction) -> RuleFunction:
    """A rejected token is replaced by the target's own draw."""

    def wrong(probs: Tensor, *rest: Tensor) -> ChainOutcome:
        outcome = rule(probs, *rest)
        return ChainOutcome(outcome.accepted_count, probs[torch.arange(len(probs)), outcome.accepted_count])

    return wrong


def shifted_rows(rule: RuleFunction) -> RuleFunction:
    """Each token is tested with the row after it."""

    def wrong(probs: Tensor, *rest: Tensor) -> ChainOutcome:
        return rule(torch.cat((probs[:, 1:], probs[:, -1:]), dim=1), *rest)

    return wrong


@pytest.mark.parametrize("bug", [only_the_drafted_token, no_residual, shifted_rows])
@pytest.mark.parametrize("name", RULES)
def test_a_planted_bug_is_found(name: str, bug: Bug) -> None:
    """The comparison above can fail."""
    assert distance(bug(RULES[name]), 3, 2, 2) > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_one_hot_distributions_are_followed_exactly(name: str) -> None:
    """At temperature 0 the answer is greedy whatever the uniforms and whatever distribution the draft sends."""
    target = np.eye(3)[[1, 2, 0, 2]]
    for weights in (np.eye(3, dtype=np.int64)[[1, 0, 0, 2]] * 9, random_pair(3).weights + 1):
        pair = Pair(target, weights)
        for chain, _ in chains(pair, 2):
            greedy = (2, 0)
            expected = 2 if chain == greedy else int(chain[0] == 2)
            [(count, chance, distribution)] = acceptance(RULES[name], pair, chain)
            assert (count, chance) == (expected, pytest.approx(1))
            assert distribution.tolist() == target[(-1, *chain)[count]].tolist()


@pytest.mark.parametrize("name", RULES)
def test_certain_guesses_may_be_chosen_by_what_is_committed(name: str) -> None:
    """As an n-gram pool does: after each first token others and another number of them, or none."""
    pair, guesses = random_pair(4), np.eye(4, dtype=np.int64)[[2, 0, 1, 1]]
    joint = np.zeros((4, 4, 4))
    for first, guess in enumerate(guesses):
        behind = Pair(np.vstack([pair.target[:-1], pair.target[first]]), np.vstack([guesses, guess]))
        count = first % 3
        said = committed_distribution(RULES[name], behind, count, 2) if count else behind.distribution(2)
        joint[first] = pair.target[-1, first] * said
    assert abs(joint - pair.distribution(3)).max() < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_a_chain_does_not_depend_on_its_neighbours(name: str) -> None:
    """Bit for bit, whatever stands beside it and however wide the widest distribution of the batch is."""
    dice = np.random.default_rng(8)
    target_probs = torch.from_numpy(dice.dirichlet([0.2] * 300, (9, 4)))
    ids = torch.from_numpy(np.array([[dice.permutation(300)[:40] for _ in range(3)] for _ in range(9)]))
    weights = torch.from_numpy(dice.integers(1, 60000, (9, 3, 40)))
    weights[::2, :, 7:] = 0
    drafts = ids[:, :, 2]
    uniforms = torch.from_numpy(dice.random((9, 3)) * 0.2)
    together = RULES[name](target_probs, drafts, ids, weights, uniforms)
    for number in range(9):
        width = 7 if number % 2 == 0 else 40
        distributions = ids[number : number + 1, :, :width], weights[number : number + 1, :, :width]
        one = slice(number, number + 1)
        alone = RULES[name](target_probs[one], drafts[one], *distributions, uniforms[one])
        assert alone.accepted_count.item() == together.accepted_count[number]
        assert torch.equal(alone.probs[0], together.probs[number])


def test_a_residual_that_vanishes_by_rounding_is_the_target_s_distribution() -> None:
    """A rejection that has no probability, forced by a uniform, leaves something to draw."""
    distribution: Floats = np.array([0.5, 0.5])
    pair = Pair(np.tile(distribution, (3, 1)), np.tile([1, 1], (3, 1)))
    outcome = ask(partial(ratio, lenience=1.0), pair, (0,), np.array([[1.0]]))
    assert (outcome.accepted_count.item(), outcome.probs[0].tolist()) == (0, distribution.tolist())
