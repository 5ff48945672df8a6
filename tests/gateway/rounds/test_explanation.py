"""Choices in words: a sentence for each case, and the figures that were compared."""

from dataclasses import replace

import pytest

from gateway.rounds.choice import Case, Choice, GuessCandidate, LookupCosts, LookupTable, Table, choose
from gateway.rounds.explanation import NO_DRAFTER, NOT_YET, REASONS, RESTS, explained, reason
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT, LOOKUP, DrafterId, Place
from gateway.rounds.tuning import TUNING

HEAD = DrafterId("head", Place.HOSTED)
PLAIN, ONE, TWO = (GuessCandidate(ANY_DRAFT, count, 1.0 + 0.7 * count, 1000.0 + 100 * count) for count in range(3))
TABLE = Table((PLAIN, ONE, TWO), most=8, worth=frozenset({ANY_DRAFT}), allowed=frozenset({ANY_DRAFT}))


def test_every_case_has_a_sentence() -> None:
    """One of its own each, so that no two cases read alike."""
    assert set(REASONS) == set(Case)
    sentences = [*REASONS.values(), NO_DRAFTER, NOT_YET, RESTS]
    assert len({*sentences}) == len(sentences)
    assert all(each.endswith(".") and each.count(".") == 1 for each in sentences)


def test_a_choice_keeps_what_it_was_chosen_from() -> None:
    """The very table, whatever its case; two choices are equal whatever they were made from."""
    slow = Table((PLAIN, replace_cost(ONE, 9000.0)), worth=TABLE.worth, allowed=TABLE.allowed)
    tables = [
        TABLE,
        Table(),
        slow,
        replace(TABLE, exploring=HEAD),
        replace(TABLE, worth=frozenset()),
        replace(TABLE, worth=frozenset(), is_probe_due=True),
        replace(TABLE, is_plain_due=True),
    ]
    assert [choose(each, TUNING).table for each in tables] == tables
    assert choose(TABLE, TUNING) == Choice(2)


def replace_cost(candidate: GuessCandidate, cost_us: float) -> GuessCandidate:
    """The candidate at another cost."""
    return candidate._replace(cost_us=cost_us)


def test_the_best_is_explained_by_all_candidates() -> None:
    """Each drafter has its numbers of guesses, and plain decoding, which all are compared with, is no drafter's."""
    found = explained(choose(TABLE, TUNING))
    assert (found["case"], found["reason"]) == ("best", REASONS[Case.BEST])
    assert (found["draft_count"], found["plain_us"]) == (2, 1000.0)
    assert found["drafters"] == [
        {
            "drafter": "",
            "place": "remote",
            "makes": "chain",
            "is_worth": True,
            "is_allowed": True,
            "candidates": [
                {"draft_count": 1, "tokens": 1.7, "round_us": 1100.0, "tokens_per_s": pytest.approx(1545, abs=1)},
                {"draft_count": 2, "tokens": 2.4, "round_us": 1200.0, "tokens_per_s": pytest.approx(2000, abs=1)},
            ],
        }
    ]


def test_plain_decoding_has_the_reason_that_holds() -> None:
    """Without a drafter, while sessions wait for their turn, or after guesses slowed all down, the sentence says so."""
    assert reason(choose(Table(has_drafters=False), TUNING)) == NO_DRAFTER
    assert reason(choose(Table(), TUNING)) == REASONS[Case.UNKNOWN]
    assert reason(choose(replace(TABLE, allowed=frozenset()), TUNING)) == NOT_YET
    assert reason(choose(replace(TABLE, worth=frozenset(), rest=100.0), TUNING)) == RESTS
    slow = replace(TABLE, candidates=(PLAIN, replace_cost(ONE, 9000.0)))
    assert reason(choose(slow, TUNING)) == REASONS[Case.PLAIN_FASTER]


def test_a_lookup_is_explained_by_its_rows() -> None:
    """What each number of rows brings, less what other sessions lose, and what it has to beat."""
    costs = LookupCosts((1000.0, 1100.0, 1200.0), 1000.0, 0.1, 0.001)
    found = explained(Choice(2, drafter=LOOKUP, case=Case.LOOKUP, table=LookupTable((0.9, 0.5), costs, 1.1)))
    assert (found["case"], found["row_price"]) == ("lookup", 0.1)
    assert found["to_beat"] == pytest.approx(1100)
    [drafter] = found["drafters"]
    assert [(each["draft_count"], each["round_us"]) for each in drafter["candidates"]] == [(1, 1100.0), (2, 1200.0)]
    assert [each["tokens"] for each in drafter["candidates"]] == pytest.approx([1.8, 2.2])


@pytest.mark.parametrize("case", [Case.FIXED, Case.NO_ROOM])
def test_what_no_table_decides_has_a_sentence_alone(case: Case) -> None:
    """There is nothing that was compared."""
    found = explained(Choice(4, case=case))
    assert (found["reason"], found["drafters"], found["plain_us"]) == (REASONS[case], [], None)


def test_a_copy_has_the_sessions_of_its_policy() -> None:
    """One that finds out about a drafter still does for the copy, which therefore sends no other one."""
    policy = SpeculationPolicy()
    explorer = policy.session(ANY_DRAFT)
    policy.enter(explorer)
    assert policy.choose(8, explorer).case is Case.EXPLORING
    copy = policy.copied()
    assert copy.choose(8, explorer).case is Case.EXPLORING
    assert copy.choose(8, copy.session(ANY_DRAFT)).case is Case.UNKNOWN
