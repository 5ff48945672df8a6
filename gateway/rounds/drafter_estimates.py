"""Estimates of one drafter: what its guesses bring, and what rounds with them cost at the present load. Pure.

With acceptance rate a(d) of the d-th guess a round with K guesses commits tau(K) = 1 + a(1) + a(1)a(2) + ... tokens
(Leviathan et al. 2023 for a constant a), and it costs K draft steps, one forward of the target, and the way of the
messages.
"""

from collections import defaultdict
from collections.abc import Sequence

from gateway.rounds.branching import COUNTS, mean_acceptance, missed_share
from gateway.rounds.by_load import ByLoad
from gateway.rounds.round import AheadRound, BranchOutcome, GuessRequest, Makes, Proposal, Round
from gateway.rounds.target_costs import TargetCosts
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
    """Estimates of one drafter, or of the trees or branches that it makes."""

    def __init__(self, target: TargetCosts, makes: Makes, acceptance: AcceptanceRates) -> None:
        """The cost of a draft's rows is like that of the target's until more is known."""
        self._target = target
        self._makes = makes
        self.counts = target.tuning.tree_counts if makes is Makes.TREE else target.tuning.chain_counts
        """Numbers of guesses that are looked at."""
        self.acceptance = acceptance
        self.gains = TreeGains() if makes is Makes.TREE else None
        self.depths: dict[int, int] = {}  # the best one by the guesses that are asked for
        self.step_us = RowCosts(target.verify_us)
        self.overhead_us = ByLoad()  # of a round, beside both computations
        # By the guesses of a tree that were asked for, the forwards that they took, and rows of a session in each.
        self._levels, self._widths = RowCosts(), RowCosts()
        self._has_depths = False  # whether trees are asked for with a depth, which then is their forwards
        self._recent_count = Average()  # guesses of a round, while most sessions have some
        # Rows of a forward, of those that all sessions together have: 1 where all are verified at the same time, a half
        # where two groups take turns, of which one drafts while the other is verified.
        self._share = ByLoad()
        # By K, what rounds have cost in fact when most sessions had some: how groups form cannot be foretold.
        # Of trees by the forwards that made them too.
        self._round_us: defaultdict[tuple[int, int], ByLoad] = defaultdict(ByLoad)
        self._is_unasked = False  # its rounds come without a message from here, but for the first of a stretch
        # Of branches that were there in time: misses that were expected, and those that came.
        self._misses = GuessTally()
        self._round_tokens: defaultdict[int, ByLoad] = defaultdict(ByLoad)  # of rounds after branches, by K

    def share_with(self, chains: "DrafterEstimates") -> None:
        """Takes over what is known of the same drafter's chains: guesses that it makes ahead are no others."""
        self.acceptance, self.step_us, self.overhead_us = chains.acceptance, chains.step_us, chains.overhead_us

    def tokens(self, own: AcceptanceRates | None = None) -> Sequence[float]:
        """Tokens that a round with K guesses is expected to commit, by K; `own` are the rates of one session."""
        if self.gains is None:
            return (own or self.acceptance).tokens()
        depths = (self.depths.get(count, MAX_DRAFT_COUNT) for count in range(MAX_TREE_ROWS + 1))
        return [self.gains.at(count, depth) for count, depth in enumerate(depths)]

    def round_us(self, draft_count: int) -> float:
        """Expected microseconds of a round with K > 0 guesses, if all sessions had such rounds at the present load.

        Where the target takes turns with groups of sessions, a round takes at least the forwards of all, and drafting
        is hidden by them. Of branches it is the time in which they bring what K guesses bring.
        """
        target = self._target
        load = target.load
        if self._makes is Makes.AHEAD:
            # What such rounds have taken and brought in fact, misses too, counts the more, the more there were.
            tokens, now, tuning = self.tokens()[draft_count], target.num_rounds, target.tuning
            model_us = self._branches_us(draft_count, self.branch_count(draft_count))
            taken_us = self._round_us[draft_count, 0].blend(load, model_us, now, tuning)
            brought = self._round_tokens[draft_count].blend(load, tokens, now, tuning)
            return max(taken_us * tokens / max(brought, 1.0), 1.0)
        share, overhead_us = self._share_now(), self._overhead_now_us()
        width = 1.0 if self.gains is None else max(1.0, self._widths.at(draft_count))
        step_us = self.step_us.at(max(width, share * load * width))
        verify_us = self.shared_us(draft_count)
        num_steps, levels, gains = float(draft_count), 0, self.gains
        if gains is not None:
            fixed_us = max(verify_us + overhead_us, 1.0)
            if self._has_depths:
                # The best depth of trees of so many rows.
                depths = range(1, MAX_DRAFT_COUNT + 1)
                levels = max(depths, key=lambda depth: gains.at(draft_count, depth) / (fixed_us + depth * step_us))
                self.depths[draft_count] = levels
            num_steps = levels or self._levels.at(draft_count) or num_steps
        draft_us = num_steps * step_us
        # Groups are of unequal size, and most answers come from the larger ones.
        num_groups = 1 if share > target.tuning.one_group else 2
        model_us = max(draft_us + verify_us + overhead_us, num_groups * verify_us, 1.0)
        if self._is_unasked:
            # How long such a round took here says nothing, because its verdict may have waited for its reader.
            return model_us
        return self._round_us[draft_count, levels].blend(load, model_us, target.num_rounds, target.tuning)

    def is_plain_on_miss(self, draft_count: int) -> bool:
        """Whether a target does better to go on with a plain token than to wait for guesses, where no branch fits.

        Among others it has a forward to make anyway.
        """
        lost_us = self._target.verify_us.at(1.0) * (1 - 1 / max(self.tokens()[draft_count], 1.0))
        wait_us = draft_count * self.step_us.at(1.0) + self._overhead_now_us()
        return self._target.load > 1 or lost_us < wait_us

    def branch_count(self, draft_count: int) -> int:
        """The number of branches of a session that makes rounds with K guesses the shortest, or hardly longer.

        One more is there for the likeliest outcome that has none, and costs each step of the draft a row of every
        session.
        """
        most = self._target.branch_limit(draft_count)
        counts = [*(each for each in COUNTS if each < most), most]
        round_us = {count: self._branches_us(draft_count, count) for count in counts}
        near_us = self._target.tuning.same_cost * min(round_us.values())
        return max(count for count, us in round_us.items() if us <= near_us)

    def shared_us(self, draft_count: int) -> float:
        """Cost of the target's forward when all sessions have so many guesses."""
        num_rows = self._share_now() * self._target.load * (draft_count + 1)
        return self._target.verify_us.at(max(draft_count + 1.0, num_rows))

    def observe_tree(self, proposal: Proposal, asked: GuessRequest) -> None:
        """Learns from a tree as it came, before any of its rows were left out."""
        max_depth = asked.shape.max_depth if asked.shape else 0
        # Where lookups join in, there may be a tree though the drafter was not asked.
        if self.gains is not None and proposal.tree and asked.count:
            self.gains.promise(proposal.tree, asked.count, max_depth or MAX_DRAFT_COUNT)
            num_forwards = max(proposal.forward_count, 1)
            self._levels.add(asked.count, num_forwards)
            self._widths.add(asked.count, max(proposal.row_count, 1) / num_forwards / self._target.load)
            self._has_depths = self._has_depths or max_depth > 0

    def observe_ahead(self, committed: Round, ahead: AheadRound, *, is_usual: bool) -> None:
        """Learns what came of branches, and what such rounds take and bring while most sessions have some."""
        target = self._target
        if ahead.outcome is not BranchOutcome.LATE:
            rate = mean_acceptance(self.acceptance.rates, ahead.draft_count)
            expected = missed_share(rate, ahead.draft_count, ahead.branch_count)
            self._misses.add(expected, ahead.outcome is BranchOutcome.MISS)
        if is_usual:
            round_us = max(committed.round_us, 1)
            self._round_us[ahead.draft_count, 0].add(target.load, round_us, target.num_rounds)
            self._round_tokens[ahead.draft_count].add(target.load, len(committed.token_ids), target.num_rounds)

    def observe_round(self, committed: Round, share: float, *, unasked: bool, is_usual: bool) -> None:
        """Learns what a drafter's round costs; of a usual one, while most sessions draft, all that is to be had.

        The target's forward had such a share of the rows of all sessions.
        """
        proposal, verdict, target = committed.proposal, committed.verdict, self._target
        load, num_rounds = target.load, target.num_rounds
        if proposal.caught_up_count <= target.tuning.large_catch_up:
            # A draft that verifies guesses of its own makes several tokens in a forward.
            num_forwards = max(proposal.forward_count, committed.draft_count if self.gains is None else 1)
            draft_rows = proposal.row_count / num_forwards or 1
            self.step_us.add(draft_rows, proposal.compute_us / num_forwards)
        if unasked and not self._is_unasked:
            # What was learnt from asked rounds says nothing about these.
            self._is_unasked, self.overhead_us = True, ByLoad()
        overhead_us = max(0, committed.round_us - proposal.compute_us - verdict.compute_us)
        if load > 1 and not unasked:
            # Waiting for the forwards of others is in their number; see round_us. An unasked round has its part in
            # each of them, and what it waits beside that is no other's cost.
            overhead_us = max(0, overhead_us - verdict.hop.queue_us)
        # And the first round of a stretch is not what the others are.
        is_alone = not self.overhead_us.known(load)
        if self._is_unasked == unasked and (is_usual or is_alone):
            self.overhead_us.add(load, overhead_us)
        if is_usual:
            count = min(committed.draft_count, self.counts[-1])
            # Deeper ones are never looked at, and a draft may count as it likes.
            levels = 0 if self.gains is None else min(proposal.forward_count, MAX_DRAFT_COUNT + 1)
            self._recent_count.add(count)
            if abs(count - self._recent_count.mean) <= 0.5 or self.gains is not None:
                # Else most sessions have longer or shorter rounds now, and this one has waited for them.
                self._round_us[count, levels].add(load, max(committed.round_us, 1), num_rounds)
            self._share.add(load, min(max(share, target.tuning.least_share), 1.0))

    def _branches_us(self, draft_count: int, branch_count: int) -> float:
        """Expected microseconds of a round with K guesses before which each session had so many branches.

        On a hit it takes the target's forward, or as long as branches take, all steps of them and the ways. Else the
        draft guesses first, in steps that have the branches of the others.
        """
        load, rates, step_us = self._target.load, self.acceptance.rates, self.step_us
        verify_us, overhead_us = self.shared_us(draft_count), self._overhead_now_us()
        hit_us = max(verify_us, (draft_count + 1) * step_us.at(load * branch_count) + overhead_us)
        miss_us = verify_us + draft_count * step_us.at(load + (load - 1) * branch_count) + overhead_us
        missed = missed_share(mean_acceptance(rates, draft_count), draft_count, branch_count)
        missed = min(1.0, missed * self._misses.share(1.0, FIRST_WEIGHT))
        return (1 - missed) * hit_us + missed * miss_us

    def _overhead_now_us(self) -> float:
        """Cost of a round with guesses beside both computations; of an unasked one that of an unasked token."""
        target = self._target
        if not self._is_unasked:
            return self.overhead_us.scaled(target.load)
        plain_us = target.plain.overhead_us(target.load)
        # It does not grow old: what was too dear would look worth it, and probes find out when it is not.
        return self.overhead_us.blend(target.load, plain_us, 0, target.tuning)

    def _share_now(self) -> float:
        """The part of all sessions' rows that one forward of the target has."""
        return self._share.at(self._target.load, 1.0) if self._target.load > 1 and not self._is_unasked else 1.0
