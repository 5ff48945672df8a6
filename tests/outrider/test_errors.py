"""Tests of outrider.errors: a single value is inside its range, or the error says what is wrong with which."""

import pytest

from outrider.errors import InvalidRequest, check_count, check_range, check_token_id, check_token_ids, shown


@pytest.mark.parametrize("value", [2, 3, 5])
def test_both_ends_of_a_range_belong_to_it(value: int) -> None:
    """The value comes back."""
    assert check_range("field", value, 2, 5) == value


@pytest.mark.parametrize("value", [1, 6, -(10**30)])
def test_a_value_outside_is_named(value: int) -> None:
    """Field, value and limit, in one sentence and one by one."""
    with pytest.raises(InvalidRequest, match=rf"^field is {value}, but must be in \[2, 5\]$") as caught:
        check_range("field", value, 2, 5)
    assert caught.value.metadata == {"field": "field", "value": str(value), "limit": "in [2, 5]"}


class Silent:
    """Fails who writes it."""

    def __repr__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    "value", [[1.5] * 30, "it's" * 30, {"a": [{"b": None}] * 9, 1: True}, [["x" * 90]], [[]], {}, 10**90, {"a": ()}]
)
def test_a_value_is_shown_as_python_writes_it(value: object) -> None:
    """Cut where it is long."""
    text = repr(value)
    assert shown(value) == (text if len(text) <= 80 else text[:77] + "...")


@pytest.mark.parametrize("value", [[*["x" * 9] * 9, Silent()], [[*["x" * 9] * 9, Silent()]], {"a" * 90: Silent()}])
def test_no_more_of_a_value_is_written_than_is_shown(value: object) -> None:
    """However deep: all of it may be millions, and no other request runs meanwhile."""
    assert shown(value).endswith("...")


def test_a_list_that_is_too_long_is_counted() -> None:
    """And not repeated in the error."""
    check_count("field", 3, 3, "ids")
    with pytest.raises(InvalidRequest, match=r"^field has 4 ids, but must have at most 3$"):
        check_count("field", 4, 3, "ids")


def test_token_ids_are_those_of_the_vocabulary() -> None:
    """From 0 to the last one, from any iterable."""
    assert check_token_ids("field", iter([0, 9, 4]), 10) == (0, 9, 4)
    assert check_token_ids("field", [], 10) == ()
    assert check_token_id("field", 9, 10) == 9


@pytest.mark.parametrize(("token_ids", "index", "value"), [([1, 10, -1], 1, 10), ([1, 2, -1], 2, -1)])
def test_the_first_unknown_token_is_named(token_ids: list[int], index: int, value: int) -> None:
    """By its place."""
    with pytest.raises(InvalidRequest, match=rf"^field\.{index} is {value}, but must be a token id in \[0, 10\)$"):
        check_token_ids("field", token_ids, 10)
