"""The index of a text against a search by hand."""

import random

import pytest

from outrider.drafters.shelf.text_index import KEY_LEN, MAX_MATCH, MAX_PLACES, TextIndex, continue_from


def longest_by_hand(token_ids: list[int], length: int) -> tuple[int, int]:
    """The longest repetition of the end, of the last places in the first `length` tokens with the last KEY_LEN."""
    end, best, seen = len(token_ids) - 1, (0, -1), 0
    for place in range(length - 1, KEY_LEN - 2, -1):
        if token_ids[place - KEY_LEN + 1 : place + 1] != token_ids[-KEY_LEN:]:
            continue
        seen += 1
        size = 0
        while size < MAX_MATCH and size <= place and token_ids[place - size] == token_ids[end - size]:
            size += 1
        if place != end and size > best[0]:
            best = size, place
        if seen == MAX_PLACES:
            break
    return best


@pytest.mark.parametrize("num_ids", [1, 2, 4, 30])
def test_the_longest_repetition_is_found(num_ids: int) -> None:
    """While a text grows, is cut, goes on otherwise, and has guesses after it: the index is that of its log."""
    dice, index, text = random.Random(num_ids), TextIndex(), [0, 0]
    for _ in range(300):
        if dice.random() < 0.2:
            del text[dice.randrange(2, len(text) + 1) :]
        text += dice.choices(range(num_ids), k=dice.randrange(1, 7))
        with_guesses = text + dice.choices(range(num_ids), k=dice.randrange(4))
        index.follow(with_guesses, len(text))
        assert index.find(with_guesses) == longest_by_hand(with_guesses, len(text))
        fresh = TextIndex()
        fresh.follow(text, len(text))
        assert vars(index) == vars(fresh)


def test_the_end_is_no_repetition_of_itself() -> None:
    """A text without repetitions has none."""
    index = TextIndex()
    index.follow([1, 2, 3], 3)
    assert index.find([1, 2, 3]) == (0, -1)
    index.follow([4], 1)
    assert index.find([4]) == (0, -1)


def test_a_period_goes_on() -> None:
    """After the end what was copied is copied on."""
    assert continue_from([7, 1, 2, 3, 1, 2], 2, 5) == [3, 1, 2, 3, 1]
    assert continue_from([5, 5, 5], 1, 4) == [5, 5, 5, 5]
