"""What a draft draws from and sends is one distribution, near the scores', and independent of the other rows."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.engine.noise import Purpose, noise_key
from outrider.engine.ops import choose_ops
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.sampling.draft_distribution import MAX_TOP_N, WEIGHT_SUM, DraftDistributions, quantise
from outrider.parameters import DraftDistribution

OPS = choose_ops(torch.device("cpu"), num_threads=2)


def random_scores(num_rows: int = 6, width: int = 500, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)) * spread


def keys_of(count: int) -> Tensor:
    return torch.tensor([noise_key(seed, 5, Purpose.DRAFT) for seed in range(count)])


@pytest.mark.parametrize("top_n", [1, 8, 64, 256])
def test_a_distribution_has_the_most_probable_tokens(top_n: int) -> None:
    """In falling order, with positive weights that add up to what they should, up to rounding."""
    scores = random_scores()
    for row, distribution in zip(scores, quantise(scores, top_n, OPS).distributions(), strict=True):
        best = row.sort(descending=True, stable=True).indices.tolist()
        assert list(distribution.token_ids) == best[: len(distribution.token_ids)]
        assert len(distribution.token_ids) <= top_n
        assert min(distribution.weights) >= 1
        assert max(distribution.weights) <= 65535
        assert list(distribution.weights) == sorted(distribution.weights, reverse=True)
        assert abs(sum(distribution.weights) - WEIGHT_SUM) <= top_n / 2


@pytest.mark.parametrize("top_n", [8, 64, 256])
def test_a_distribution_is_near_that_of_its_scores(top_n: int) -> None:
    """Each probability is within half a weight of the truncated distribution's."""
    scores = random_scores()
    for row, distribution in zip(scores, quantise(scores, top_n, OPS).distributions(), strict=True):
        probs = row.double().sort(descending=True, stable=True).values[:top_n].softmax(dim=0).tolist()
        for weight, prob in zip(distribution.weights, probs, strict=False):
            assert abs(weight - prob * WEIGHT_SUM) <= 0.5 + 1e-9
        # What is left out would have had a weight below one half.
        assert all(prob * WEIGHT_SUM <= 0.5 for prob in probs[len(distribution.weights) :])


def test_of_equal_tokens_the_lowest_ids_are_kept() -> None:
    """A selection of the library takes any of them."""
    scores = torch.zeros(3, 400)
    scores[1, 300:] = 1.0
    scores[2] = torch.arange(400) // 100
    found = [distribution.token_ids for distribution in quantise(scores, 5, OPS).distributions()]
    assert found == [(0, 1, 2, 3, 4), (300, 301, 302, 303, 304), (300, 301, 302, 303, 304)]
    [whole] = quantise(scores[:1, :8], 8, OPS).distributions()
    assert whole.token_ids == tuple(range(8))


@pytest.mark.parametrize("top_n", [1, 5, 64, 256])
def test_rounded_scores_are_in_order(top_n: int) -> None:
    """As logits from bfloat16 products are: with equal ones in every row, of both signs, two zeros and some -inf."""
    scores = random_scores(12, 3000).bfloat16().float()
    scores[3] = scores[3].clamp(max=0) * torch.tensor([1.0, -0.0]).repeat(1500)
    scores[4] -= 30
    scores[5, 40:] = -math.inf
    for row, distribution in zip(scores, quantise(scores, top_n, OPS).distributions(), strict=True):
        best = row.sort(descending=True, stable=True)
        assert list(distribution.token_ids) == best.indices.tolist()[: len(distribution.token_ids)]
        if best.values[top_n - 1] > best.values[0] - 5:
            assert len(distribution.token_ids) == top_n


