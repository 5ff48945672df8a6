"""The generator of rows keeps its promise: every pair occurs, and few rows are enough."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grid import all_pairs, missing_pairs

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=7)


@pytest.mark.slow
@given(sizes=SIZES)
@settings(derandomize=True)
def test_every_pair_occurs(sizes: list[int]) -> None:
    """Whatever the numbers of values; every row has a value for each parameter, and the same rows come every time."""
    parameters = {f"p{number}": range(size) for number, size in enumerate(sizes)}
    rows = all_pairs(parameters)
    assert missing_pairs(parameters, rows) == []
    assert all(list(row) == list(parameters) for row in rows)
    assert rows == all_pairs(parameters)


def test_few_rows_are_enough() -> None:
    """Far from the 2 * 5 ** 10 rows of all combinations, and not far from the 25 of two parameters."""
    parameters = {f"p{number}": range(5) for number in range(10)} | {"two": range(2)}
    assert 25 <= len(all_pairs(parameters)) <= 60


def test_a_forbidden_pair_is_in_no_row() -> None:
    """And all others occur."""
    parameters = {"a": "xyz", "b": "123", "c": "+-"}

    def allowed(one: str, this: str, other: str, that: str) -> bool:
        return (one, this, other, that) not in {("a", "x", "b", "1"), ("b", "2", "c", "+")}

    rows = all_pairs(parameters, allowed)
    assert missing_pairs(parameters, rows) == [("a", "x", "b", "1"), ("b", "2", "c", "+")]


def test_a_row_that_cannot_be_is_an_error() -> None:
    """Rather than a pair that is left out in silence."""
    with pytest.raises(ValueError, match="no value of parameter 2 fits"):
        all_pairs({"a": "x", "b": "1", "c": "+"}, lambda one, _, other, __: (one, other) != ("b", "c"))


def test_missing_pairs_are_seen() -> None:
    """The test above can fail."""
    parameters = {"a": "xy", "b": "12", "c": "+-"}
    assert missing_pairs(parameters, all_pairs(parameters)[:-1])
