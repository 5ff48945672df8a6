"""The choice of a round as a function of a table: what each number of guesses costs and brings, and what is due. Pure.

Numbers of guesses are compared by tokens a microsecond; see costs.py. Whatever is chosen for another reason keeps what
is known of the other side alive; see exploration.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from gateway.rounds.round import ANY_DRAFT, LOOKUP, DrafterId, Makes
from gateway.rounds.tuning import PolicyTuning


class GuessCandidate(NamedTuple):
    """A number of guesses of a drafter, with the tokens that a round is expected to commit; 0 for plain decoding.

    `depth` is how deep the rows of a tree may lie.
    """

    drafter: DrafterId
    draft_count: int
    tokens: float
    cost_us: float
    depth: int = 0

    @property
    def speed(self) -> float:
        """Tokens a microsecond."""
        return self.tokens / self.cost_us


class Case(Enum):
    """Case of a choice: first those of `choose`, in its order, then those that no table of drafters decides."""

    EXPLORING = 1
    UNKNOWN = 2
    OTHER = 3
    PROBE = 4
    NOT_WORTH = 5
    PLAIN_FASTER = 6
    PLAIN_LOOK = 7
    BEST = 8
    LARGER_TREE = 9
    FIXED = 10
    NO_ROOM = 11
    LOOKUP = 12


TRYING = frozenset({Case.EXPLORING, Case.OTHER, Case.PROBE})
"""Cases in which guesses are made to find something out."""
LOOKING = TRYING | {Case.LARGER_TREE}
"""Cases of guesses that are not the best ones that are known."""
WANTED = frozenset({Case.BEST, Case.LARGER_TREE})
"""Cases of guesses because they are worth their cost."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a round: K, whose guesses, for how many rounds, and for K = 0 how many tokens may come unasked.

    `depth` is how deep the rows of a tree may lie.
    """

    draft_count: int
    plain_budget: int = 0
    rounds: int = 1
    drafter: DrafterId = ANY_DRAFT
    depth: int = 0
    case: Case = Case.BEST
    table: "Table | LookupTable | None" = field(default=None, compare=False, repr=False)
    """What it was chosen from, as that was then; explanation.py puts it into words when a user asks."""


@dataclass(frozen=True, slots=True)
class Table:
    """Everything that a choice depends on: candidates of the drafters that are known, and what is due beside them."""

    candidates: tuple[GuessCandidate, ...] = ()
    most: int = 1
    """Guesses that there is room for."""
    is_ready: bool = True
    """Whether the session carries the choice out at once."""
    exploring: DrafterId | None = None
    """Drafter of which nothing is known, and this session is to find out."""
    has_drafters: bool = True
    other_turn: int | None = None
    """Number of the turn of a drafter that is not the fastest; None while none is due."""
    is_probe_due: bool = False
    is_plain_due: bool = False
    needs_plain: bool = False
    """Whether it is to be seen what plain decoding costs, because it may be faster."""
    least_gain: float = 1.0
    """How many times as fast as plain decoding a session's own guesses must look."""
    rest: float = 0.0
    """Plain tokens for which there should be no guesses, because all sessions together were slower with them."""
    worth: frozenset[DrafterId] = frozenset()
    """Drafters whose guesses were worth it when costs were last looked at."""
    allowed: frozenset[DrafterId] = frozenset()
    """Drafters that this session may use: not too many begin with one at once."""
    looks_ahead: frozenset[DrafterId] = frozenset()
    """Drafters whose next tree is larger and deeper than the best one."""


def fastest(candidates: Sequence[GuessCandidate]) -> GuessCandidate:
    """The candidate of the most tokens a microsecond; of equal ones that with the most guesses."""
    return max(candidates, key=lambda each: (each.speed, each.draft_count))


def choose(table: Table, tuning: PolicyTuning) -> Choice:
    """The best number of guesses, or one that keeps what is known alive. Of these cases the first one that holds:

    1. This session is to find out about a drafter: it makes a middling number of guesses.
    2. Of no drafter anything is known, and others find out: plain decoding.
    3. It is the turn of another drafter than the fastest.
    4. Guesses are not worth it, and it is time to look whether they still are not.
    5. They are not, and it is not time: plain decoding, in long stretches.
    6. This session may not draft yet, or its own guesses are worse than none: plain decoding, in short ones.
    7. It is time to look what plain decoding costs.
    8. The most tokens a microsecond.
    9. The same, but a tree that is larger and deeper: the best one says nothing of such trees.
    """
    if table.exploring is not None:
        count, depth = tuning.first_tree if table.exploring.makes is Makes.TREE else (tuning.first_guess, 0)
        rounds = tuning.probe_rounds
        return Choice(min(count, table.most), 0, rounds, table.exploring, depth, Case.EXPLORING, table)
    if not table.candidates:
        budget = tuning.short_budget if table.has_drafters else tuning.plain_budget
        return Choice(0, budget, case=Case.UNKNOWN, table=table)
    return _compared(table, tuning)


