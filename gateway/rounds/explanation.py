"""Explanations of choices for people: the case in a sentence, and what was compared. Pure.

Nothing here is made while a round runs. A choice holds the table that it was made from, and that is put into words
when a user asks: on the page for a round that has been, and in `outrider doctor --policy` for a session that would
begin now. It is plain dictionaries, because all of it becomes JSON.
"""

from collections.abc import Iterable, Set
from itertools import groupby
from typing import TypedDict

from gateway.rounds.choice import Case, Choice, GuessCandidate, LookupTable, Table, fastest
from gateway.rounds.costs import RoundCosts
from gateway.rounds.round import DrafterId
from gateway.rounds.tuning import PolicyTuning

REASONS = {
    Case.EXPLORING: "Too little is known of this drafter, and this session finds out what its guesses cost and bring.",
    Case.UNKNOWN: "What guesses cost is not known yet, and another session finds it out.",
    Case.OTHER: "It is the turn of a drafter that was not the fastest, because that may have changed.",
    Case.PROBE: "Guesses were not worth their cost, and it is time to look whether they are now.",
    Case.NOT_WORTH: "Guesses are not worth their cost at this load, so tokens are decoded plainly in long stretches.",
    Case.PLAIN_FASTER: "Of this session's own guesses too few are kept to be clearly faster than plain decoding.",
    Case.PLAIN_LOOK: "It is time to look what plain decoding costs, because guesses are measured by that.",
    Case.BEST: "No other number of guesses is expected to make as many tokens a second.",
    Case.LARGER_TREE: "The best tree says nothing of larger and deeper ones, so now and then one is looked at.",
    Case.FIXED: "The request itself names the number of guesses.",
    Case.NO_ROOM: "The answer has no room for a guess.",
    Case.LOOKUP: "What was found in a text beats whatever else there is, even less what its rows cost other sessions.",
}
NO_DRAFTER = "There is no drafter whose guesses could be worth their cost."
RESTS = "All sessions together were slower with guesses than without at this load, so there are none for a while."
NOT_YET = "Guesses are worth their cost, but sessions begin with them a few at a time, and this one waits."


def best_count(costs: RoundCosts, tuning: PolicyTuning) -> int:
    """K as it would be chosen now, for an observer on any thread; 0 says that plain decoding is faster."""
    estimates = costs.of(costs.usual_drafter)
    if not estimates.step_us.known:
        return tuning.first_guess
    round_us = {count: costs.round_us(costs.usual_drafter, count) for count in (0, *estimates.counts)}
    tokens = estimates.tokens()
    return max(round_us, key=lambda count: tokens[count] / round_us[count])


class CandidateFacts(TypedDict):
    """A number of guesses, and what a round with it is expected to bring and to take."""

    draft_count: int
    tokens: float
    round_us: float
    tokens_per_s: float


class DrafterFacts(TypedDict):
    """A drafter with its candidates; `makes` is chain or tree, `place` where it guesses."""

    drafter: str
    place: str
    makes: str
    is_worth: bool
    """Whether its guesses were worth their cost when costs were last looked at."""
    is_allowed: bool
    """Whether the session may begin with it: not too many do at once."""
    candidates: list[CandidateFacts]


class Explanation(TypedDict):
    """A choice in words and figures; None is what its case does not look at."""

    case: str
    reason: str
    draft_count: int
    drafter: str
    place: str
    makes: str
    plain_budget: int
    """Plain tokens that may come unasked."""
    plain_us: float | None
    """Cost of a token of plain decoding."""
    to_beat: float | None
    """Tokens a second of the best beside a lookup, which its rows had to beat."""
    row_price: float | None
    """Tokens that the other sessions lose for a row of a lookup."""
    drafters: list[DrafterFacts]


class Outlook(TypedDict):
    """What a policy knows now, and what it would choose for a new session, of which drafters are all that it knows."""

    acceptance_rate: float
    """Share of evaluated guesses that the target accepts, recent rounds first, of the drafter in use."""
    load: int
    """Sessions on the target, those of other gateways too."""
    plain_us: float
    row_price: float
    rest_tokens: float
    """Plain tokens of all sessions for which there are no guesses, because all were slower with them; 0 elsewhere."""
    choice: Explanation


def explained(choice: Choice) -> Explanation:
    """A choice, explained by the table that it was made from."""
    table, drafter = choice.table, choice.drafter
    plain_us = to_beat = row_price = None
    drafters: list[DrafterFacts] = []
    if isinstance(table, LookupTable):
        plain_us, row_price = table.costs.plain_us, table.costs.price
        to_beat = table.costs.rival * table.gain * 1e6
        drafters = _by_drafter(table.candidates, {drafter}, {drafter})
    elif table is not None:
        plain_us = next((each.cost_us for each in table.candidates if not each.draft_count), None)
        drafters = compared(table)
    return {
        "case": choice.case.name.lower(),
        "reason": reason(choice),
        "draft_count": choice.draft_count,
        "drafter": drafter.name,
        "place": drafter.place.value,
        "makes": drafter.makes.value,
        "plain_budget": choice.plain_budget,
        "plain_us": plain_us,
        "to_beat": to_beat,
        "row_price": row_price,
        "drafters": drafters,
    }


def compared(table: Table) -> list[DrafterFacts]:
    """The drafters of a table, each with the numbers of guesses that are compared."""
    return _by_drafter(table.candidates, table.worth, table.allowed)


def reason(choice: Choice) -> str:
    """The sentence of a choice's case."""
    table, case = choice.table, choice.case
    if case is Case.UNKNOWN and isinstance(table, Table) and not table.has_drafters:
        return NO_DRAFTER
    if case is Case.NOT_WORTH and isinstance(table, Table) and table.rest:
        return RESTS
    if case is Case.PLAIN_FASTER and isinstance(table, Table):
        best = fastest([each for each in table.candidates if each.draft_count])
        if best.drafter not in table.allowed:
            return NOT_YET
    return REASONS[case]


def _by_drafter(
    candidates: Iterable[GuessCandidate], worth: Set[DrafterId], allowed: Set[DrafterId]
) -> list[DrafterFacts]:
    """Candidates by drafter, without that for plain decoding, which is not a drafter's."""
    return [
        {
            "drafter": drafter.name,
            "place": drafter.place.value,
            "makes": drafter.makes.value,
            "is_worth": drafter in worth,
            "is_allowed": drafter in allowed,
            "candidates": [
                {
                    "draft_count": each.draft_count,
                    "tokens": each.tokens,
                    "round_us": each.cost_us,
                    "tokens_per_s": each.speed * 1e6,
                }
                for each in rows
                if each.draft_count
            ],
        }
        for drafter, rows in groupby(candidates, key=lambda each: each.drafter)
    ]
