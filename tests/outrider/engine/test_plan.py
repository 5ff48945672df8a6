"""A plan cut to a window: every row keeps the end of its list, and nothing else changes."""

from dataclasses import fields

import pytest
import torch
from support.models.engine_cases import attention_case

from outrider.engine.batching import RowPlan

PLAN = attention_case(40, 2, 1, 8).plan


def lists(plan: RowPlan) -> list[list[int]]:
    """The slots that each row sees."""
    places = zip(plan.key_starts.tolist(), plan.key_counts.tolist(), strict=True)
    return [plan.key_slots[start : start + count].tolist() for start, count in places]


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 200])
def test_rows_see_the_end_of_their_lists(window: int) -> None:
    """Shorter lists stay whole; the types are those that the kernels read, and the longest list is known."""
    cut = PLAN.windowed(window)
    assert lists(cut) == [slots[-window:] for slots in lists(PLAN)]
    assert (cut.key_starts.dtype, cut.key_counts.dtype) == (torch.int64, torch.int32)
    assert cut.max_key_count == cut.key_counts.max() == window
    kept = {field.name for field in fields(RowPlan)} - {"key_starts", "key_counts", "max_key_count"}
    assert all(getattr(cut, name) is getattr(PLAN, name) for name in kept)


@pytest.mark.parametrize("window", [None, PLAN.max_key_count, 10_000])
def test_a_window_that_hides_nothing_costs_nothing(window: int | None) -> None:
    """It is the same plan."""
    assert PLAN.windowed(window) is PLAN