def test_nothing_outside_the_support_is_sent() -> None:
    """Fewer tokens than top_n, and a single one, which gets all the weight."""
    scores = torch.full((2, 100), -math.inf)
    scores[0, 40], scores[0, 7] = 1.0, 1.0
    scores[1, 99] = -5.0
    distributions = quantise(scores, 64, OPS)
    assert distributions.distributions() == [
        DraftDistribution((7, 40), (WEIGHT_SUM // 2 + 1, WEIGHT_SUM // 2 + 1)),
        DraftDistribution((99,), (WEIGHT_SUM,)),
    ]
    for keys in keys_of(50).view(25, 2):
        first, second = distributions.draw(keys).tolist()
        assert first in {7, 40}
        assert second == 99


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_row_that_cannot_be_drawn_is_id_0(fault: float) -> None:
    """The chain goes on, as long as any other, and the rows beside it are as they were."""
    scores = random_scores(3)
    expected = quantise(scores, 16, OPS).distributions()
    if fault == -math.inf:
        scores[1] = fault
    else:
        scores[1, 17] = fault
    found = quantise(scores, 16, OPS).distributions()
    assert found == [expected[0], DraftDistribution((0,), (WEIGHT_SUM,)), expected[2]]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Distributions and draws alone, in a batch, and with kernels or without."""
    scores = random_scores(16, 4096)
    scores[3, ::3] = -math.inf
    scores[5, :2000] = 2.0
    distributions, keys = quantise(scores, 64, OPS), keys_of(16)
    together = distributions.draw(keys)
    for row in range(16):
        one = quantise(scores[row : row + 1].clone(), 64, OPS)
        assert torch.equal(
            one.token_ids[0][one.weights[0] > 0], distributions.token_ids[row][distributions.weights[row] > 0]
        )
        assert torch.equal(one.weights[0], distributions.weights[row])
        assert one.draw(keys[row : row + 1]).item() == together[row]
    slow = quantise(scores[:2], 64, ReferenceOps())
    assert torch.equal(slow.token_ids, distributions.token_ids[:2])


def test_draws_follow_the_weights() -> None:
    """Chi-square over 20,000 keys, padding included."""
    distribution = DraftDistributions(torch.tensor([[9, 4, 2, 7, 0, 0]]), torch.tensor([[60000, 5000, 500, 35, 0, 0]]))
    count = 20_000
    drawn = DraftDistributions(distribution.token_ids.expand(count, -1), distribution.weights.expand(count, -1)).draw(
        keys_of(count)
    )
    observed = [(drawn == token_id).sum().item() for token_id in (9, 4, 2, 7)]
    assert sum(observed) == count
    expected = [weight * count / 65535 for weight in (60000, 5000, 500, 35)]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_draws_are_the_inverse_of_the_cumulative_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of the uniforms, and a step at each sum."""
    ends = np.array([2.0**-53, 1 / 3 - 1e-12, 1 / 3 + 1e-12, 1 - 2.0**-53])
    monkeypatch.setattr("outrider.engine.sampling.draft_distribution.first_uniforms", lambda _: ends)
    distributions = DraftDistributions(
        torch.tensor([[5, 8, 0]]).expand(4, -1), torch.tensor([[100, 200, 0]]).expand(4, -1)
    )
    assert distributions.draw(keys_of(4)).tolist() == [5, 5, 8, 8]


@pytest.mark.parametrize("top_n", [0, MAX_TOP_N + 1])
def test_a_distribution_fits_into_a_message(top_n: int) -> None:
    """Otherwise ValueError names the number."""
    with pytest.raises(ValueError, match=rf"top_n is {top_n}, but must be in \[1, 256\]"):
        quantise(random_scores(), top_n, OPS)


def test_siblings_without_replacement_are_drawn_until_none_is_left() -> None:
    """Each once; the others keep their weights and order, in the engine's form and in the one that travels."""
    distributions = DraftDistributions(
        torch.tensor([[9, 4, 2], [7, 5, 7]]), torch.tensor([[60000, 5000, 35], [9, 1, 0]])
    )
    travelling = distributions.distributions()
    drawn: list[list[int]] = []
    for count in range(2):
        assert distributions.sizes == [3 - count, 2 - count]
        drawn.append(distributions.draw(keys_of(2) + count).tolist())
        distributions = distributions.without(torch.tensor(drawn[-1]))
        travelling = [each.without(token_id) for each, token_id in zip(travelling, drawn[-1], strict=True)]
        assert distributions.distributions() == travelling
    assert {drawn[0][1], drawn[1][1]} == {5, 7}
    assert distributions.sizes == [1, 0]
    assert {drawn[0][0], drawn[1][0], *travelling[0].token_ids} == {9, 4, 2}
    with pytest.raises(ValueError, match="row 1 has no token left to draw"):
        distributions.draw(keys_of(2))


def test_siblings_without_replacement_follow_the_weights() -> None:
    """Pairs in both orders: chi-square against w_a / W times w_b / (W - w_a), over 20,000 keys."""
    weights, count = (50, 30, 15, 5), 20_000
    row = DraftDistributions(torch.tensor([[3, 1, 8, 6]]), torch.tensor([weights]))
    every = DraftDistributions(row.token_ids.expand(count, -1), row.weights.expand(count, -1))
    first = every.draw(keys_of(count))
    second = every.without(first).draw(torch.tensor([noise_key(seed, 6, Purpose.DRAFT) for seed in range(count)]))
    cells = [(a, b) for a in range(4) for b in range(4) if a != b]
    observed = [((first == row.token_ids[0, a]) & (second == row.token_ids[0, b])).sum().item() for a, b in cells]
    assert sum(observed) == count
    expected = [count * weights[a] / 100 * weights[b] / (100 - weights[a]) for a, b in cells]
    assert stats.chisquare(observed, expected).pvalue > 1e-4
