"""Under `match` with shared noise, tokens follow the target's distribution, and drafts are accepted as predicted.

Everything random comes from seeds 0, 1, 2, ..., so a test that passes once always passes.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.engine.noise import Purpose, gumbel, noise_key
from outrider.engine.ops import Ops, choose_ops
from outrider.engine.ops.eager import EagerOps
from outrider.engine.sampling.transforms import RowContext, transform
from outrider.engine.walk import Walk, walk
from outrider.parameters import SamplingParameters
from outrider.token_tree import TokenTree

NUM_SEEDS = 20_000
NUM_TOKENS = 16
PROMPT = (1, 2, 3)
BASE = len(PROMPT)

Floats = npt.NDArray[np.float64]
Key = Callable[[int, int, Purpose], int]
Walker = Callable[[TokenTree, Sequence[int]], Walk]
WANTED = {
    "plain": SamplingParameters(),
    "shaped": SamplingParameters(temperature=0.8, top_k=13, top_p=0.97, min_p=0.01, repetition_penalty=1.2),
}


@cache
def target_logits() -> Tensor:
    """A little language [V + 1, V]: row v are the target's logits after token v, the last row after the prompt."""
    return torch.randn(NUM_TOKENS + 1, NUM_TOKENS, generator=torch.Generator().manual_seed(20)) * 1.2


def scores_after(last: Sequence[int], wanted: SamplingParameters, ops: Ops, sign: float = 1.0) -> Tensor:
    """Scores [N, V] after the prompt (last is -1) or after prompt and one token; sign -1 is the draft's."""
    paths = [() if token_id < 0 else (token_id,) for token_id in last]
    rows = [RowContext(wanted, PROMPT, path, BASE, frozenset()) for path in paths]
    return transform(sign * target_logits()[torch.tensor(last)], rows, NUM_TOKENS, ops)


def keys_at(position: int, key: Key = noise_key, num_seeds: int = NUM_SEEDS) -> Tensor:
    return torch.tensor([key(seed, position, Purpose.TOKEN) for seed in range(num_seeds)])


def committed_pairs(
    width: int,
    wanted: SamplingParameters,
    ops: Ops,
    key: Key = noise_key,
    walker: Walker = walk,
    num_seeds: int = NUM_SEEDS,
) -> npt.NDArray[np.int64]:
    """Two tokens [num_seeds, 2] for each seed, by one round with `width` draft siblings and a plain one if needed.

    The draft has the negated logits, the hardest case, and proposes its best tokens under the shared noise.
    """
    keys, next_keys = keys_at(BASE, key, num_seeds), keys_at(BASE + 1, key, num_seeds)
    root = scores_after([-1], wanted, ops).expand(num_seeds, -1).contiguous()
    draft = scores_after([-1], wanted, ops, sign=-1.0).double() + gumbel(keys, NUM_TOKENS)
    proposals = draft.topk(width).indices
    # After every token, with the noise of every seed: row v of the tree and the plain round read the same numbers.
    behind = scores_after(range(NUM_TOKENS), wanted, ops)
    root_draws = ops.draw(root, keys).tolist()
    row_draws = [ops.draw(behind[proposals[:, row]], next_keys).tolist() for row in range(width)]
    plain_draws = ops.draw(behind[torch.tensor(root_draws)], next_keys).tolist()
    pairs = []
    for number, tokens in enumerate(proposals.tolist()):
        tree = sibling_tree(tuple(tokens))
        way = walker(tree, [root_draws[number], *(draws[number] for draws in row_draws)])
        committed = [*(tree.token_ids[row - 1] for row in way.accepted_rows), way.next_token_id]
        pairs.append((*committed, plain_draws[number])[:2])
    return np.array(pairs)


@cache
def sibling_tree(token_ids: tuple[int, ...]) -> TokenTree:
    return TokenTree(token_ids, (0,) * len(token_ids))


def expected_distribution(wanted: SamplingParameters) -> Floats:
    """The joint distribution [V, V] of two tokens of the target: softmax of the transformed scores, in float64."""
    first = scores_after([-1], wanted, EagerOps()).double().softmax(dim=-1)
    second = scores_after(range(NUM_TOKENS), wanted, EagerOps()).double().softmax(dim=-1)
    distribution: Floats = (first.T * second).numpy()
    return distribution


def chance(pairs: npt.NDArray[np.int64], distribution: Floats) -> float:
    """p-value of the chi-square test; cells expected fewer than five times are counted as one."""
    counts = np.bincount(pairs[:, 0] * NUM_TOKENS + pairs[:, 1], minlength=distribution.size).astype(np.float64)
    expected = distribution.ravel() * len(pairs)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", WANTED)