def _compared(table: Table, tuning: PolicyTuning) -> Choice:
    """The choice among drafters that are known: cases 3 to 8."""
    plain_us = {each.drafter: each.cost_us for each in table.candidates if not each.draft_count}
    guesses = [each for each in table.candidates if each.draft_count]
    bests = [fastest([each for each in guesses if each.drafter == drafter]) for drafter in plain_us]
    best = max(bests, key=lambda each: each.speed)
    others = [each for each in bests if each is not best]
    if others and table.is_ready and table.other_turn is not None:
        return _asked(others[table.other_turn % len(others)], table, Case.OTHER, tuning)
    if best.drafter not in table.worth:
        if table.is_probe_due:
            return _asked(best, table, Case.PROBE, tuning)
        return Choice(0, tuning.plain_budget, case=Case.NOT_WORTH, table=table)
    if best.drafter not in table.allowed or best.speed * plain_us[best.drafter] <= table.least_gain:
        return Choice(0, tuning.short_budget, case=Case.PLAIN_FASTER, table=table)
    if table.needs_plain or (table.is_ready and table.is_plain_due):
        budget = tuning.short_budget if table.needs_plain else tuning.measured_budget
        return Choice(0, budget, case=Case.PLAIN_LOOK, table=table)
    return _asked(best, table, Case.BEST, tuning)


def _asked(candidate: GuessCandidate, table: Table, case: Case, tuning: PolicyTuning) -> Choice:
    """The choice of a candidate; where it is looked at, of a tree that is larger and deeper."""
    drafter, count, depth = candidate.drafter, candidate.draft_count, candidate.depth
    rounds = 1 if case is Case.BEST else tuning.probe_rounds
    if drafter.makes is Makes.TREE and (rounds > 1 or drafter in table.looks_ahead):
        count, depth = min(2 * count, table.most), min(depth + 1, tuning.chain_counts[-1])
        case = Case.LARGER_TREE if case is Case.BEST else case
    return Choice(count, rounds=rounds, drafter=drafter, depth=depth, case=case, table=table)


class LookupCosts(NamedTuple):
    """Costs of a round with rows of a lookup, and what it has to beat."""

    round_us: Sequence[float]
    """Cost of a session's round, by the rows of the lookup in it, as many as the other sessions should wait for."""
    plain_us: float
    """Cost of a token that comes unasked."""
    price: float
    """Tokens that the other sessions lose for each row."""
    rival: float
    """Tokens a microsecond, less what the others lose, of the best that there is beside a lookup."""
    late: float = 0.0
    """Chance that the next token has been decided before guesses are there; what was found may still be of use then."""


class LookupTable(NamedTuple):
    """Everything that a lookup's choice depends on: falling values of the rows that were found, and what they cost."""

    values: Sequence[float]
    costs: LookupCosts
    gain: float
    """How many times better they must be than whatever else there is."""

    @property
    def candidates(self) -> tuple[GuessCandidate, ...]:
        """Numbers of rows that were compared; their tokens are less by what the other sessions lose."""
        rounds = enumerate(_lookup_rounds(self.values, self.costs), start=1)
        return tuple(GuessCandidate(LOOKUP, count, tokens, cost_us) for count, (tokens, cost_us) in rounds)


def _lookup_rounds(values: Sequence[float], costs: LookupCosts) -> Iterator[tuple[float, float]]:
    """Tokens, less what the other sessions lose, and microseconds of a round with one row, with two, and so on."""
    tokens, late = 0.0, costs.late
    for value, round_us in zip(values, costs.round_us[1:], strict=True):
        tokens += value - costs.price
        kept = (1 - late + late * values[0]) * tokens
        yield 1 + late + kept, round_us + late * costs.plain_us


def lookup_rows(values: Sequence[float], costs: LookupCosts, gain: float) -> int:
    """Number of rows, whose values fall, that are `gain` times better than whatever else there is; 0 for none.

    Better is what brings the session the most tokens a microsecond, less what the others lose by its rows meanwhile.
    """
    best, found = costs.rival * gain, 0
    for count, (tokens, cost_us) in enumerate(_lookup_rounds(values, costs), start=1):
        speed = tokens / cost_us
        if speed > best:
            best, found = speed, count
    return found


def rows_to_verify(values: Sequence[float], correction: float, cost_us: Callable[[int], float]) -> int:
    """Number of rows of a tree, at least 1, the most valuable ones, whose round has the most tokens a microsecond.

    `correction` is the share of values that is kept, and cost_us what a round with so many rows costs.
    """
    best, found, tokens = 0.0, 1, 1.0
    for count, value in enumerate(sorted(values, reverse=True), start=1):
        tokens += correction * value
        speed = tokens / cost_us(count)
        if speed > best:
            best, found = speed, count
    return found
