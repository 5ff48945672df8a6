"""Guesses of one request: what its grammar forces, as long as that is cheap to find."""

import math
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

import pytest
from support.stack import TARGET

from gateway.lookup.guesses import FREE_LOOK_S, GRAMMAR, MAX_FORCED_S, LookupGuesses
from gateway.lookup.rates import LookupRates
from gateway.lookup.session import LookupSession
from gateway.lookup.votes import NOTHING
from outrider.constraint import Constraint, ConstraintKind
from outrider.grammar import GrammarEngine, canonical
from outrider.model_files.vocabulary import Vocabulary

FORCED = Constraint(ConstraintKind.REGEX, "(once upon a time|never before that day)!")
BEGUN = Constraint(ConstraintKind.REGEX, "on")


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    """Engine of the embedded target's tokens."""
    size = Vocabulary.read(TARGET).size
    return GrammarEngine((Path(TARGET) / "tokenizer.json").read_text(encoding="utf-8"), size, frozenset({0}))


@pytest.mark.parametrize(
    ("costs_s", "looks"),
    [
        ((FREE_LOOK_S,) * 9, 9),
        ((FREE_LOOK_S + MAX_FORCED_S / 2.5,) * 9, 4),
        ((FREE_LOOK_S + 2 * MAX_FORCED_S,) * 9, 2),
        ((2 * MAX_FORCED_S, FREE_LOOK_S) * 5, 9),
    ],
)
def test_a_grammar_is_looked_at_while_that_is_cheap(
    engine: GrammarEngine, costs_s: Sequence[float], looks: int
) -> None:
    """What two looks in a row have both taken counts, so that one which is slow by chance ends nothing."""
    took_s = iter(costs_s)
    clock = chain.from_iterable((0.0, each) for each in took_s)
    guesses = LookupGuesses(max_rows=8, grammar=engine.get(canonical(FORCED)), clock_s=lambda: next(clock))
    for _ in range(9):
        # There is a choice at the beginning: nothing is found, and the next round has to look again.
        assert not guesses.look(8).tree
        guesses.commit(())
    assert len(list(took_s)) == len(costs_s) - looks


def test_a_long_forced_run_is_found_by_one_look(engine: GrammarEngine) -> None:
    """Rounds go through it piece by piece; only where an answer leaves it is there another look."""
    ticks = count()
    guesses = LookupGuesses(max_rows=3, grammar=engine.get(canonical(FORCED)), clock_s=lambda: 0.0 * next(ticks))
    begun = engine.get(canonical(BEGUN)).forced([])
    run = engine.get(canonical(FORCED)).forced(begun)
    guesses.commit(begun)
    found: list[int] = []
    while (look := guesses.look(8)).tree:
        assert (set(look.sources), len(look.tree.token_ids) <= 3) == ({GRAMMAR}, True)
        guesses.commit(look.tree.token_ids)
        found += look.tree.token_ids
    assert (found, len(found) > 3) == (run[: len(found)], True)
    # Two looks, each from one tick to the next: the second finds the end.
    assert next(ticks) == 4


async def test_nothing_is_searched_for_where_nothing_found_is_of_use(engine: GrammarEngine) -> None:
    """Rows have to be worth more than is said, and what a grammar forces comes all the same."""
    session = LookupSession([1, 2, 3, 50, 51, 52, 1, 2, 3], rates=LookupRates())
    await session.read()
    guesses = LookupGuesses(session, max_rows=3)
    values = guesses.look(8).tree.values
    assert guesses.look(8, values[1]).tree.values == values[:1]
    guesses.commit([60])
    guesses.commit([1, 2, 3])
    assert guesses.look(8, math.inf) == NOTHING
    forced = LookupGuesses(session, max_rows=8, grammar=engine.get(canonical(FORCED)))
    forced.commit(engine.get(canonical(BEGUN)).forced([]))
    assert set(forced.look(8, math.inf).sources) == {GRAMMAR}
