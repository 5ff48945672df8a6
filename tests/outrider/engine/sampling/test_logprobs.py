"""Log-probabilities are log-softmax of the raw row, finite, ordered, and of no other row's concern."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.ops import Ops, choose_ops
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.sampling import logprobs
from outrider.engine.sampling.logprobs import row_logprobs
from outrider.parameters import TokenLogprob

OPS: Ops = choose_ops(torch.device("cpu"), num_threads=2)


def random_logits(num_rows: int, num_tokens: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) * spread


def one(logits: list[float], token_id: int, count: int, vocabulary_size: int | None = None) -> TokenLogprob:
    [entry] = row_logprobs(torch.tensor([logits]), [token_id], count, vocabulary_size or len(logits), OPS)
    return entry


@pytest.mark.parametrize("ops", [OPS, ReferenceOps(), EagerOps()], ids=lambda ops: ops.name)
@pytest.mark.parametrize("num_tokens", [5, 300, 4096])
def test_numbers_are_those_of_log_softmax(ops: Ops, num_tokens: int) -> None:
    """To the last few bits of float64, over the full width, and alternatives in falling order."""
    logits = random_logits(7, num_tokens)
    token_ids = [row * 31 % num_tokens for row in range(7)]
    expected = logits.double().log_softmax(dim=-1)
    count = min(20, num_tokens)
    for row, entry in enumerate(row_logprobs(logits, token_ids, 20, num_tokens, ops)):
        assert entry.logprob == pytest.approx(float(expected[row, token_ids[row]]), abs=1e-12)
        best = expected[row].topk(count)
        assert entry.top_token_ids == tuple(best.indices.tolist())
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-12)


def test_padding_counts_in_the_sum_and_is_no_alternative() -> None:
    """As a model computes it: the share of ids that the tokenizer does not know belongs to none."""
    entry = one([0.0, 1.0, 5.0, 5.0], 1, 20, vocabulary_size=2)
    assert entry.top_token_ids == (1, 0)
    assert entry.logprob == pytest.approx(1.0 - math.log(1 + math.e + 2 * math.exp(5)))


def test_ties_go_to_the_lowest_ids() -> None:
    """Inside the list and at its border; 0 and -0 are equal."""
    assert one([1.0, 3.0, 1.0, 1.0, 3.0], 0, 3).top_token_ids == (1, 4, 0)
    assert one([0.0, -0.0, 0.0, -0.0], 0, 2).top_token_ids == (0, 1)
    assert one([0.5] * 500, 0, 20).top_token_ids == tuple(range(20))


def test_no_alternatives_are_asked_for() -> None:
    """Only the token's own number."""
    assert one([0.0, 0.0], 1, 0) == TokenLogprob(-math.log(2), (), ())


def test_everything_is_finite_and_at_most_zero() -> None:
    """A logit of -inf, one far below the best, and a token that has everything."""
    entry = one([-math.inf, 0.0, -3e38, 3e38], 0, 4)
    assert entry.top_token_ids == (3, 1, 2, 0)
    assert all(math.isfinite(number) and number <= 0 for number in (entry.logprob, *entry.top_logprobs))
    assert entry.top_logprobs[0] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_distribution_is_refused(bad: float) -> None:
    """ValueError, as at a draw."""
    with pytest.raises(ValueError, match="finite"):
        one([0.0, bad, 1.0], 0, 2)


def test_the_number_of_tokens_must_agree() -> None:
    """A token too few is the caller's bug."""
    with pytest.raises(ValueError, match="1 tokens for 2 rows"):
        row_logprobs(torch.zeros(2, 4), [1], 0, 4, OPS)


def test_no_rows_are_no_work() -> None:
    """An empty list."""
    assert row_logprobs(torch.zeros(0, 4), [], 3, 4, OPS) == []


@settings(max_examples=50, derandomize=True)
@given(num_rows=st.integers(2, 17), count=st.integers(0, 20), seed=st.integers(0, 10**6), coarse=st.booleans())
def test_a_row_is_bitwise_the_same_alone(num_rows: int, count: int, seed: int, coarse: bool) -> None:
    """Neighbours, ties among them, change not one bit; fewer alternatives are the first of more."""
    logits = random_logits(num_rows, 333, seed)
    logits = logits.round() if coarse else logits
    token_ids = [(seed + row) % 300 for row in range(num_rows)]
    together = row_logprobs(logits, token_ids, count, 300, OPS)
    for row, token_id in enumerate(token_ids):
        [alone] = row_logprobs(logits[row : row + 1].clone(), [token_id], 20, 300, OPS)
        expected = TokenLogprob(alone.logprob, alone.top_token_ids[:count], alone.top_logprobs[:count])
        assert together[row] == expected


def test_long_prompts_are_worked_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a piece, down to less than a row."""
    logits = random_logits(20, 50)
    expected = row_logprobs(logits, range(20), 3, 50, OPS)
    for elements in (1, 149, 350):
        monkeypatch.setattr(logprobs, "PIECE_ELEMENTS", elements)
        assert row_logprobs(logits, range(20), 3, 50, OPS) == expected
