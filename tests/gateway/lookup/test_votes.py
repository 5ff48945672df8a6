"""Votes of places, counted by hand."""

from array import array
from collections.abc import Sequence

import pytest

from gateway.lookup.rates import GROUNDS, NAMES, PREDICTION_GROUND, TABLE_GROUND, Kind, LookupRates
from gateway.lookup.votes import NOTHING, Look, Vote, Voter
from outrider.token_tree import TokenTree

MEANS = LookupRates().means


def voters(kind: Kind, length: int, *continuations: Sequence[int]) -> list[Voter]:
    """Places with these continuations after matches of this length."""
    return [Voter(kind, array("i", [99, *tokens, -1]), 1, length) for tokens in continuations]


def grow(
    found: list[Voter], max_rows: int = 16, max_depth: int = 8, least: float = 0.0, *, chain: bool = False
) -> Look:
    return Vote(MEANS, 99).grow(found, max_rows, max_depth, least, chain=chain)


def rows(look: Look) -> dict[tuple[int, ...], float]:
    """The value of each path of tokens."""
    tree = look.tree
    paths = [tuple(tree.token_ids[each - 1] for each in tree.path(row)) for row in range(1, len(tree) + 1)]
    return dict(zip(paths, tree.values, strict=True))


def test_values_are_shares_times_rates() -> None:
    """After 3 matching tokens the rate is 0.5, after 4 and more it is 0.6."""
    look = grow(voters(Kind.OWN, 3, [1, 2], [1, 3], [4], [1, 2]))
    expected = {(1,): 0.5 * 0.75, (1, 2): 0.375 * 0.6 * 2 / 3, (4,): 0.5 * 0.25, (1, 3): 0.375 * 0.6 / 3}
    assert rows(look) == pytest.approx(expected)
    assert list(rows(look)) == [(1,), (1, 2), (4,), (1, 3)]
    assert look.sources == ("lookup",) * 4
    assert look.match_len == 3


def test_longer_matches_vote_first_and_others_about_the_rest() -> None:
    """A token that both name has the first one's value; all children together are worth their parent at most."""
    look = grow([*voters(Kind.OWN, 3, [5], [6], [7]), *voters(Kind.TENANT, 20, [5], [5], [8])])
    left = 1 - 0.8
    expected = {(5,): 0.8 * 2 / 3, (8,): 0.8 / 3, (6,): left * 0.5 / 2, (7,): left * 0.5 / 2}
    assert rows(look) == pytest.approx(expected)
    assert list(rows(look)) == [(5,), (8,), (6,), (7,)]
    assert sum(look.tree.values) <= 1
    assert look.match_len == 20


def test_whoever_named_a_token_votes_behind_it() -> None:
    """A short match's continuation goes on where the long one's text ends."""
    look = grow([*voters(Kind.DATASTORE, 3, [5, 9]), *voters(Kind.PREDICTION, 3, [5])])
    assert rows(look) == pytest.approx({(5,): 0.8, (5, 9): 0.8 * 0.6})
    assert look.sources == ("prediction", "datastore")


@pytest.mark.parametrize("chain", [False, True])
def test_rows_that_are_worth_too_little_are_left_out(chain: bool) -> None:
    """Those above the least value are the same rows as without one."""
    found = [*voters(Kind.OWN, 3, [1, 2], [1, 3], [4], [1, 2]), *voters(Kind.TENANT, 20, [5], [5, 6, 7], [8])]
    whole = grow(found, chain=chain)
    for least in (0.0, *whole.tree.values, 1.0):
        kept = sum(value > least for value in whole.tree.values)
        assert grow(found, least=least, chain=chain) == (whole.cut(kept) if kept else NOTHING)


def test_a_chain_is_the_best_path() -> None:
    """The best child of each row, of equal ones the newest, and nothing else."""
    found = voters(Kind.OWN, 3, [1, 2, 3], [4, 5, 6], [1, 7, 8], [4, 5, 9], [4, 5])
    look = grow(found, chain=True)
    assert look.tree.is_chain
    assert look.tree.token_ids == (4, 5, 6)
    assert grow(found, max_rows=2, chain=True).tree.token_ids == (4, 5)
    assert grow(found, max_depth=1, chain=True).tree.token_ids == (4,)


