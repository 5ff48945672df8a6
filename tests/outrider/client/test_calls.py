"""What a call is made with besides its message: which metadata and which timeouts can be."""

import math
from typing import Any

import pytest

from outrider.client import InvalidRequest
from outrider.client.calls import Caller

ADDRESS = "127.0.0.1:1"
SHAPE = "a mapping, or pairs of a name and a value"
NAMES = "names of letters, digits, '_', '.' and '-' that do not begin with grpc-"
TEXT = "text of printable ASCII; bytes need a name that ends in -bin"
BYTES = "bytes, because the name ends in -bin"
SECONDS = "a number more than 0, and at most 1000000000"

WRONG = [
    ("metadata", "abc", "metadata", "'abc'", SHAPE),
    ("metadata", "", "metadata", "''", SHAPE),
    ("metadata", 5, "metadata", "5", SHAPE),
    ("metadata", ["ab"], "metadata", "'ab'", SHAPE),
    ("metadata", [("x", "a", "b")], "metadata", "('x', 'a', 'b')", SHAPE),
    ("metadata", {"a b": "x"}, "metadata", "'a b'", NAMES),
    ("metadata", {"": "x"}, "metadata", "''", NAMES),
    ("metadata", {"x\n": "x"}, "metadata", "'x\\n'", NAMES),
    ("metadata", {"Grpc-Timeout": "1S"}, "metadata", "'Grpc-Timeout'", NAMES),
    ("metadata", {5: "x"}, "metadata", "5", NAMES),
    ("metadata", {"x": "a\nb"}, "metadata.x", "'a\\nb'", TEXT),
    ("metadata", [("x", "é")], "metadata.x", "'é'", TEXT),
    ("metadata", {"x": 5}, "metadata.x", "5", TEXT),
    ("metadata", {"x": b"a"}, "metadata.x", "b'a'", TEXT),
    ("metadata", {"x-bin": "a"}, "metadata.x-bin", "'a'", BYTES),
    ("timeout_s", "5", "timeout_s", "'5'", SECONDS),
    ("timeout_s", True, "timeout_s", "True", SECONDS),
    ("timeout_s", -1, "timeout_s", "-1", SECONDS),
    ("timeout_s", math.nan, "timeout_s", "nan", SECONDS),
    ("timeout_s", math.inf, "timeout_s", "inf", SECONDS),
    ("timeout_s", 1e10, "timeout_s", "10000000000.0", SECONDS),
]


@pytest.mark.parametrize(("option", "given", "field", "value", "limit"), WRONG)
def test_what_no_call_can_have_is_named(option: str, given: Any, field: str, value: str, limit: str) -> None:
    """By field, value and limit, whether the client has it or one call."""
    settings: Any = {"timeout_s": None, "metadata": None}
    with pytest.raises(InvalidRequest) as of_client:
        Caller(ADDRESS, **{**settings, option: given})
    options: Any = {option: given}
    with pytest.raises(InvalidRequest) as of_call:
        Caller(ADDRESS, **settings).terms(options)
    assert of_client.value.metadata == of_call.value.metadata == {"field": field, "value": value, "limit": limit}


def test_a_call_has_its_own_time_and_both_metadata() -> None:
    """The client's metadata comes first, every name in lower case, and None is as good as nothing."""
    caller = Caller(ADDRESS, 5, {"A": "~ !"})
    terms = caller.terms({"timeout_s": 0.5, "metadata": (pair for pair in [("B.c-bin", b"\x00"), ("d", "")])})
    assert (terms.timeout_s, terms.metadata) == (0.5, (("a", "~ !"), ("b.c-bin", b"\x00"), ("d", "")))
    same = caller.terms({"timeout_s": None, "metadata": None})
    assert (same.timeout_s, same.metadata) == (5.0, (("a", "~ !"),))
