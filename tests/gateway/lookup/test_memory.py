"""Memories of tenants: what is found again, by whom, and how much is kept."""

import random
from array import array

import numpy as np
import pytest

from gateway.lookup.chains import Context
from gateway.lookup.memory import LEAST_TOKENS, MAX_BYTES_PER_TOKEN, Memories, TenantMemory
from outrider.errors import InvalidRequest


def context(*token_ids: int) -> Context:
    return Context(array("i", token_ids))


def said(memory: TenantMemory, *token_ids: int) -> list[int]:
    """The token after each place that matches, the newest first."""
    return [match.tokens[match.place] for match in memory.matches(context(*token_ids))]


def memories(max_tokens_each: int = LEAST_TOKENS, tenants: int = 8) -> Memories:
    return Memories(max_tokens_each, tenants * MAX_BYTES_PER_TOKEN * max_tokens_each)


def test_a_tenant_finds_what_it_said() -> None:
    """The newest first; the answer of one request never continues another's."""
    memory = memories().of("a")
    memory.add(array("i", [1, 2, 3, 4]))
    memory.add(array("i", [9, 1, 2, 3, 5]))
    memory.add(array("i", [3, 4, 7]))
    assert said(memory, 1, 2, 3) == [5, 4]
    assert memory.matches(context(4, 9, 1)) == []
    assert said(memory, 2, 3, 4)[0] < 0
    assert len(memory) == 15


def test_two_tenants_never_see_each_other() -> None:
    """What one finds is the same with and without what the other said."""
    own = np.random.default_rng(1).integers(0, 50, 2000, np.int32)
    other = np.random.default_rng(2).integers(0, 50, 2000, np.int32)
    alone, beside = memories(), memories()
    alone.of("a").add(array("i", own.tobytes()))
    beside.of("b").add(array("i", other.tobytes()))
    beside.of("a").add(array("i", own.tobytes()))
    beside.of("").add(array("i", other.tobytes()))
    for start in range(0, 2000, 7):
        for text in (own, other):
            asked = Context(array("i", text[start : start + 8].tobytes()))
            first, second = (kept.of("a").matches(asked) for kept in (alone, beside))
            assert [tuple(match[1:]) for match in first] == [tuple(match[1:]) for match in second]
    assert beside.of("c").matches(Context(array("i", own[:8].tobytes()))) == []


@pytest.mark.slow
def test_ten_million_tokens_stay_within_the_bound() -> None:
    """Never more tokens nor bytes than was said, and always the newest."""
    max_tokens = 1_000_000
    kept = Memories(max_tokens, MAX_BYTES_PER_TOKEN * max_tokens)
    memory, draw = kept.of("a"), np.random.default_rng(3)
    newest: list[array[int]] = []
    for _ in range(500):
        text = array("i", draw.integers(0, 150_000, 20_000, np.int32).tobytes())
        memory.add(text)
        newest = [*newest[-10:], text]
        assert len(memory) <= max_tokens
        assert kept.num_bytes == memory.num_bytes <= MAX_BYTES_PER_TOKEN * max_tokens
    assert len(memory) > max_tokens * 7 // 8
    assert memory.num_bytes < 14 * max_tokens
    for text in newest:
        assert text[1003] in said(memory, *text[1000:1003])


def test_a_request_longer_than_the_memory_leaves_its_end() -> None:
    """And what was there before is gone."""
    memory = memories().of("a")
    memory.add(array("i", [1, 2, 3, 4]))
    memory.add(array("i", range(10, 3 * LEAST_TOKENS)))
    assert said(memory, 1, 2, 3) == []
    end = 3 * LEAST_TOKENS - 1
    assert said(memory, end - 3, end - 2, end - 1) == [end]
    assert len(memory) <= LEAST_TOKENS


def test_who_asked_least_recently_is_forgotten() -> None:
    """The bytes are exact, a new tenant costs little, and what a forgotten one adds is not counted."""
    kept = Memories(LEAST_TOKENS, MAX_BYTES_PER_TOKEN * LEAST_TOKENS)
    draw = random.Random(4)
    texts = {salt: array("i", [draw.randrange(5000) for _ in range(1500)]) for salt in "abcdef"}
    assert kept.of("a").num_bytes == kept.num_bytes < 2000
    first = kept.of("a")
    for salt, text in texts.items():
        kept.of(salt).add(text)
        assert kept.num_bytes <= MAX_BYTES_PER_TOKEN * LEAST_TOKENS
    assert 1 <= len(kept) < 6
    assert kept.of("f").num_bytes > 10_000
    before = kept.num_bytes
    first.add(texts["a"])
    assert kept.num_bytes == before
    assert kept.of("a") is not first
    assert said(kept.of("a"), *texts["a"][:3]) == []
    assert texts["f"][3] in said(kept.of("f"), *texts["f"][:3])


@pytest.mark.parametrize(
    ("tokens", "size", "sentence"),
    [
        (100, 10**9, f"max_tokens_each is 100, but must be at least {LEAST_TOKENS}"),
        (10**6, 10**6, "max_bytes is 1000000, but must be at least 18000000, for 1000000 tokens of a tenant"),
    ],
)
def test_memories_that_cannot_be_are_refused(tokens: int, size: int, sentence: str) -> None:
    """By the name of what is too small."""
    with pytest.raises(InvalidRequest, match=f"^{sentence}$"):
        Memories(tokens, size)
