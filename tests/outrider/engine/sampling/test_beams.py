"""One step of beam search over rows of log-probabilities."""

import pytest
import torch

from outrider.beams import Candidate
from outrider.engine.sampling.beams import select

INF = float("inf")


def test_equal_sums_are_ordered_by_beam_and_then_by_token() -> None:
    logprobs = torch.full((2, 4), -1.0)
    step = select(logprobs, [0.0, 0.0], 2, frozenset({0}))
    assert step.live == (Candidate(0, 1, -1.0), Candidate(0, 2, -1.0))
    assert step.ended == (Candidate(0, 0, -1.0),)


def test_only_the_first_width_candidates_may_end() -> None:
    logprobs = torch.tensor([[-3.0, -1.0, -2.0, -4.0]])
    step = select(logprobs, [0.0], 2, frozenset({0}))
    assert [each.token_id for each in step.live] == [1, 2]
    assert step.ended == ()


def test_beams_go_on_where_every_better_candidate_ends() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -9.0, -8.0]])
    step = select(logprobs, [0.0], 2, frozenset({0, 1}))
    assert [each.token_id for each in step.ended] == [0, 1]
    assert [each.token_id for each in step.live] == [3, 2]


def test_in_the_last_step_every_sequence_ends() -> None:
    step = select(torch.tensor([[-1.0, -2.0, -3.0]]), [-1.0], 2, frozenset(), is_last=True)
    assert step.live == ()
    assert [(each.token_id, each.score) for each in step.ended] == [(0, -2.0), (1, -3.0)]


def test_a_token_of_probability_0_is_never_taken() -> None:
    step = select(torch.tensor([[-INF, -1.0, -INF]]), [0.0], 2, frozenset())
    assert step.live == (Candidate(0, 1, -1.0),)


@pytest.mark.parametrize("value", [-INF, float("nan")])
def test_a_row_without_any_probability_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match="no token has a probability"):
        select(torch.full((1, 3), value), [0.0], 2, frozenset())
