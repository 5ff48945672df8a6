"""`lenient` at temperature 0, on a truth table."""

import pytest
import torch

from target_service.rules.lenient import lenient_greedy

# After no, one and two draft tokens.
ROWS = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2]]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("chain", "lenience", "count", "best"),
    [
        ((0, 2), 1.0, 2, 0),
        ((1, 2), 1.0, 0, 0),
        ((1, 2), 0.6, 2, 0),
        ((1, 2), 0.61, 0, 0),
        ((1, 0), 0.6, 1, 2),
        ((1, 0), 0.125, 2, 0),
        ((2, 2), 0.5, 0, 0),
    ],
)
def test_a_token_near_the_best_one_is_kept(chain: tuple[int, int], lenience: float, count: int, best: int) -> None:
    """At least lenience times the largest probability; the next token is the best one, of equal ones the lowest id."""
    outcome = lenient_greedy(ROWS, torch.tensor([chain]), lenience)
    assert outcome.accepted_count.tolist() == [count]
    assert outcome.probs.count_nonzero(dim=1).tolist() == [1]
    assert outcome.probs.argmax(dim=1).tolist() == [best]
