"""Guesses of one request: what its grammar forces, as long as that is cheap to find."""

import math
from collections.abc import Iterator
from itertools import count
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
    ("cost_s", "looks"),
    [(FREE_LOOK_S, 9), (FREE_LOOK_S + MAX_FORCED_S / 2.5, 3), (FREE_LOOK_S + 2 * MAX_FORCED_S, 1)],
)
def test_a_grammar_is_looked_at_while_that_is_cheap(engine: GrammarEngine, cost_s: float, looks: int) -> None:
    """The look that uses up what looks may cost is the last one, and what it has found is proposed."""
    clock: Iterator[float] = (cost_s * number for number in count())
    guesses = LookupGuesses(max_rows=8, grammar=engine.get(canonical(FORCED)), clock_s=lambda: next(clock))
    guesses.commit(engine.get(canonical(BEGUN)).forced([]))
    found = []
    for _ in range(9):
        found.append(guesses.look(8))
        guesses.commit(())
    assert [bool(look.tree) for look in found] == [number < looks for number in range(9)]
    assert set(found[0].sources) == {GRAMMAR}


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