def test_two_tokens_follow_the_joint_distribution_of_the_target(name: str, width: int) -> None:
    """Chi-square over 256 cells, with a chain and with siblings, whatever the draft proposes."""
    assert chance(committed_pairs(width, WANTED[name], EagerOps()), expected_distribution(WANTED[name])) > 1e-4


def test_the_kernels_of_this_machine_follow_the_distribution_too() -> None:
    """The operations that a CPU service would choose here; fewer seeds, because the reference is slow."""
    wanted, ops = WANTED["shaped"], choose_ops(torch.device("cpu"), num_threads=2)
    assert chance(committed_pairs(1, wanted, ops, num_seeds=5000), expected_distribution(wanted)) > 1e-4


def test_a_draft_token_kept_against_the_target_is_found() -> None:
    """Accepting every tenth refused draft token bends the distribution enough for the test to fail."""
    refused = iter(range(10**6))

    def lenient(tree: TokenTree, drawn: Sequence[int]) -> Walk:
        way = walk(tree, drawn)
        return way if way.accepted_rows or next(refused) % 10 else Walk((1,), drawn[1], 1)

    assert (
        chance(committed_pairs(1, WANTED["plain"], EagerOps(), walker=lenient), expected_distribution(WANTED["plain"]))
        < 1e-6
    )


def test_noise_without_the_position_is_found() -> None:
    """The same noise at both positions leaves each token's own distribution right, and the joint distribution wrong."""

    def frozen(seed: int, _position: int, purpose: Purpose) -> int:
        return noise_key(seed, 0, purpose)

    distribution = expected_distribution(WANTED["plain"])
    pairs = committed_pairs(1, WANTED["plain"], EagerOps(), key=frozen)
    first = np.bincount(pairs[:, 0], minlength=NUM_TOKENS)
    assert stats.chisquare(first, distribution.sum(axis=1) * len(pairs)).pvalue > 1e-4
    assert chance(pairs, distribution) < 1e-6


def coupled_rate(target_probs: Floats, draft_probs: Floats) -> float:
    """P(both draw one token) = sum_v 1 / sum_w max(p_w / p_v, q_w / q_v) (Daliri, Musco and Suresh, 2024)."""
    shared = np.flatnonzero((target_probs > 0) & (draft_probs > 0))
    ratios = (np.maximum(target_probs / target_probs[v], draft_probs / draft_probs[v]).sum() for v in shared)
    return float(sum(1 / ratio for ratio in ratios))


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("likeness", [-1.0, 0.0, 0.8])
def test_shared_noise_is_accepted_as_often_as_theory_says(likeness: float, name: str) -> None:
    """Within 4 standard deviations of the formula, for a negated, an unrelated and a similar draft."""
    ops, row = EagerOps(), RowContext(WANTED[name], PROMPT, (), BASE, frozenset())
    target = target_logits()[:1]
    draft = likeness * target + (1 - abs(likeness)) * target_logits()[1:2]
    scores = transform(torch.cat((target, draft)), [row, row], NUM_TOKENS, ops)
    keys = keys_at(BASE)
    drawn = [ops.draw(one.expand(NUM_SEEDS, -1).contiguous(), keys) for one in scores]
    target_probs, draft_probs = scores.double().softmax(dim=-1).numpy()
    rate = coupled_rate(target_probs, draft_probs)
    accepted = (drawn[0] == drawn[1]).double().mean().item()
    assert abs(accepted - rate) < 4 * (rate * (1 - rate) / NUM_SEEDS) ** 0.5
    # Never above the optimum of any coupling, and never below the worst case without communication.
    distance = 0.5 * np.abs(target_probs - draft_probs).sum()
    assert (1 - distance) / (1 + distance) <= rate <= 1 - distance + 1e-12


def test_equal_distributions_are_always_accepted() -> None:
    """A draft with the target's own scores is accepted at every seed: the coupling wastes nothing."""
    ops, keys = EagerOps(), keys_at(BASE)
    scores = scores_after([-1], WANTED["plain"], ops).expand(NUM_SEEDS, -1).contiguous()
    assert torch.equal(ops.draw(scores, keys), ops.draw(scores + 2.5, keys))


def test_noise_of_its_own_costs_the_draft_its_acceptance() -> None:
    """With another purpose the draft agrees only by chance: what sharing the noise is for."""
    ops = EagerOps()
    scores = scores_after([-1], WANTED["plain"], ops).expand(NUM_SEEDS, -1).contiguous()
    own = torch.tensor([noise_key(seed, BASE, Purpose.DRAFT) for seed in range(NUM_SEEDS)])
    agreed = (ops.draw(scores, keys_at(BASE)) == ops.draw(scores, own)).double().mean().item()
    probs = scores[0].double().softmax(dim=-1)
    assert agreed == pytest.approx(float((probs**2).sum()), abs=0.02)
