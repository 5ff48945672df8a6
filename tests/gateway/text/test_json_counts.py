"""What a JSON text becomes is known before it is parsed, to the value, and no less memory than it takes."""

import json
import tracemalloc
from random import Random
from typing import Any

import pytest

from gateway.text.json_counts import MAX_FRACTIONS, MAX_KEYS, MAX_NODES, MAX_STRINGS, MAX_VALUES, JsonCounts
from outrider.errors import InvalidRequest

MARKS = '[]{},:"\\/.e\n\t é\U0001f600' + "\\\\" * 3


def random_value(chance: Random, depth: int) -> Any:
    """A value with marks of JSON in its strings."""
    kind = chance.randrange(6 if depth else 4)
    if kind == 0:
        return "".join(chance.choice(MARKS) for _ in range(chance.randrange(12)))
    if kind < 4:
        return chance.choice([0, 12, -1.5, 1e-9, True, False, None, ""])
    values = [random_value(chance, depth - 1) for _ in range(chance.randrange(6))]
    return values if kind == 4 else {f'"{number}\\': value for number, value in enumerate(values)}


def counted(value: Any) -> tuple[int, int, int, int]:
    """Keys, lists and objects, strings, and numbers with a point or an exponent."""
    parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    keys = len(value) if isinstance(value, dict) else 0
    below = [sum(column) for column in zip((0, 0, 0, 0), *map(counted, parts), strict=True)]
    return (
        below[0] + keys,
        below[1] + isinstance(value, dict | list),
        below[2] + keys + isinstance(value, str),
        below[3] + isinstance(value, float),
    )


@pytest.mark.parametrize("is_ascii", [True, False])
def test_counts_are_exact_for_json(is_ascii: bool) -> None:
    """Whatever its strings hold, and however they are escaped."""
    chance = Random(7)
    for _ in range(300):
        value, counts = random_value(chance, 4), JsonCounts()
        # One exponent may have two letters and marks that count.
        counts.add("body", json.dumps(value, ensure_ascii=is_ascii).replace("1e-09", "0.5").encode())
        assert (counts.keys, counts.nodes, counts.strings, counts.fractions) == counted(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"[" + b"[]," * MAX_NODES + b"[]]", f"50002 lists and objects, but must have at most {MAX_NODES}"),
        (b"{}{" * 30_000, f"60000 lists and objects, but must have at most {MAX_NODES}"),
        (b"[" * 60_000, f"60000 lists and objects, but must have at most {MAX_NODES}"),
        (b"[" + b'"a",' * MAX_STRINGS + b'""]', f"150001 strings, but must have at most {MAX_STRINGS}"),
        (b"[" + b"1," * MAX_VALUES + b"1]", f"1048578 values, but must have at most {MAX_VALUES}"),
        (b"[" + b"1e1," * MAX_FRACTIONS + b"1.5]", "50001 numbers with a point or an exponent, but must have at most"),
        (b"{" + b'"":1,' * MAX_KEYS + b'"":1}', f"50001 keys, but must have at most {MAX_KEYS}"),
    ],
)
def test_too_much_is_refused_by_name_before_it_is_parsed(text: bytes, sentence: str) -> None:
    """With the count and the limit, also of what is no JSON to its end."""
    with pytest.raises(InvalidRequest, match=f"^messages.1 has {sentence}"):
        JsonCounts().add("messages.1", text)


def test_texts_of_a_request_count_together() -> None:
    """Many that are each just small enough are as much as one that is not."""
    counts, text = JsonCounts(), b"[" + b"[]," * 24_000 + b"[]]"
    for number in range(2):
        counts.add(f"texts.{number}", text)
    with pytest.raises(InvalidRequest, match=r"texts\.2 has 72006 lists and objects"):
        counts.add("texts.2", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * 40_000 + b"[]]",
        b"[" + b"[1]," * 40_000 + b"[]]",
        b"[" + b'{"a":1},' * 40_000 + b"{}]",
        b"[" + b'"ab",' * 100_000 + b'""]',
        b"[" + b"257," * 500_000 + b"1]",
        b"[" + b"1.5," * 40_000 + b"1]",
        b'"' + "\U0001f600".encode() + b"a" * 1_000_000 + b'"',
        b'"\\ud83d\\ude00' + b"a" * 1_000_000 + b'"',
        '"{}"'.format("é" * 500_000).encode(),
    ],
)
def test_values_take_no_more_memory_than_was_counted(text: bytes) -> None:
    """Of each kind that becomes much more than it was."""
    counts = JsonCounts()
    counts.add("body", text)
    decoded = text.decode()

    def held() -> int:
        tracemalloc.start()
        try:
            value = json.loads(decoded)
            assert value is not None
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    # Threads of earlier tests in this process may take memory meanwhile.
    assert min(held() for _ in range(3)) <= counts.memory_bytes
