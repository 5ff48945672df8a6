"""Medians and quartiles of fixed numbers, and how they are shown."""

import pytest

from bench.spread import markdown, median, spread


def test_quartiles_lie_within_the_values() -> None:
    """Five values have their second, third and fourth as quartiles, in whatever order they come."""
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert found.show(".1f", 2) == "6.0 (4.0 to 8.0)"


def test_one_value_is_its_own_quartiles() -> None:
    """A quick run may have a single sample."""
    assert spread([7.0]).show(".0f") == "7 (7 to 7)"
    assert median(iter([1.0, 3.0])) == 2.0


def test_no_values_have_no_median() -> None:
    """A figure that was not measured is an error, never a zero."""
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_a_table_is_markdown() -> None:
    """A header, a rule, and one line a row."""
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
