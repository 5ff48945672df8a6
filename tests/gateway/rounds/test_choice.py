"""The choice of a round from a table: each case, and which one goes first."""

from dataclasses import replace

import pytest

from gateway.rounds.choice import (
    Case,
    Choice,
    GuessCandidate,
    LookupCosts,
    Table,
    choose,
    fastest,
    lookup_rows,
    rows_to_verify,
)
from gateway.rounds.round import ANY_DRAFT, DrafterId, Makes, Place
from gateway.rounds.tuning import TUNING

HEAD, TREES = DrafterId("head", Place.HOSTED), DrafterId(makes=Makes.TREE)


def rows(drafter: DrafterId, *speeds: float) -> tuple[GuessCandidate, ...]:
    """Plain decoding at a token a microsecond, and one guess, two and so on at these speeds."""
    depth = 3 if drafter.makes is Makes.TREE else 0
    tokens = enumerate((1.0, *speeds))
    return tuple(GuessCandidate(drafter, count, speed * (1 + count), 1.0 + count, depth) for count, speed in tokens)


def table(*candidates: GuessCandidate) -> Table:
    """A table of drafters that are worth it, and nothing else is due."""
    drafters = frozenset(each.drafter for each in candidates)
    return Table(candidates, most=8, worth=drafters, allowed=drafters)


def test_the_most_tokens_a_microsecond_are_chosen() -> None:
    """Of all drafters; of two numbers that are as fast the larger one."""
    assert choose(table(*rows(ANY_DRAFT, 1.2, 1.4, 1.3)), TUNING) == Choice(2)
    both = table(*rows(ANY_DRAFT, 1.2, 1.4), *rows(HEAD, 1.5, 1.1))
    assert choose(both, TUNING) == Choice(1, drafter=HEAD)
    assert fastest(rows(ANY_DRAFT, 1.5, 1.5, 1.2)).draft_count == 2


ONE, TWO = table(*rows(ANY_DRAFT, 1.2, 1.4)), table(*rows(ANY_DRAFT, 1.2, 1.4), *rows(HEAD, 1.5, 1.1))


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (replace(ONE, exploring=HEAD), Choice(4, rounds=TUNING.probe_rounds, drafter=HEAD, case=Case.EXPLORING)),
        (
            replace(ONE, exploring=HEAD, most=2),
            Choice(2, rounds=TUNING.probe_rounds, drafter=HEAD, case=Case.EXPLORING),
        ),
        (
            Table(most=32, exploring=TREES),
            Choice(16, rounds=TUNING.probe_rounds, drafter=TREES, depth=4, case=Case.EXPLORING),
        ),
        (Table(), Choice(0, TUNING.short_budget, case=Case.UNKNOWN)),
        (Table(has_drafters=False), Choice(0, TUNING.plain_budget, case=Case.UNKNOWN)),
        (replace(TWO, other_turn=5), Choice(2, rounds=TUNING.probe_rounds, case=Case.OTHER)),
        (replace(TWO, other_turn=5, is_ready=False), Choice(1, drafter=HEAD)),
        (replace(ONE, other_turn=5), Choice(2)),
        (replace(ONE, worth=frozenset()), Choice(0, TUNING.plain_budget, case=Case.NOT_WORTH)),
        (
            replace(ONE, worth=frozenset(), is_probe_due=True),
            Choice(2, rounds=TUNING.probe_rounds, case=Case.PROBE),
        ),
        (replace(ONE, allowed=frozenset()), Choice(0, TUNING.short_budget, case=Case.PLAIN_FASTER)),
        (table(*rows(ANY_DRAFT, 0.9, 1.0)), Choice(0, TUNING.short_budget, case=Case.PLAIN_FASTER)),
        (replace(ONE, is_plain_due=True), Choice(0, TUNING.measured_budget, case=Case.PLAIN_LOOK)),
        (replace(ONE, is_plain_due=True, is_ready=False), Choice(2)),
        (replace(TWO, needs_plain=True), Choice(0, TUNING.short_budget, case=Case.PLAIN_LOOK)),
        (replace(ONE, needs_plain=True, worth=frozenset()), Choice(0, TUNING.plain_budget, case=Case.NOT_WORTH)),
    ],
)
def test_each_case_has_its_choice(situation: Table, expected: Choice) -> None:
    """What is to be found out goes first, then what is due, then what is best."""
    assert choose(situation, TUNING) == expected


def test_trees_that_look_ahead_are_larger_and_deeper() -> None:
    """Now and then, and whenever they are looked at; as far as there is room."""
    trees = table(*rows(TREES, 1.2, 1.3, 1.4))
    assert choose(trees, TUNING) == Choice(3, drafter=TREES, depth=3)
    ahead = replace(trees, looks_ahead=frozenset({TREES}))
    assert choose(ahead, TUNING) == Choice(6, drafter=TREES, depth=4, case=Case.LARGER_TREE)
    assert choose(replace(ahead, most=5), TUNING).draft_count == 5
    probe = choose(replace(trees, worth=frozenset(), is_probe_due=True), TUNING)
    assert probe == Choice(6, rounds=TUNING.probe_rounds, drafter=TREES, depth=4, case=Case.PROBE)


@pytest.mark.parametrize(
    ("row_us", "price", "rival", "gain", "expected"),
    [
        (1, 0.0, 0.001, 1, 3),
        (850, 0.0, 0.001, 1, 1),
        (900, 0.0, 0.001, 1, 0),
        (1, 0.0, 0.01, 1, 0),
        (1, 0.75, 0.001, 1, 2),
        (1, 0.95, 0.001, 1, 0),
        (1, 0.0, 0.001, 4, 0),
    ],
)
def test_rows_of_a_lookup_must_beat_everything_else(
    row_us: int, price: float, rival: float, gain: float, expected: int
) -> None:
    """Their own time, another drafter, what other sessions lose by them, and the rest of a stretch."""
    costs = LookupCosts([1000.0 + row_us * count for count in range(4)], 1000.0, price, rival)
    assert lookup_rows((0.9, 0.8, 0.7), costs, gain) == expected


def test_guesses_that_come_too_late_are_worth_less() -> None:
    """A stretch is ended for them in vain, unless the next token is the one that was guessed."""
    costs = LookupCosts([1000.0, 1700.0], 1000.0, 0.0, 0.001)
    assert lookup_rows((0.8,), costs, 1.0) == 1
    assert lookup_rows((0.8,), costs._replace(late=1.0), 1.0) == 0
    assert lookup_rows((0.8,), costs._replace(round_us=[1000.0, 1500.0], late=1.0), 1.0) == 1


def test_rows_that_cost_more_than_they_keep_are_left_out() -> None:
    """By the values that are kept, the most valuable first; one row remains."""
    values = (0.3, 0.9, 0.01)
    assert rows_to_verify(values, 1.0, lambda count: 1000 + 100 * count) == 2
    assert rows_to_verify(values, 0.1, lambda count: 1000 + 100 * count) == 1
    assert rows_to_verify(values, 1.0, lambda count: 1000 + count) == 3
