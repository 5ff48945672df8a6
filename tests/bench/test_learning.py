"""What is asked while a head learns: each kind apart, and nothing twice, so that no answer is known from before."""

import pytest

from bench.learning import FORMS, AskedTurn, questions, table


@pytest.mark.parametrize("kind", FORMS)
def test_no_question_is_asked_twice(kind: str) -> None:
    """In three turns of as many as a turn may have."""
    asked = [text for turn in range(3) for text in questions(kind, turn, 24)]
    assert len(set(asked)) == len(asked) == 72
    assert not any("{}" in text for text in asked)


def test_a_turn_without_a_version_has_none_in_the_table() -> None:
    """And one with a version has its name and its figure."""
    turns = [AskedTurn("English", 1.5, None, "", "version 1"), AskedTurn("German", 1.4, 1.62, "learnt-1a", "version 2")]
    assert table(turns).splitlines()[2:] == [
        "| English | 1.500 | - | - | version 1 |",
        "| German | 1.400 | 1.620 | learnt-1a | version 2 |",
    ]