def test_the_best_rows_are_a_prefix() -> None:
    """Values never rise from row to row, nor along a path; cutting is the same as asking for fewer."""
    found = [
        *voters(Kind.OWN, 5, [1, 2, 3, 4], [1, 2, 4, 4], [2, 2, 2, 2], [3, 1, 1, 1]),
        *voters(Kind.TENANT, 9, [1, 1, 1, 1], [4, 4, 4], [1, 2, 3, 5]),
    ]
    look = grow(found, max_rows=20)
    tree = look.tree
    assert len(tree) > 12
    assert list(tree.values) == sorted(tree.values, reverse=True)
    for row, parent in enumerate(tree.parents, start=1):
        assert parent == 0 or tree.values[parent - 1] >= tree.values[row - 1]
    for num_rows in range(len(tree) + 1):
        assert look.cut(num_rows).tree == grow(found, max_rows=num_rows).tree
        assert len(look.cut(num_rows).sources) == num_rows
    assert look.cut(len(tree) + 1) is look


def test_depth_and_rows_are_limited() -> None:
    """And nothing to vote for is an empty look."""
    found = voters(Kind.OWN, 4, [1, 2, 3, 4, 5], [2, 2, 2])
    assert max(grow(found, max_depth=2).tree.depths) == 2
    assert len(grow(found, max_rows=3).tree) == 3
    assert grow(found, max_rows=0) == grow(found, max_depth=0) == grow([]) == NOTHING
    assert TokenTree() == NOTHING.tree


class Pairs:
    """A table with two rows."""

    def after(self, token_id: int) -> Sequence[tuple[int, float]]:
        return {99: [(7, 0.5), (8, 0.25)], 7: [(1, 1.0)]}.get(token_id, [])


def test_the_table_is_the_last_resort() -> None:
    """It is asked where no place says anything, after the last committed token and after guesses."""
    table = Vote(MEANS, 99, Pairs())
    rate = MEANS[TABLE_GROUND]
    look = table.grow([], 8, 4, chain=False)
    assert rows(look) == pytest.approx({(7,): rate / 2, (8,): rate / 4, (7, 1): rate * rate / 2})
    assert set(look.sources) == {"table"}
    assert look.match_len == 0
    look = table.grow(voters(Kind.OWN, 3, [7]), 8, 4, chain=False)
    assert rows(look) == pytest.approx({(7,): 0.5, (7, 1): 0.5 * rate})
    assert look.sources == ("lookup", "table")


def test_rates_follow_what_was_accepted() -> None:
    """Recent tests weigh more, a share of the votes counts as that part of a test, and other grounds stay."""
    rates, number = LookupRates(), GROUNDS[Kind.OWN][5]
    others = [mean for ground, mean in enumerate(rates.means) if ground != number]
    for _ in range(300):
        rates.observe(number, 1.0, accepted=True)
    assert rates.means[number] > 0.9
    for _ in range(300):
        rates.observe(number, 1.0, accepted=False)
    assert rates.means[number] < 0.1
    for turn in range(600):
        rates.observe(number, 0.5, accepted=turn % 4 == 0)
    assert rates.means[number] == pytest.approx(0.5, abs=0.06)
    assert [mean for ground, mean in enumerate(rates.means) if ground != number] == others


def test_grounds_are_buckets_of_lengths() -> None:
    """3, 4 to 7, 8 to 15, 16 to 31, 32; a prediction and a table have one each. Longer matches promise more."""
    for kind in (Kind.OWN, Kind.TENANT, Kind.DATASTORE):
        found = [GROUNDS[kind][length] for length in (3, 4, 7, 8, 15, 16, 31, 32)]
        assert [number - found[0] for number in found] == [0, 1, 1, 2, 2, 3, 3, 4]
        assert [MEANS[number] for number in found] == [0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.8, 0.9]
    assert set(GROUNDS[Kind.PREDICTION]) == {PREDICTION_GROUND}
    assert set(GROUNDS[Kind.TABLE]) == {TABLE_GROUND}
    assert len({number for grounds in GROUNDS for number in grounds}) == 17
    assert [NAMES[GROUNDS[kind][3]] for kind in Kind] == ["lookup", "lookup", "datastore", "prediction", "table"]
