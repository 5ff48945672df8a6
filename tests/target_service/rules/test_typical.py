"""`typical`: thresholds by hand, and which child stands in for the target's own token."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.engine.ops import choose_ops
from outrider.engine.walk import Walk, walk
from outrider.token_tree import TokenTree
from target_service.rules.typical import exp_entropies, typical_children

OPS = choose_ops(torch.device("cpu"), num_threads=2)


def peaks(scores: Tensor) -> list[float]:
    return exp_entropies(scores, OPS.softmax(scores))


def test_certain_and_even_rows_have_known_entropies() -> None:
    """Certainty is 1, N equal tokens are 1 / N, and tokens outside the support do not count."""
    scores = torch.full((3, 64), -math.inf)
    scores[0, 9] = 4.0
    scores[1, :16] = -2.0
    scores[2] = 0.0
    assert peaks(scores) == pytest.approx([1, 1 / 16, 1 / 64], rel=1e-12)


def test_entropies_are_those_of_the_library() -> None:
    """Of ordinary rows; and a row has the same alone and among others, bit for bit."""
    scores = torch.randn(20, 3000, generator=torch.Generator().manual_seed(4)) * 4
    found = peaks(scores)
    assert found == pytest.approx([math.exp(-stats.entropy(row)) for row in OPS.softmax(scores).numpy()], rel=1e-9)
    assert [peaks(scores[row : row + 1].clone())[0] for row in range(20)] == found


# The root has the children 1 and 2; 3 and 4 follow row 2.
TREE = TokenTree((5, 6, 7, 8), (0, 0, 2, 2))


@pytest.mark.parametrize(
    ("child_probs", "limits", "expected"),
    [
        ((0.1, 0.2, 0.3, 0.3), (0.05, 1, 0.09, 1, 1), [2, 0, 3, 0, 0]),
        ((0.2, 0.1, 0.3, 0.4), (0.05, 1, 0.09, 1, 1), [1, 0, 4, 0, 0]),
        ((0.2, 0.1, 0.3, 0.4), (0.2, 1, 0.4, 1, 1), [0, 0, 0, 0, 0]),
        ((0.2, 0.2, 0.0, 0.0), (0.199, 1, 0.0, 1, 1), [1, 0, 0, 0, 0]),
    ],
)
def test_the_most_probable_typical_child_is_preferred(
    child_probs: tuple[float, ...], limits: tuple[float, ...], expected: list[int]
) -> None:
    """Above the limit and not at it; of equal ones the lowest row."""
    assert typical_children(TREE, child_probs, limits) == expected


@pytest.mark.parametrize(
    ("drawn", "substitutes", "expected"),
    [
        ([6, 0, 8, 0, 9], [1, 0, 3, 0, 0], Walk((2, 4), 9, 2)),
        ([6, 0, 1, 3, 9], [1, 0, 3, 0, 0], Walk((2, 3), 3, 2)),
        ([1, 0, 1, 3, 9], [2, 0, 0, 0, 0], Walk((2,), 1, 2)),
        ([1, 0, 1, 3, 9], [0, 0, 3, 0, 0], Walk((), 1, 1)),
        ([1, 0, 1, -1, 9], [2, 0, 3, 0, 0], Walk((2,), 7, 2)),
    ],
)
def test_the_target_s_own_token_comes_first(drawn: list[int], substitutes: list[int], expected: Walk) -> None:
    """A substitute is followed only where no child carries the draw, and not entered where it has no draw itself."""
    assert walk(TREE, drawn, substitutes) == expected
