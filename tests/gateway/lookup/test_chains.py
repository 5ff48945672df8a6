"""The index of a text, against a suffix automaton."""

import random
from array import array
from itertools import product

import pytest
from support.drafting.suffix_automaton import SuffixAutomaton

from gateway.lookup.chains import BULK, CONTEXT_LEN, MAX_PLACES, Chains, Context, Match


def fibonacci(length: int) -> list[int]:
    """A word that repeats itself at every scale, and is nowhere periodic."""
    older, word = [1], [1, 0]
    while len(word) < length:
        older, word = word, word + older
    return word[:length]


def random_text(alphabet: int, length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(alphabet) for _ in range(length)]


TEXTS = {
    "few tokens": random_text(3, 400),
    "some tokens": random_text(12, 1500),
    "many tokens": random_text(300, 4000),
    "phrases": [token for phrase in random_text(20, 200) for token in random_text(500, 12, phrase)],
    "aaaa": [7] * 200,
    "Fibonacci": fibonacci(600),
    "all zero": [0] * 100,
}


def longest(matches: list[Match]) -> int:
    return max((match.length for match in matches), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_longest_match_is_that_of_the_automaton(text: list[int]) -> None:
    """Wherever no more places than are looked at share the last three tokens; elsewhere it is never longer."""
    chains, automaton, num_exact = Chains(1 << 14), SuffixAutomaton(), 0
    for place, token_id in enumerate(text):
        chains.extend([token_id])
        automaton.add(token_id)
        expected = min(automaton.repeat_len, CONTEXT_LEN)
        found = chains.repeats(Context(chains.tokens))
        key = text[max(0, place - 2) : place + 1]
        num_places = sum(text[start : start + 3] == key for start in range(place - 2))
        if num_places <= MAX_PLACES:
            num_exact += 1
            assert len(found) == num_places
            assert longest(found) == (expected if expected >= 3 else 0)
        else:
            assert 3 <= longest(found) <= expected
    assert num_exact > 15


def test_a_match_is_what_it_says() -> None:
    """Its tokens are those before its place, the one before these differs, and newer places come first."""
    text = [*TEXTS["some tokens"], *TEXTS["some tokens"][700:708]]
    chains = Chains()
    chains.extend(text)
    found = chains.repeats(Context(chains.tokens))
    assert len(found) > 1
    assert [match.place for match in found] == sorted((match.place for match in found), reverse=True)
    for tokens, place, length in found:
        assert list(tokens[place - length : place]) == text[-length:]
        assert length == CONTEXT_LEN or tokens[place - length - 1] != text[-length - 1]


def test_one_by_one_and_at_once_are_the_same() -> None:
    """Whatever the slices are, and whenever the table grows."""
    text = random_text(9, 5000)
    whole, single, slices = Chains(), Chains(), Chains(1 << 13)
    whole.extend(text)
    for token_id in text:
        single.extend([token_id])
    for start in range(0, len(text), BULK + 1):
        slices.extend(text[start : start + BULK + 1])
    for end in range(3, 400):
        context = Context(array("i", text[:end]))
        places = [[match.place for match in chains.matches(context)] for chains in (whole, single, slices)]
        assert places[0] == places[1] == places[2] != []


def test_two_contexts_with_one_hash() -> None:
    """A place of another triple with the same hash is no match, and hides none."""
    by_key: dict[int, tuple[int, ...]] = {}
    pairs = []
    for triple in product(range(40), repeat=3):
        hashed = Context(array("i", triple)).hashed
        assert hashed is not None
        key = hashed & (1 << 8) - 1
        if key in by_key:
            pairs.append((by_key[key], triple))
        by_key[key] = triple
    for first, second in pairs[:50]:
        chains = Chains()
        chains.extend([*first, 77, *second, 78])
        assert [match.place for match in chains.matches(Context(array("i", first)))] == [3]
        assert [match.place for match in chains.matches(Context(array("i", second)))] == [7]
        chains = Chains()
        chains.extend(first)
        assert chains.matches(Context(array("i", second))) == []


def test_the_end_does_not_match_itself() -> None:
    """Nor do two tokens make a match."""
    chains = Chains()
    assert chains.repeats(Context(chains.tokens)) == []
    for token_id in (1, 2, 3, 9, 2, 3):
        chains.extend([token_id])
        assert chains.repeats(Context(chains.tokens)) == []


def test_token_0_is_a_token() -> None:
    """At the beginning, where nothing stands before it, too."""
    chains = Chains()
    chains.extend([0, 0, 0, 5])
    assert chains.matches(Context(array("i", [0, 0, 0, 0, 0]))) == [Match(chains.tokens, 3, 3)]
    assert chains.matches(Context(array("i", [0, 0]))) == []
