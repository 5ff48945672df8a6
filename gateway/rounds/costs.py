"""Costs of rounds at the present load, and what guesses bring, of all drafters of a target. Pure.

Of the target see target_costs.py, of one drafter drafter_estimates.py. Here they are joined, and lookups are priced.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, takewhile
from operator import mul

from gateway.rounds.account import GuessAccount
from gateway.rounds.by_load import ByLoad
from gateway.rounds.choice import GuessCandidate, LookupCosts
from gateway.rounds.drafter_estimates import DrafterEstimates
from gateway.rounds.offers import FLOORS, LookupOffers
from gateway.rounds.round import ANY_DRAFT, LOOKUP, DrafterId, Makes, Place, Proposal, Round
from gateway.rounds.target_costs import TargetCosts, rows_of
from gateway.rounds.tuning import PolicyTuning
from outrider.estimates.acceptance import MAX_DRAFT_COUNT, AcceptanceRates


class SessionEstimates:
    """Estimates of one session, beside those of the pool: for each drafter that it may have."""

    def __init__(self, pools: Mapping[DrafterId, AcceptanceRates]) -> None:
        self.acceptance = {drafter: AcceptanceRates(pool) for drafter, pool in pools.items()}
        self.is_drafting = False

    @property
    def drafters(self) -> Collection[DrafterId]:
        return self.acceptance


class RoundCosts(TargetCosts):
    """What rounds cost and bring, learnt from all of them; what is known of one load is remembered."""

    def __init__(self, tuning: PolicyTuning) -> None:
        super().__init__(tuning)
        self.drafters: dict[DrafterId, DrafterEstimates] = {}
        self.offers = LookupOffers(tuning.offer_memory)
        self.account = GuessAccount(tuning)
        self.late = ByLoad()  # share of guesses that were to end a stretch and came too late for the next token
        self._rounds_since_trial = math.inf
        self._measured: dict[tuple[str, Place], Mapping[int, float]] = {}
        self._acceptance: dict[DrafterId, AcceptanceRates] = {}

    def share_acceptance(self, other: "RoundCosts") -> None:
        """Learns together with another target of the same model how often guesses are right; before anything else."""
        self._acceptance = other._acceptance

    def begin(self, target: Mapping[int, float], drafters: Mapping[DrafterId, Mapping[int, float]]) -> None:
        """Begins with microseconds of forwards by rows, as services measured them before; what is known stays."""
        if not self.verify_us.known:
            self.verify_us.begin(target)
        for drafter, costs in drafters.items():
            self._measured[drafter.name, drafter.place] = costs
        for drafter, estimates in self.drafters.items():
            if not estimates.step_us.known:
                estimates.step_us.begin(self._measured.get((drafter.name, drafter.place), {}))

    def of(self, drafter: DrafterId) -> DrafterEstimates:
        """Estimates of a drafter, which begin when it is first asked about."""
        estimates = self.drafters.get(drafter)
        if estimates is None:
            acceptance = self._acceptance.setdefault(drafter, AcceptanceRates())
            estimates = self.drafters[drafter] = DrafterEstimates(self, drafter.makes, acceptance)
            if drafter.makes is Makes.AHEAD:
                estimates.share_with(self.of(drafter._replace(makes=Makes.CHAIN)))
            else:
                estimates.step_us.begin(self._measured.get((drafter.name, drafter.place), {}))
        return estimates

    def is_known(self, drafter: DrafterId) -> bool:
        """Whether it is known what a step of a drafter costs."""
        return self.of(drafter).step_us.known

    def known(self, drafters: Iterable[DrafterId]) -> list[DrafterId]:
        """Drafters of which it is known what a step costs."""
        return [drafter for drafter in drafters if self.is_known(drafter)]

    @property
    def usual_drafter(self) -> DrafterId:
        """The drafter that was asked about first: where a session may have several, that in use."""
        return next(iter(self.drafters), ANY_DRAFT)

    def round_us(self, drafter: DrafterId, draft_count: int) -> float:
        """Expected microseconds of a round with K draft tokens, if all sessions had such rounds at the present load.

        For K = 0 of a token of plain decoding.
        """
        return self.of(drafter).round_us(draft_count) if draft_count else self.plain_us

    def verified_us(self, proposal: Proposal, count: int) -> float:
        """Expected microseconds of a round with so many rows of a proposal, now that its drafter has been paid."""
        spent_us = max(proposal.hop.wait_us, proposal.compute_us) + self.plain.asked_overhead_us(self.load)
        return max(spent_us + self.of(proposal.learner).shared_us(count), 1.0)

    def looked_up(self, most: int, best: GuessCandidate | None, price: float, *, halts: bool) -> LookupCosts:
        """Costs of a round with up to so many rows of a lookup, beside the best that drafters can do.

        `price` is what a row costs all sessions, in tokens, and `halts` says that a stretch is ended for it.
        """
        load, others = self.load, self.load - 1
        price *= others / load
        rows = 1.0 + max(others, self.rows.mean * others / load)
        overhead_us = self.plain.asked_overhead_us(load)
        # No session makes the others wait for long: a forward that is shared is hardly longer than without its rows.
        longest_us = self.tuning.most_wait * self.verify_us.at(load) if others else math.inf
        more_us = map(self.verify_us.at, (rows + each for each in range(1, most + 1)))
        verify_us = (self.verify_us.at(rows), *takewhile(lambda us: us <= longest_us, more_us))
        round_us = [max(us + overhead_us, 1.0) for us in verify_us]
        plain_us = max(self.verify_us.at(rows) + self.plain.overhead_us(load), 1.0)
        rival = 1 / plain_us
        if best is not None:
            rival = max(rival, (best.tokens - price * best.draft_count) / best.cost_us)
        return LookupCosts(round_us, plain_us, price, rival, self.late.at(load) if halts else 0.0)

    def row_price(self, best: GuessCandidate | None) -> float:
        """Price of a row in tokens: if all sessions take what lookups offer above it, and nothing below, all together
        are fastest. 1 where that makes them hardly faster than nothing of it.

        Elsewhere they do the best that drafters can, or decode plainly where that is faster. One session's rows cost
        all a little time; those of all cost much, because every session has what is worth it to itself alone.
        """
        load, overhead_us, plain_us = self.load, self.plain.asked_overhead_us(self.load), self.plain_us
        tokens, base_rows, base_us = 1.0, 1.0, plain_us
        if best is not None and best.speed * plain_us > 1:
            tokens, base_rows, base_us = best.tokens, 1.0 + best.draft_count, best.cost_us
        forward_us, price = self.verify_us.at(load * base_rows), 1.0
        # What is known of costs is known within some hundredths, and searching takes time of the gateway's too.
        fastest = tokens / base_us * (1.0 if load == 1 else self.tuning.worth_looking)
        for floor, offer in zip(reversed(FLOORS), reversed(self.offers.above()), strict=True):
            if not offer.share:
                continue
            # Rounds for a token, with a lookup's guesses and without.
            looks, others = offer.share / offer.tokens, (1 - offer.share) / tokens
            rows = (looks * (1 + offer.rows) + others * base_rows) / (looks + others)
            # Forwards without a lookup cost what they did: a table is no line, and rows come many at once.
            none = (others / (looks + others)) ** load
            rows = load * (rows - none * base_rows) / (1 - none)
            looked_us = none * forward_us + (1 - none) * self.verify_us.at(rows)
            # A little more than the table says: near the best price all are about as fast, and fewer rows are sure.
            verify_us = forward_us + self.tuning.dear_rows * (looked_us - forward_us)
            spent_us = looks * (verify_us + overhead_us) + others * (base_us - forward_us + verify_us)
            if spent_us * fastest < 1 - 1e-9:
                price, fastest = floor, 1 / max(spent_us, 1e-9)
        return price

    def lost_us(self, committed: Round) -> float:
        """Microseconds that a round cost all sessions above plain decoding."""
        rows = rows_of(committed)
        # Of the other sessions each had to wait for the rows of the guesses.
        without_us = self.verify_us.at(rows - committed.draft_count)
        waited_us = (self.load - 1) * max(0.0, self.verify_us.at(rows) - without_us)
        return committed.round_us - len(committed.token_ids) * self.plain_us + waited_us

    def valued(self, proposal: Proposal) -> Proposal:
        """The proposal with values for its rows: those of a chain that has none are what its drafter's rates say."""
        tree = proposal.tree
        if not tree or tree.values or tree.distributions:
            return proposal
        reached = [*accumulate(self.of(proposal.drafter).acceptance.rates, mul)]
        values = tuple(reached[min(depth, MAX_DRAFT_COUNT) - 1] for depth in tree.depths[1:])
        return replace(proposal, tree=replace(tree, values=values))

    def observe(
        self,
        committed: Round,
        session: SessionEstimates | None,
        *,
        unasked: bool,
        is_trial: bool,
        num_sessions: int,
        num_drafting: int,
    ) -> None:
        """Learns from a round, while so many sessions are at work here, of which some draft.

        What guesses lose that are made to find something out is no sign that those which are wanted are not worth it.
        """
        self._rounds_since_trial = 0 if is_trial else self._rounds_since_trial + 1
        proposal, is_usual = committed.proposal, 2 * num_drafting >= num_sessions
        if self.observe_forward(committed, num_sessions):
            if committed.ahead is not None:
                self.of(committed.ahead.drafter).observe_ahead(committed, committed.ahead, is_usual=is_usual)
            else:
                self.plain.observe(committed, self.load, self.num_rounds, unasked=unasked)
            if self._rounds_since_trial > 2 * self.load:
                is_pure = committed.ahead is None and self.plain.is_pure(committed, self.load)
                num_tokens = len(committed.token_ids)
                self.account.observe(self.load, committed.round_us, num_tokens, self.plain_us, is_pure=is_pure)
            if committed.ahead is None and committed.draft_count and proposal.drafter != LOOKUP:
                own_rows = num_drafting * committed.draft_count + max(num_sessions, 1)
                share = rows_of(committed) * max(num_sessions, 1) / (own_rows * self.load)
                # What one session finds among others that decode plainly is not what all would find, and neither is
                # what it finds beside the rows of a lookup.
                is_usual = is_usual and share < self.tuning.most_share
                estimates = self.of(proposal.learner)
                estimates.observe_round(committed, share, unasked=unasked, is_usual=is_usual)
        self._observe_acceptance(committed, session)
        self.num_rounds += 1

    def _observe_acceptance(self, committed: Round, session: SessionEstimates | None) -> None:
        """Learns how many guesses of a drafter are accepted."""
        proposal, verdict = committed.proposal, committed.verdict
        if not committed.draft_count or proposal.drafter == LOOKUP:
            return
        estimates = self.of(proposal.learner)
        own = session.acceptance.get(proposal.learner) if session else None
        for acceptance in (estimates.acceptance, *([own] if own else [])):
            acceptance.observe(committed.accepted_count, verdict.evaluated_count)
        for part in proposal.parts:
            # What each would have been worth alone, as far as the tokens show.
            right = len(part.tree.follow(committed.token_ids))
            tested = min(right + 1, max(part.tree.depths), len(committed.token_ids))
            self.of(part.drafter).acceptance.observe(right, tested)
        if estimates.gains is not None:
            estimates.gains.observe(proposal.tree.values, committed.accepted_count)
