"""Tests of target_service.block_allocator: who gives way to whom."""

import pytest

from target_service.block_allocator import CacheHolder, is_first, victims

RUNNING, IDLE, WAITING = CacheHolder(3, True), CacheHolder(2, False), CacheHolder(0, True)
# Two blocks of three that others have as well.
SHARING = CacheHolder(3, True, (7, 8))


@pytest.mark.parametrize(
    ("asking", "num_missing", "holders", "expected"),
    [
        (0, 1, [RUNNING, RUNNING, RUNNING], [2]),
        (0, 4, [RUNNING, RUNNING, RUNNING], [2, 1]),
        (1, 4, [RUNNING, RUNNING, RUNNING], None),
        (2, 1, [RUNNING, RUNNING, RUNNING], None),
        (0, 1, [RUNNING, RUNNING, WAITING], [1]),
        (1, 1, [RUNNING, RUNNING, IDLE], [2]),
        (2, 1, [IDLE, IDLE, WAITING, RUNNING], [3]),
        (2, 4, [IDLE, IDLE, WAITING, RUNNING], [3, 1]),
        (2, 1, [IDLE, RUNNING, WAITING], None),
        (0, 1, [WAITING], None),
        (0, 1, [RUNNING, SHARING, SHARING], [2]),
        (0, 2, [RUNNING, SHARING, SHARING], [2, 1]),
        (0, 4, [RUNNING, SHARING, SHARING], [2, 1]),
        (0, 5, [RUNNING, SHARING, SHARING], None),
        (0, 2, [SHARING, SHARING, SHARING], [2, 1]),
        (0, 3, [SHARING, SHARING, SHARING], None),
    ],
)
def test_later_sessions_give_way(
    asking: int, num_missing: int, holders: list[CacheHolder], expected: list[int] | None
) -> None:
    """The latest first, idle earlier ones only to the first of the running ones, and none for nothing."""
    assert victims(asking, num_missing, holders) == expected


def test_the_first_of_the_running_ones_never_waits_for_what_others_hold() -> None:
    """So that one of them always makes progress."""
    holders = [IDLE, WAITING, RUNNING, IDLE]
    assert [is_first(asking, holders) for asking in range(4)] == [True, True, False, False]
    assert victims(1, 7, holders) == [3, 2, 0]
