"""Policy of K, the number of tokens to draft: it joins what rounds cost, what is to be explored, and the choice. Pure.

The best K has the most tokens a microsecond when all sessions take it, which is the goodput of the whole device; see
costs.py for what is compared, choice.py for how, and exploration.py for what is tried beside it.

One policy serves all requests of a gateway to a target, because they share the machines that it measures.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Self

from gateway.rounds.choice import (
    Case,
    Choice,
    GuessCandidate,
    LookupTable,
    Table,
    choose,
    fastest,
    lookup_rows,
    rows_to_verify,
)
from gateway.rounds.costs import RoundCosts, SessionEstimates
from gateway.rounds.exploration import Exploration
from gateway.rounds.round import LOOKUP, DrafterId, Makes, Place, Proposal, Round
from gateway.rounds.tuning import TUNING, PolicyTuning
from outrider.estimates.acceptance import AcceptanceRates


@dataclass(slots=True)
class _Tables:
    """What is known of a load; it holds for some rounds, because it takes long to compute."""

    load: int
    round_us: dict[DrafterId, Mapping[int, float]] = field(default_factory=dict)
    """Costs of rounds by drafter and K."""
    branch_counts: dict[tuple[DrafterId, int], int] = field(default_factory=dict)
    """Numbers of branches by drafter and K."""
    row_price: float | None = None
    """Price of a row for a lookup."""
    num_rounds: int = 0
    """Rounds that were observed since then."""


class SpeculationPolicy:
    """Learns from every round of the gateway; `choose` answers for one round of one session."""

    def __init__(self, numerics_id: str = "", tuning: PolicyTuning = TUNING) -> None:
        """With numerics, rounds of another target, to which a session has moved, teach nothing."""
        self.tuning = tuning
        self.address = ""
        """Address of its target."""
        self._numerics_id = numerics_id
        self.costs = RoundCosts(tuning)
        self._exploration = Exploration(self.costs, tuning)
        self._sessions: dict[SessionEstimates, None] = {}
        self._others = 0
        """Sessions of other gateways on the target, by its last verdict."""
        self._num_drafting = 0
        self._tables = _Tables(self.costs.load)

    def session(self, *drafters: DrafterId) -> SessionEstimates:
        """A session that may have these drafters, of which it begins with what is known of all."""
        return SessionEstimates({each: self.costs.of(each).acceptance for each in drafters})

    def change(self, session: SessionEstimates, *drafters: DrafterId) -> None:
        """The session may have other drafters from now on."""
        session.acceptance = {
            each: session.acceptance.get(each) or AcceptanceRates(self.costs.of(each).acceptance) for each in drafters
        }

    def pick(self, drafters: Sequence[DrafterId]) -> DrafterId:
        """Drafter of those that a target has in its process that a session should have; it has one until its end."""

        def speed(drafter: DrafterId) -> float:
            # With its chains, or with its trees where it has made some.
            kinds = [kind for kind in (drafter._replace(makes=each) for each in Makes) if kind in self.costs.drafters]
            return max(self._best(each, None).speed for each in self.costs.known(kinds) or [drafter])

        return self._exploration.pick(drafters, speed)

    def enter(self, session: SessionEstimates) -> None:
        """A session is at work until it leaves, and counts at once: many may begin before the target says so."""
        self._sessions[session] = None
        self.costs.load = max(1, self._others + len(self._sessions))
        if self.costs.load != self._tables.load:
            self._tables = _Tables(self.costs.load)

    def leave(self, session: SessionEstimates) -> None:
        """A session has ended; without an effect for one that has left."""
        if session in self._sessions:
            self.mark(session, is_drafting=False)
            del self._sessions[session]
            self._exploration.leave(session)
            # Tables are made anew with the next round, because another session often takes its place at once.
            self.costs.load = max(1, self._others + len(self._sessions))

    def mark(self, session: SessionEstimates, *, is_drafting: bool) -> None:
        """A session drafts from now on, or does not."""
        self._num_drafting += is_drafting - session.is_drafting
        session.is_drafting = is_drafting

    def observe(
        self, committed: Round, session: SessionEstimates | None = None, *, unasked: bool, is_trial: bool = False
    ) -> None:
        """Learns from a round that is not a session's first one; unasked ones came without a message from here.

        Guesses of a trial were made to find something out.
        """
        verdict = committed.verdict
        if self._numerics_id and (self._numerics_id, self.address) != (verdict.numerics_id, verdict.address):
            return
        proposal, num_sessions = committed.proposal, len(self._sessions)
        self.costs.observe(
            committed,
            session,
            unasked=unasked,
            is_trial=is_trial,
            num_sessions=num_sessions,
            num_drafting=self._num_drafting,
        )
        is_drafted = committed.draft_count > 0 and proposal.drafter != LOOKUP
        if is_drafted:
            self._exploration.drafted(proposal.learner, num_sessions)
        if unasked and not committed.draft_count:
            self._exploration.decoded_plainly(self.costs.plain_us if self._exploration.owes else 0.0)
        elif is_drafted and not self.is_worth(proposal.learner):
            # What guesses have lost before that was known is no reason to look at them the more seldom.
            self._exploration.pay(max(self.costs.lost_us(committed), self.tuning.probe_loss * committed.round_us))
        elif proposal.fallback_reason:
            self._exploration.pay(self.costs.lost_us(committed))
        self._others = self.costs.load - num_sessions
        self._tables.num_rounds += 1
        if self.costs.load != self._tables.load:
            self._tables = _Tables(self.costs.load, num_rounds=1)
        elif self._tables.num_rounds >= self.tuning.table_rounds * self.costs.load:
            self._tables = _Tables(self.costs.load)

    def choose(self, limit: int, session: SessionEstimates | None = None, *, ready: bool = True) -> Choice:
        """The best K in [0, limit], or now and then one that keeps the estimates of the other side alive.

        Only a session that is ready, so that it carries the choice out at once, uses such an opportunity up: one that
        ends before its turn must not take it from the others.
        """
        most = min(limit, self.tuning.tree_counts[-1])
        choice = Choice(0, case=Case.NO_ROOM)
        if most > 0:
            choice = choose(self._table(most, session, is_ready=ready), self.tuning)
        if ready:
            self._exploration.begin(choice, session)
            if session is not None:
                self.mark(session, is_drafting=choice.draft_count > 0)
        return choice

    def _table(self, most: int, session: SessionEstimates | None, *, is_ready: bool) -> Table:
        """Everything that a choice for a session depends on now."""

        def hope(drafter: DrafterId) -> float:
            # How many times as fast as plain decoding guesses may be, if what was seen of them was bad luck.
            if drafter.makes is Makes.TREE or drafter not in self._tables.round_us:
                return 0.0
            return _gain(self.costs.of(drafter).acceptance.hoped(), self._tables.round_us[drafter])

        exploration = self._exploration
        drafters = list(session.drafters) if session else [self.costs.usual_drafter]
        known = self.costs.known(drafters)
        # First, because they are what guesses are judged by.
        candidates = tuple(each for drafter in known for each in self.candidates(drafter, most, session))
        exploring = exploration.unknown(drafters, session, hope)
        trials = {drafter: exploration.trials[drafter] for drafter in known}
        # Where guesses look so little faster than plain decoding, that must be seen first.
        is_unsure = bool(candidates) and not self.costs.knows_plain
        gain = max(each.speed for each in candidates) * self.costs.plain_us if is_unsure else 0.0
        num_drafting = 0 if session is None or session.is_drafting else self._num_drafting
        return Table(
            candidates,
            most,
            is_ready,
            exploring,
            bool(drafters),
            exploration.other_turn,
            exploration.is_probe_due,
            exploration.is_plain_due,
            least_gain=self.tuning.margin(self.costs.load).keeping,
            rest=self.rest,
            needs_plain=1.0 < gain < self.tuning.sure_gain,
            worth=frozenset(filter(self.is_worth, known)),
            allowed=frozenset(drafter for drafter in known if num_drafting < trials[drafter].allowed),
            looks_ahead=frozenset(
                drafter
                for drafter in known
                if (gains := self.costs.of(drafter).gains) and gains.num_promises % self.tuning.look_ahead_rounds == 0
            ),
        )

    def is_worth(self, drafter: DrafterId) -> bool:
        """Whether guesses of a drafter were worth it when costs were last looked at; never during a rest."""
        return not self.rest and self._exploration.trials[drafter].is_worth

    @property
    def rest(self) -> float:
        """Plain tokens for which there should be no guesses, because all sessions together were slower with them."""
        return self.costs.account.rest(self.costs.load)

    def candidates(
        self, drafter: DrafterId, most: int, session: SessionEstimates | None = None
    ) -> list[GuessCandidate]:
        """Numbers of guesses of a drafter up to the most, from 0, with what they cost and bring a session."""
        own = session.acceptance.get(drafter) if session else None
        estimates, costs = self.costs.of(drafter), self._tables.round_us.get(drafter)
        if costs is None:
            costs = {count: self.costs.round_us(drafter, count) for count in (0, *estimates.counts)}
            self._tables.round_us[drafter] = costs
            gain = _gain(estimates.tokens(), costs)
            margin = self.tuning.margin(self.costs.load)
            self._exploration.trials[drafter].judge(gain, margin, is_sure=self.costs.knows_plain)
        tokens, first_depth = estimates.tokens(own), self.tuning.first_tree[1]
        acceptance, first_places = estimates.acceptance, self.tuning.first_places
        depths = estimates.depths if drafter.makes is Makes.TREE else dict.fromkeys(estimates.counts, 0)
        if drafter.place is Place.HOSTED and not estimates.gains and acceptance.tested_depth < first_places:
            # What rounds of a draft service have cost is remembered by K, so there the first K must be a middling one.
            most = min(most, first_places)
        return [
            GuessCandidate(drafter, count, tokens[count], costs[count], depths.get(count, first_depth))
            for count in (0, *estimates.counts)
            if count <= most
        ]

    def branch_count(self, drafter: DrafterId, draft_count: int) -> int:
        """Number of branches to ask for beside so many guesses; it holds as long as the costs of rounds do."""
        count = self._tables.branch_counts.get((drafter, draft_count))
        if count is None:
            count = self._tables.branch_counts[drafter, draft_count] = self.costs.of(drafter).branch_count(draft_count)
        return count

    def choose_lookup(self, values: Sequence[float], session: SessionEstimates, *, halts: bool) -> Choice | None:
        """The rows of a lookup, whose values fall, that are worth more than whatever else there is; None for none.

        `halts` says that a stretch of unasked tokens would have to be ended for it.
        """
        if values[0] <= self.least_value(session):
            return None
        # Guesses that are not worth it are no rival.
        known = [each for each in self.costs.known(session.drafters) if self.is_worth(each)]
        values = values[: self.tuning.tree_counts[-1]]
        best = max((self._best(each, session) for each in known), key=lambda each: each.speed, default=None)
        costs = self.costs.looked_up(len(values), best, self.row_price(session), halts=halts)
        table = LookupTable(values[: len(costs.round_us) - 1], costs, self.tuning.halt_gain if halts else 1.0)
        found = lookup_rows(*table)
        count = found if self.costs.verify_us.known else min(found, self.tuning.first_guess)
        return Choice(count, drafter=LOOKUP, case=Case.LOOKUP, table=table) if count else None

    def least_value(self, session: SessionEstimates) -> float:
        """Value that rows of a lookup must be above to be worth anything to all; infinite where none can be."""
        load = self.costs.load
        if self.rest:
            return math.inf
        if load == 1:
            return 0.0
        price = self.row_price(session)
        return price * (load - 1) / load if price < 1 else math.inf

    def row_price(self, session: SessionEstimates) -> float:
        """Price of a row for a lookup, in tokens that all sessions lose; it holds as long as the costs of rounds do."""
        if self._tables.row_price is None:
            bests = [self._best(each, None) for each in self.costs.known(session.drafters)]
            self._tables.row_price = self.costs.row_price(max(bests, key=lambda each: each.speed, default=None))
        return self._tables.row_price

    def cut_count(self, proposal: Proposal) -> int:
        """Number of rows of a tree, the most valuable ones, to be verified, now that its drafter has been paid."""
        gains = self.costs.of(proposal.learner).gains
        correction = 1.0 if gains is None else gains.correction
        return rows_to_verify(proposal.tree.values, correction, lambda count: self.costs.verified_us(proposal, count))

    def copied(self) -> Self:
        """A copy for an observer: a question also notes costs and what is due, so that asking this one changes it."""
        return deepcopy(self, {id(each): each for each in (self.tuning, *self._sessions)})

    def _best(self, drafter: DrafterId, session: SessionEstimates | None) -> GuessCandidate:
        """The number of guesses of a drafter that makes the most tokens a microsecond."""
        return fastest(self.candidates(drafter, self.tuning.tree_counts[-1], session)[1:])


def _gain(tokens: Sequence[float], round_us: Mapping[int, float]) -> float:
    """How many times as fast as plain decoding the best number of guesses is, by what each brings and costs."""
    return max(tokens[count] / us for count, us in round_us.items() if count) * round_us[0]
