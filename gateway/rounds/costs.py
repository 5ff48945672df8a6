"""Costs of rounds at the present load, and what guesses bring, as far as rounds have shown. Pure.

With acceptance rate a(d) of the d-th guess a round with K guesses commits tau(K) = 1 + a(1) + a(1)a(2) + ... tokens
(Leviathan et al. 2023 for a constant a), and it costs K draft steps, one forward of the target, and the way of the
messages. Forwards are shared: with N sessions on the target, plain decoding costs each of them the forward of N rows,
and rounds with K guesses one of up to N (K + 1) rows, so that one more row is paid by everybody. The cost of a forward
is a table over its rows and no line: it is a staircase on CPUs, and flat up to the tiles of an accelerator.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from gateway.rounds.branching import COUNTS, mean_acceptance, missed_share, most_within
from gateway.rounds.by_load import ByLoad
from gateway.rounds.choice import GuessCandidate, LookupCosts
from gateway.rounds.offers import FLOORS, LookupOffers
from gateway.rounds.plain import PlainCosts
from gateway.rounds.round import (
    ANY_DRAFT,
    LOOKUP,
    AheadRound,
    BranchOutcome,
    DrafterId,
    GuessRequest,
    Makes,
    Place,
    Proposal,
    Round,
)
from gateway.rounds.tuning import PolicyTuning
from outrider.estimates.acceptance import (
    FIRST_WEIGHT,
    MAX_DRAFT_COUNT,
    MAX_TREE_ROWS,
    AcceptanceRates,
    GuessTally,
    TreeGains,
)
from outrider.estimates.row_costs import Average, RowCosts


class DrafterEstimates:
    """Estimates of one drafter, or of the trees that it makes."""

    def __init__(self, counts: tuple[int, ...], makes: Makes, verify_us: RowCosts) -> None:
        """The cost of a draft's rows is like that of the target's until more is known."""
        self.counts = counts
        """Numbers of guesses that are looked at."""
        self.acceptance = AcceptanceRates()
        self.gains = TreeGains() if makes is Makes.TREE else None
        self.levels = RowCosts()  # by the guesses of a tree that were asked for, the forwards that they took
        self.has_depths = False  # whether trees are asked for with a depth, which then is their forwards
        self.depths: dict[int, int] = {}  # the best one by the guesses that are asked for
        self.recent_count = Average()  # guesses of a round, while most sessions have some
        self.width = Average()  # rows of a session in each
        self.step_us = RowCosts(verify_us)
        self.overhead_us = ByLoad()  # of a round, beside both computations
        # Rows of a forward, of those that all sessions together have: 1 where all are verified at the same time, a half
        # where two groups take turns, of which one drafts while the other is verified.
        self.share = ByLoad()
        # By K, what rounds have cost in fact when most sessions had some: how groups form cannot be foretold.
        # Of trees by the forwards that made them too.
        self.round_us: defaultdict[tuple[int, int], ByLoad] = defaultdict(ByLoad)
        self.is_unasked = False  # its rounds come without a message from here, but for the first of a stretch
        # Of branches that were there in time: misses that were expected, and those that came.
        self.misses = GuessTally()
        self.round_tokens: defaultdict[int, ByLoad] = defaultdict(ByLoad)  # of rounds after branches, by K

    def tokens(self, own: AcceptanceRates | None = None) -> Sequence[float]:
        """Tokens that a round with K guesses is expected to commit, by K; `own` are the rates of one session."""
        if self.gains is None:
            return (own or self.acceptance).tokens()
        depths = (self.depths.get(count, MAX_DRAFT_COUNT) for count in range(MAX_TREE_ROWS + 1))
        return [self.gains.at(count, depth) for count, depth in enumerate(depths)]


class SessionEstimates:
    """Estimates of one session, beside those of the pool: for each drafter that it may have."""

    def __init__(self, pools: Mapping[DrafterId, AcceptanceRates]) -> None:
        self.acceptance = {drafter: AcceptanceRates(pool) for drafter, pool in pools.items()}
        self.is_drafting = False

    @property
    def drafters(self) -> Collection[DrafterId]:
        return self.acceptance


class RoundCosts:
    """What rounds cost and bring, learnt from all of them; what is known of one load is remembered."""

    def __init__(self, tuning: PolicyTuning) -> None:
        self.drafters: dict[DrafterId, DrafterEstimates] = {}
        self.verify_us = RowCosts()
        self.load = 1  # sessions on the target, those of other gateways too
        self.most_branches = 0  # of a session, as the gateway was set
        self.num_rounds = 0
        self._tuning = tuning
        self._measured: dict[tuple[str, Place], Mapping[int, float]] = {}
        self._rows = Average()  # of the target's forwards
        self._forward = (0.0, 0)  # rows and microseconds of the target's last one
        self._num_repeats = 0  # verdicts of it after the first one
        self._rounds_since_prompt = math.inf
        self.plain = PlainCosts(self.verify_us, tuning)
        self.offers = LookupOffers(tuning.offer_memory)
        self.late = ByLoad()  # share of guesses that were to end a stretch and came too late for the next token

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
            counts = self._tuning.tree_counts if drafter.makes is Makes.TREE else self._tuning.chain_counts
            estimates = self.drafters[drafter] = DrafterEstimates(counts, drafter.makes, self.verify_us)
            if drafter.makes is Makes.AHEAD:
                # Its guesses are those of the same drafter's chains.
                chains = self.of(drafter._replace(makes=Makes.CHAIN))
                estimates.acceptance, estimates.step_us = chains.acceptance, chains.step_us
                estimates.overhead_us = chains.overhead_us
                return estimates
            estimates.step_us.begin(self._measured.get((drafter.name, drafter.place), {}))
        return estimates

    def is_known(self, drafter: DrafterId) -> bool:
        """Whether it is known what a step of a drafter costs."""
        return self.of(drafter).step_us.known

    def known(self, drafters: Iterable[DrafterId]) -> list[DrafterId]:
        """Drafters of which it is known what a step costs."""
        return [drafter for drafter in drafters if self.is_known(drafter)]

    @property
    def knows_plain(self) -> bool:
        """Whether it was seen what plain decoding costs at this load; alone it is what a forward costs."""
        return self.load == 1 or self.plain.is_known(self.load, self.num_rounds)

    @property
    def usual_drafter(self) -> DrafterId:
        """The drafter that was asked about first: where a session may have several, that in use."""
        return next(iter(self.drafters), ANY_DRAFT)

    def round_us(self, drafter: DrafterId, draft_count: int) -> float:
        """Expected microseconds of a round with K draft tokens, if all sessions had such rounds at the present load.

        For K = 0 of a token of plain decoding. Where the target takes turns with groups of sessions, a round takes at
        least the forwards of all, and drafting is hidden by them.
        """
        load = self.load
        if not draft_count:
            return self.plain.token_us(load, self.num_rounds)
        estimates = self.of(drafter)
        if drafter.makes is Makes.AHEAD:
            return self._ahead_us(estimates, draft_count, self.branch_count(drafter, draft_count))
        share, overhead_us = self._share(estimates), self._overhead_us(estimates)
        width = 1.0 if estimates.gains is None else max(1.0, estimates.width.mean)
        step_us = estimates.step_us.at(max(width, share * load * width))
        verify_us = self._shared_us(estimates, draft_count)
        num_steps, levels, gains = float(draft_count), 0, estimates.gains
        if gains is not None:
            fixed_us = max(verify_us + overhead_us, 1.0)
            if estimates.has_depths:
                # The best depth of trees of so many rows.
                depths = range(1, MAX_DRAFT_COUNT + 1)
                levels = max(depths, key=lambda depth: gains.at(draft_count, depth) / (fixed_us + depth * step_us))
                estimates.depths[draft_count] = levels
            num_steps = levels or estimates.levels.at(draft_count) or num_steps
        draft_us = num_steps * step_us
        # Groups are of unequal size, and most answers come from the larger ones.
        num_groups = 1 if share > self._tuning.one_group else 2
        model_us = max(draft_us + verify_us + overhead_us, num_groups * verify_us, 1.0)
        if estimates.is_unasked:
            # How long such a round took here says nothing, because its verdict may have waited for its reader.
            return model_us
        return estimates.round_us[draft_count, levels].blend(load, model_us, self.num_rounds, self._tuning)

    def is_plain_on_miss(self, drafter: DrafterId, draft_count: int) -> bool:
        """Whether a target does better to go on with a plain token than to wait for guesses, where no branch fits.

        Among others it has a forward to make anyway.
        """
        estimates = self.of(drafter)
        lost_us = self.verify_us.at(1.0) * (1 - 1 / max(estimates.tokens()[draft_count], 1.0))
        wait_us = draft_count * estimates.step_us.at(1.0) + self._overhead_us(estimates)
        return self.load > 1 or lost_us < wait_us

    def branch_limit(self, draft_count: int) -> int:
        """Most branches of a session with K guesses: as the gateway was set, and so many that messages stay small.

        All sessions together have no more than an accelerator makes at the price of one.
        """
        tuning = self._tuning
        limits = self.most_branches, most_within(tuning.branch_bytes, draft_count), tuning.branch_rows // self.load
        return max(1, min(limits))

    def branch_count(self, drafter: DrafterId, draft_count: int) -> int:
        """The number of branches of a session that makes rounds with K guesses the shortest, or hardly longer.

        One more is there for the likeliest outcome that has none, and costs each step of the draft a row of every
        session.
        """
        estimates, most = self.of(drafter), self.branch_limit(draft_count)
        counts = [*(each for each in COUNTS if each < most), most]
        round_us = {count: self._branches_us(estimates, draft_count, count) for count in counts}
        near_us = self._tuning.same_cost * min(round_us.values())
        return max(count for count, us in round_us.items() if us <= near_us)

    def _ahead_us(self, estimates: DrafterEstimates, draft_count: int, branch_count: int) -> float:
        """Expected microseconds in which a drafter that runs ahead brings what K guesses bring.

        What such rounds have taken and brought in fact, misses too, counts the more, the more of them there were.
        """
        load, tuning, tokens = self.load, self._tuning, estimates.tokens()[draft_count]
        model_us = self._branches_us(estimates, draft_count, branch_count)
        taken_us = estimates.round_us[draft_count, 0].blend(load, model_us, self.num_rounds, tuning)
        brought = estimates.round_tokens[draft_count].blend(load, tokens, self.num_rounds, tuning)
        return max(taken_us * tokens / max(brought, 1.0), 1.0)

    def _branches_us(self, estimates: DrafterEstimates, draft_count: int, branch_count: int) -> float:
        """Expected microseconds of a round with K guesses before which each session had so many branches.

        On a hit it takes the target's forward, or as long as branches take, all steps of them and the ways. Else the
        draft guesses first, in steps that have the branches of the others.
        """
        load, rates = self.load, estimates.acceptance.rates
        verify_us, overhead_us = self._shared_us(estimates, draft_count), self._overhead_us(estimates)
        step_us = estimates.step_us
        hit_us = max(verify_us, (draft_count + 1) * step_us.at(load * branch_count) + overhead_us)
        miss_us = verify_us + draft_count * step_us.at(load + (load - 1) * branch_count) + overhead_us
        missed = missed_share(mean_acceptance(rates, draft_count), draft_count, branch_count)
        missed = min(1.0, missed * estimates.misses.share(1.0, FIRST_WEIGHT))
        return (1 - missed) * hit_us + missed * miss_us

    def verified_us(self, proposal: Proposal, count: int) -> float:
        """Expected microseconds of a round with so many rows of a proposal, now that its drafter has been paid."""
        spent_us = max(proposal.hop.wait_us, proposal.compute_us) + self.plain.asked_overhead_us(self.load)
        return max(spent_us + self._shared_us(self.of(proposal.learner), count), 1.0)

    def looked_up(self, most: int, best: GuessCandidate | None, price: float, *, halts: bool) -> LookupCosts:
        """Costs of a round with up to so many rows of a lookup, beside the best that drafters can do.

        `price` is what a row costs all sessions, in tokens, and `halts` says that a stretch is ended for it.
        """
        load, others = self.load, self.load - 1
        price *= others / load
        rows = 1.0 + max(others, self._rows.mean * others / load)
        overhead_us = self.plain.asked_overhead_us(load)
        round_us = [max(self.verify_us.at(rows + count) + overhead_us, 1.0) for count in range(most + 1)]
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
        load, overhead_us, plain_us = self.load, self.plain.asked_overhead_us(self.load), self.round_us(ANY_DRAFT, 0)
        tokens, base_rows, base_us = 1.0, 1.0, plain_us
        if best is not None and best.speed * plain_us > 1:
            tokens, base_rows, base_us = best.tokens, 1.0 + best.draft_count, best.cost_us
        forward_us, price = self.verify_us.at(load * base_rows), 1.0
        # What is known of costs is known within some hundredths, and searching takes time of the gateway's too.
        fastest = tokens / base_us * (1.0 if load == 1 else self._tuning.worth_looking)
        for floor, offer in zip(reversed(FLOORS), reversed(self.offers.above()), strict=True):
            if not offer.share:
                continue
            # Rounds for a token, with a lookup's guesses and without.
            looks, others = offer.share / offer.tokens, (1 - offer.share) / tokens
            rows = (looks * (1 + offer.rows) + others * base_rows) / (looks + others)
            # A little more than the table says: near the best price all are about as fast, and fewer rows are sure.
            verify_us = forward_us + self._tuning.dear_rows * (self.verify_us.at(load * rows) - forward_us)
            spent_us = looks * (verify_us + overhead_us) + others * (base_us - forward_us + verify_us)
            if spent_us * fastest < 1 - 1e-9:
                price, fastest = floor, 1 / max(spent_us, 1e-9)
        return price

    def lost_us(self, committed: Round) -> float:
        """Microseconds that a round cost all sessions above plain decoding."""
        rows = _rows_of(committed)
        # Of the other sessions each had to wait for the rows of the guesses.
        without_us = self.verify_us.at(rows - committed.draft_count)
        waited_us = (self.load - 1) * max(0.0, self.verify_us.at(rows) - without_us)
        return committed.round_us - len(committed.token_ids) * self.round_us(ANY_DRAFT, 0) + waited_us

    def valued(self, proposal: Proposal) -> Proposal:
        """The proposal with values for its rows: those of a chain that has none are what its drafter's rates say."""
        tree = proposal.tree
        if not tree or tree.values or tree.distributions:
            return proposal
        reached = [*accumulate(self.of(proposal.drafter).acceptance.rates, mul)]
        values = tuple(reached[min(depth, MAX_DRAFT_COUNT) - 1] for depth in tree.depths[1:])
        return replace(proposal, tree=replace(tree, values=values))

    def observe_tree(self, proposal: Proposal, asked: GuessRequest) -> None:
        """Learns from a tree as it came, before any of its rows were left out."""
        estimates, max_depth = self.of(proposal.learner), asked.shape.max_depth if asked.shape else 0
        if estimates.gains is not None and proposal.tree:
            estimates.gains.promise(proposal.tree, asked.count, max_depth or MAX_DRAFT_COUNT)
            estimates.levels.add(asked.count, max(proposal.forward_count, 1))
            estimates.has_depths = estimates.has_depths or max_depth > 0

    def observe(
        self,
        committed: Round,
        session: SessionEstimates | None,
        *,
        unasked: bool,
        num_sessions: int,
        num_drafting: int,
    ) -> None:
        """Learns from a round, while so many sessions are at work here, of which some draft."""
        proposal, verdict = committed.proposal, committed.verdict
        self.load = max(verdict.session_count, 1)
        rows = _rows_of(committed)
        forward = rows, verdict.compute_us
        self._num_repeats = self._num_repeats + 1 if forward == self._forward else 0
        self._forward = forward
        if self._num_repeats % self.load == 0:
            # All sessions that had a part in a forward have its times, and it is one sample.
            self.verify_us.add(rows, verdict.compute_us / max(verdict.forward_count, 1))
        # Prompts are paid by the token and not by the round: what waited for one says nothing of rounds.
        self._rounds_since_prompt = 0 if verdict.prompt_row_count else self._rounds_since_prompt + 1
        has_waited = bool(verdict.hop.queue_us) and self._rounds_since_prompt <= self.load
        if self._rounds_since_prompt and not has_waited:
            self._rows.add(rows)
            if committed.ahead is not None:
                self._observe_ahead(committed, committed.ahead, is_usual=2 * num_drafting >= num_sessions)
            else:
                self.plain.observe(committed, self.load, self.num_rounds, unasked=unasked)
            if committed.ahead is None and proposal.tree and proposal.drafter != LOOKUP:
                own_rows = num_drafting * committed.draft_count + max(num_sessions, 1)
                share = rows * max(num_sessions, 1) / (own_rows * self.load)
                # What one session finds among others that decode plainly is not what all would find, and neither is
                # what it finds beside the rows of a lookup.
                is_usual = 2 * num_drafting >= num_sessions and share < self._tuning.most_share
                self._observe_draft(committed, share, unasked=unasked, is_usual=is_usual)
        self._observe_acceptance(committed, session)
        self.num_rounds += 1

    def _observe_ahead(self, committed: Round, ahead: AheadRound, *, is_usual: bool) -> None:
        """Learns what came of branches, and what such rounds take and bring while most sessions have some."""
        estimates = self.of(ahead.drafter)
        if ahead.outcome is not BranchOutcome.LATE:
            rate = mean_acceptance(estimates.acceptance.rates, ahead.draft_count)
            expected = missed_share(rate, ahead.draft_count, ahead.branch_count)
            estimates.misses.add(expected, ahead.outcome is BranchOutcome.MISS)
        if is_usual:
            estimates.round_us[ahead.draft_count, 0].add(self.load, max(committed.round_us, 1), self.num_rounds)
            estimates.round_tokens[ahead.draft_count].add(self.load, len(committed.token_ids), self.num_rounds)

    def _observe_acceptance(self, committed: Round, session: SessionEstimates | None) -> None:
        """Learns how many guesses of a drafter are accepted."""
        proposal, verdict = committed.proposal, committed.verdict
        if not proposal.tree or proposal.drafter == LOOKUP:
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

    def _observe_draft(self, committed: Round, share: float, *, unasked: bool, is_usual: bool) -> None:
        """Learns what a drafter's round costs; of a usual one, while most sessions draft, all that is to be had.

        The target's forward had such a share of the rows of all sessions.
        """
        proposal, verdict = committed.proposal, committed.verdict
        estimates = self.of(proposal.learner)
        if proposal.caught_up_count <= self._tuning.large_catch_up:
            # A draft that verifies guesses of its own makes several tokens in a forward.
            num_forwards = max(proposal.forward_count, committed.draft_count if estimates.gains is None else 1)
            draft_rows = proposal.row_count / num_forwards or 1
            estimates.step_us.add(draft_rows, proposal.compute_us / num_forwards)
            estimates.width.add(draft_rows / self.load)
        if unasked and not estimates.is_unasked:
            # What was learnt from asked rounds says nothing about these.
            estimates.is_unasked, estimates.overhead_us = True, ByLoad()
        overhead_us = max(0, committed.round_us - proposal.compute_us - verdict.compute_us)
        if self.load > 1:
            # Waiting for the forwards of others is in their number; see round_us.
            overhead_us = max(0, overhead_us - verdict.hop.queue_us)
        # And the first round of a stretch is not what the others are.
        is_alone = not estimates.overhead_us.known(self.load)
        if estimates.is_unasked == unasked and (is_usual or is_alone):
            estimates.overhead_us.add(self.load, overhead_us, self.num_rounds)
        if is_usual:
            count = min(committed.draft_count, estimates.counts[-1])
            # Deeper ones are never looked at, and a draft may count as it likes.
            gains = estimates.gains
            levels = 0 if gains is None else min(proposal.forward_count, MAX_DRAFT_COUNT + 1)
            estimates.recent_count.add(count)
            if abs(count - estimates.recent_count.mean) <= 0.5 or gains is not None:
                # Else most sessions have longer or shorter rounds now, and this one has waited for them.
                estimates.round_us[count, levels].add(self.load, max(committed.round_us, 1), self.num_rounds)
            estimates.share.add(self.load, min(max(share, self._tuning.least_share), 1.0))

    def _shared_us(self, estimates: DrafterEstimates, draft_count: int) -> float:
        """Cost of the target's forward when all sessions have so many guesses."""
        num_rows = self._share(estimates) * self.load * (draft_count + 1)
        return self.verify_us.at(max(draft_count + 1.0, num_rows))

    def _overhead_us(self, estimates: DrafterEstimates) -> float:
        """Cost of a round with guesses beside both computations; of an unasked one that of an unasked token."""
        if not estimates.is_unasked:
            return estimates.overhead_us.scaled(self.load)
        return estimates.overhead_us.blend(self.load, self.plain.overhead_us(self.load), self.num_rounds, self._tuning)

    def _share(self, estimates: DrafterEstimates) -> float:
        """The part of all sessions' rows that one forward of the target has."""
        return estimates.share.at(self.load, 1.0) if self.load > 1 and not estimates.is_unasked else 1.0


def _rows_of(committed: Round) -> float:
    """Rows of a forward of the target in a round."""
    verdict = committed.verdict
    return verdict.row_count / max(verdict.forward_count, 1) or committed.draft_count + 1
