"""Policy of K, the number of tokens to draft: costs of rounds at the present load, gains, and the best K. Pure.

With acceptance rate a(d) of the d-th guess a round with K guesses commits tau(K) = 1 + a(1) + a(1)a(2) + ... tokens
(Leviathan et al. 2023 for a constant a), and it costs K draft steps, one forward of the target, and the way of the
messages. Forwards are shared: with N sessions on the target, plain decoding costs each of them the forward of N rows,
and rounds with K guesses one of up to N (K + 1) rows, so that one more row is paid by everybody. The best K has the
largest tau(K) / cost(K) when all sessions take it, which is the goodput of the whole device. The cost of a forward is a
table over its rows and no line: it is a staircase on CPUs, and flat up to the tiles of an accelerator.

One policy serves all requests of a gateway, because they share the machines that it measures; what is known of one load
is remembered for the next time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from gateway.rounds.drafter_estimates import (
    TREE,
    TREE_COUNTS,
    DrafterEstimates,
    SessionEstimates,
    estimates_key,
)
from gateway.rounds.estimates import (
    MAX_DRAFT_COUNT,
    AcceptanceRates,
    Average,
    ByLoad,
    RowTable,
)
from gateway.rounds.round import LOOKUP, Proposal, Round

FIRST_GUESS = 4  # before anything is known
FIRST_TREE = (16, 4)  # the same for a tree: rows, and how deep they may lie
LOOK_AHEAD_ROUNDS = 16  # trees between two that are larger and deeper than what is best as far as is known
PLAIN_PROBE_ROUNDS = 64  # speculative rounds between two looks at what plain decoding costs
PROBE_COST = 0.005  # share of the time that probes, which look for a faster draft, may cost
PROBE_TOKENS = (32, 2048)  # minimum of plain tokens between two probes, and maximum for each session
PROBE_ROUNDS = 4  # a draft that has to catch up in the first one is warm in the others
LARGE_CATCH_UP = 16  # a draft that had to read more than this says nothing about the cost of a step
OTHER_PROBE_ROUNDS = 256  # speculative rounds between two looks at what another drafter costs
OTHER_PICK = 16  # of so many sessions one has another drafter of the target's process than the fastest
PLAIN_BUDGET = 32  # tokens committed unasked while plain decoding is what is wanted
SHORT_BUDGET = 8  # the same while that may soon be otherwise
HALT_GAIN = 1.1  # how much faster a lookup must look before a stretch of unasked tokens is ended for it
LEAST_SHARE = 0.5  # a target that waits for groups which are almost there serves two in turn; more do not last
ONE_GROUP = 0.8


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a round: K, whose guesses, for how many rounds, and for K = 0 how many tokens may come unasked.

    `depth` is how deep the rows of a tree may lie.
    """

    draft_count: int
    plain_budget: int = 0
    rounds: int = 1
    drafter: str = ""
    depth: int = 0


class SpeculationPolicy:
    """Learns from every round of the gateway; `choose` answers for one round of one session."""

    def __init__(self) -> None:
        self._drafters: dict[str, DrafterEstimates] = {}
        self._verify_us = RowTable()
        self._plain_overhead_us = ByLoad()
        self._sessions: dict[SessionEstimates, None] = {}
        self._num_drafting = 0
        self._load = 1  # sessions on the target, those of other gateways too
        self._plain_tokens = 0
        self._rounds_without_plain = 0
        self._lost_us = 0.0  # time that drafting has cost above plain decoding and that is not yet earned back
        self._costs: dict[str, dict[int, float]] = {}
        self._num_observed = 0
        self._num_rounds = 0
        self._rounds_since_other = 0
        self._num_picked = 0
        self._look_overhead_us = ByLoad()  # of a round with a lookup's guesses, beside the target's computation
        self._rows = Average()  # of the target's forwards

    def session(self, *drafters: str) -> SessionEstimates:
        """A session that may have these drafters, of which it begins with what is known of all."""
        return SessionEstimates({each: self._estimates(each).acceptance for each in drafters})

    def pick(self, drafters: Sequence[str]) -> str:
        """Drafter of those that a target has in its process that a session should have; it has one until its end.

        One of which nothing is known goes first, then the fastest, and now and then another one, to be looked at again.
        """
        unknown = next((each for each in drafters if self._estimates(each).is_worth_asking), None)
        if unknown is not None:
            self._estimates(unknown).num_asked += 1
            return unknown
        drafters = [each for each in drafters if self._estimates(each).step_us.known] or drafters
        if len(drafters) == 1:
            return drafters[0]
        self._num_picked += 1
        if self._num_picked % OTHER_PICK == 0:
            return drafters[self._num_picked // OTHER_PICK % len(drafters)]
        return max(drafters, key=self._speed_of)

    def _speed_of(self, drafter: str) -> float:
        """The most tokens a microsecond with chains of a drafter, or with its trees where it has made some."""
        kinds = [each for each in (drafter, drafter + TREE) if each in self._drafters]
        known = [each for each in kinds if self._estimates(each).step_us.known] or [drafter]
        return max(self._best(each, TREE_COUNTS[-1], None)[0] for each in known)

    def change(self, session: SessionEstimates, *drafters: str) -> None:
        """The session may have other drafters from now on."""
        session.acceptance = {
            each: session.acceptance.get(each) or AcceptanceRates(self._estimates(each).acceptance) for each in drafters
        }

    def enter(self, session: SessionEstimates) -> None:
        """A session is at work until it leaves."""
        self._sessions[session] = None

    def leave(self, session: SessionEstimates) -> None:
        """A session has ended; without an effect for one that has left."""
        if session in self._sessions:
            self.note(session, is_drafting=False)
            del self._sessions[session]
            for estimates in self._drafters.values():
                if estimates.explorer is session:
                    estimates.explorer = None

    @property
    def acceptance_rate(self) -> float:
        """Share of evaluated draft tokens that the target accepts, recent rounds first, of the drafter in use."""
        return self._estimates(self._usual_drafter).acceptance.mean

    def observe(self, committed: Round, session: SessionEstimates | None = None, *, unasked: bool) -> None:
        """Learns from a round that is not a session's first one; unasked ones came without a message from here."""
        proposal, verdict, draft_count = committed.proposal, committed.verdict, committed.draft_count
        self._see_load(verdict.session_count)
        rows = verdict.row_count / max(verdict.forward_count, 1) or draft_count + 1
        self._verify_us.add(rows, verdict.compute_us / max(verdict.forward_count, 1))
        self._rows.add(rows)
        is_look = proposal.drafter == LOOKUP and draft_count > 0
        if is_look:
            queued_us = verdict.hop.queue_us if self._load > 1 else 0
            self._look_overhead_us.add(self._load, max(0, committed.round_us - verdict.compute_us - queued_us))
        elif draft_count:
            self._observe_draft(committed, session, rows, unasked=unasked)
        elif unasked:
            self._plain_tokens += 1
            self._rounds_without_plain = 0
            self._plain_overhead_us.add(self._load, max(0, committed.round_us - verdict.compute_us))
        # What a round with a draft, or with one that failed, lost against plain decoding; plain tokens pay for it.
        plain_us = self.cost_us(0)
        if unasked and not draft_count:
            self._lost_us -= PROBE_COST * plain_us
        elif (draft_count and not is_look) or proposal.fallback_reason:
            # Of the other sessions each had to wait for the rows of the guesses.
            waited_us = (self._load - 1) * max(0.0, self._verify_us.at(rows) - self._verify_us.at(rows - draft_count))
            self._lost_us += committed.round_us - len(committed.token_ids) * plain_us + waited_us
        self._lost_us = max(self._lost_us, 0.0)
        self._num_rounds += 1
        self._num_observed += 1
        if self._num_observed >= max(4, self._load):
            self._forget_costs()

    def _observe_draft(self, committed: Round, session: SessionEstimates | None, rows: float, *, unasked: bool) -> None:
        """Learns about the drafter of a round, whose verdict came from a forward of so many rows."""
        proposal, verdict, draft_count = committed.proposal, committed.verdict, committed.draft_count
        drafter = estimates_key(proposal)
        estimates = self._estimates(drafter)
        self._plain_tokens = 0
        self._rounds_without_plain += 1
        self._rounds_since_other += 1
        estimates.ramp(len(self._sessions))
        own = session.acceptance.get(drafter) if session else None
        for acceptance in (estimates.acceptance, *([own] if own else [])):
            acceptance.observe(committed.accepted_count, verdict.evaluated_count)
        for part in proposal.parts:
            # What each would have been worth alone, as far as the tokens show.
            right = len(part.tree.follow(committed.token_ids))
            tested = min(right + 1, max(part.tree.depths), len(committed.token_ids))
            self._estimates(part.drafter).acceptance.observe(right, tested)
        if estimates.gains is not None:
            estimates.gains.observe(proposal.tree.values, committed.accepted_count)
        if proposal.caught_up_count <= LARGE_CATCH_UP:
            # A draft that verifies guesses of its own makes several tokens in a forward.
            num_forwards = max(proposal.forward_count, draft_count if estimates.gains is None else 1)
            draft_rows = proposal.row_count / num_forwards or 1
            estimates.step_us.add(draft_rows, proposal.compute_us / num_forwards)
            estimates.width.add(draft_rows / self._load)
        if unasked and not estimates.is_unasked:
            # What was learnt from asked rounds says nothing about these.
            estimates.is_unasked, estimates.overhead_us = True, ByLoad()
        overhead_us = max(0, committed.round_us - proposal.compute_us - verdict.compute_us)
        if self._load > 1:
            # Waiting for the forwards of others is in their number; see cost_us.
            overhead_us = max(0, overhead_us - verdict.hop.queue_us)
        # What one session finds among others that decode plainly is not what all would find.
        is_usual = 2 * self._num_drafting >= len(self._sessions)
        # And the first round of a stretch is not what the others are.
        if estimates.is_unasked == unasked and (is_usual or not estimates.overhead_us.known(self._load)):
            estimates.overhead_us.add(self._load, overhead_us)
        if is_usual:
            num_sessions = max(len(self._sessions), 1)
            own_rows = self._num_drafting * draft_count + num_sessions
            share = rows * num_sessions / (own_rows * self._load)
            count = min(draft_count, estimates.counts[-1])
            # Deeper ones are never looked at, and a draft may count as it likes.
            levels = 0 if estimates.gains is None else min(proposal.forward_count, MAX_DRAFT_COUNT + 1)
            estimates.round_us[count, levels].add(self._load, max(committed.round_us, 1), self._num_rounds)
            estimates.share.add(self._load, min(max(share, LEAST_SHARE), 1.0))

    def choose(self, limit: int, session: SessionEstimates | None = None, *, ready: bool = True) -> Choice:
        """The best K in [0, limit], or now and then one that keeps the estimates of the other side alive.

        Only a session that is ready, so that it carries the choice out at once, uses such an opportunity up: one that
        ends before its turn must not take it from the others.
        """
        most = min(limit, TREE_COUNTS[-1])
        choice = self._choose(most, session, ready=ready) if most > 0 else Choice(0)
        if session is not None and ready:
            self.note(session, is_drafting=choice.draft_count > 0)
        return choice

    def _choose(self, most: int, session: SessionEstimates | None, *, ready: bool) -> Choice:
        drafters = list(session.drafters) if session else [self._usual_drafter]
        unknown = self._unknown(drafters, session)
        known = self._known(drafters)
        if unknown is not None and ready:
            self._estimates(unknown).explorer = session
        if unknown is not None or not known:
            plain = Choice(0, SHORT_BUDGET if drafters else PLAIN_BUDGET)
            if unknown is None:
                return plain
            count, depth = (FIRST_GUESS, 0) if self._estimates(unknown).gains is None else FIRST_TREE
            return Choice(min(count, most), drafter=unknown, depth=depth)
        worths = {drafter: self._best(drafter, most, session) for drafter in known}
        drafter = max(known, key=lambda each: worths[each][0])
        others = [each for each in known if each != drafter]
        if others and ready and self._rounds_since_other >= OTHER_PROBE_ROUNDS * self._load:
            self._rounds_since_other = 0
            other = others[self._num_rounds % len(others)]
            return self._asked(other, worths[other][1], most, rounds=PROBE_ROUNDS)
        estimates, (speed, best) = self._estimates(drafter), worths[drafter]
        if not estimates.is_worth:
            return self._plain_or_probe(drafter, best, most, ready=ready)
        return self._draft_or_plain(drafter, self._asked(drafter, best, most), speed, session, ready=ready)

    def _draft_or_plain(
        self, drafter: str, best: Choice, speed: float, session: SessionEstimates | None, *, ready: bool
    ) -> Choice:
        """Guesses, while they are worth it; now and then some plain tokens that show what these cost."""
        estimates = self._estimates(drafter)
        may_draft = session is None or session.is_drafting or self._num_drafting < estimates.allowed
        if not may_draft or speed * self._costs_of(drafter)[0] <= 1:
            return Choice(0, SHORT_BUDGET)
        if not ready or self._rounds_without_plain < PLAIN_PROBE_ROUNDS * self._load:
            return best
        self._rounds_without_plain = 0
        return Choice(0, 2)  # the unasked tokens are what measures plain decoding

    def _asked(self, drafter: str, best: int, most: int, rounds: int = 1) -> Choice:
        """The best K of a drafter; of its trees now and then, and when they are probed, a larger and deeper one.

        A tree says what all smaller ones would have brought, and nothing of larger ones.
        """
        estimates = self._estimates(drafter)
        if estimates.gains is None:
            return Choice(best, rounds=rounds, drafter=drafter)
        depth = estimates.depths.get(best, FIRST_TREE[1])
        if rounds > 1 or estimates.gains.num_promises % LOOK_AHEAD_ROUNDS == 0:
            best, depth = min(2 * best, most), min(depth + 1, MAX_DRAFT_COUNT)
        return Choice(best, rounds=rounds, drafter=drafter, depth=depth)

    def _unknown(self, drafters: Sequence[str], session: SessionEstimates | None) -> str | None:
        """A drafter of which nothing is known, for this session to find out; the others need not pay for it."""
        for drafter in drafters:
            estimates = self._estimates(drafter)
            if not estimates.step_us.known and (estimates.explorer is None or estimates.explorer is session):
                return drafter
        return None

    def _best(self, drafter: str, most: int, session: SessionEstimates | None) -> tuple[float, int]:
        """The most tokens a microsecond with some guesses of a drafter, and how many these are."""
        own = session.acceptance.get(drafter) if session else None
        estimates, costs = self._estimates(drafter), self._costs_of(drafter)
        tokens = estimates.tokens(own)
        return max((tokens[count] / costs[count], count) for count in estimates.counts if count <= most)

    def look_count(self, values: Sequence[float], session: SessionEstimates, *, halts: bool) -> int:
        """Number of rows of a lookup, whose values fall, that are worth more than whatever else there is; 0 for none.

        They must make the session faster than its drafters would, and all sessions together faster than plain decoding:
        the rows of one are paid by all. `halts` says that a stretch of unasked tokens would have to be ended for it.
        """
        others, known = self._load - 1, self._known(session.drafters)
        # Until there was one it is taken to cost what a round with a draft does beside the computing.
        asked_us = (self._estimates(each).overhead_us.at(self._load) for each in known)
        overhead_us = self._look_overhead_us.at(self._load, min(asked_us, default=0.0))
        rows = 1.0 + (max(others, self._rows.mean * others / self._load) if others else 0.0)
        plain_us = max(self._verify_us.at(rows), 1.0)
        best = others / plain_us + 1 / (plain_us + self._plain_overhead_us.at(self._load))
        rival = max((self._best(each, TREE_COUNTS[-1], session)[0] for each in known), default=0.0)
        gain = HALT_GAIN if halts else 1.0
        best, found, tokens = best * gain, 0, 1.0
        for count, value in enumerate(values[: TREE_COUNTS[-1]], start=1):
            tokens += value
            verify_us = max(self._verify_us.at(rows + count), 1.0)
            own = tokens / (verify_us + overhead_us)
            if own > rival * gain and others / verify_us + own > best:
                best, found = others / verify_us + own, count
        return found if self._verify_us.known else min(found, FIRST_GUESS)

    def cut_count(self, proposal: Proposal) -> int:
        """Number of rows of a tree, the most valuable ones, to be verified, now that its drafter has been paid."""
        estimates = self._estimates(estimates_key(proposal))
        correction = 1.0 if estimates.gains is None else estimates.gains.correction
        spent_us = max(proposal.hop.wait_us, proposal.compute_us) + self._look_overhead_us.at(self._load)
        best, found, tokens = 0.0, 1, 1.0
        for count, value in enumerate(sorted(proposal.tree.values, reverse=True), start=1):
            tokens += correction * value
            speed = tokens / max(spent_us + self._shared_us(estimates, count), 1.0)
            if speed > best:
                best, found = speed, count
        return found

    def valued(self, proposal: Proposal) -> Proposal:
        """The proposal with values for its rows: those of a chain that has none are what its drafter's rates say."""
        tree = proposal.tree
        if not tree or tree.values or tree.distributions:
            return proposal
        rates = self._estimates(proposal.drafter).acceptance.rates
        reached = [*accumulate(rates, mul)]
        values = tuple(reached[min(depth, MAX_DRAFT_COUNT) - 1] for depth in tree.depths[1:])
        return replace(proposal, tree=replace(tree, values=values))

    def saw(self, proposal: Proposal, asked_count: int, max_depth: int = 0) -> None:
        """Learns from a tree as it came, before any of its rows were left out; the draft was asked for so many.

        max_depth is how deep they might lie, 0 where that was left to the draft.
        """
        estimates = self._estimates(estimates_key(proposal))
        if estimates.gains is not None and proposal.tree:
            estimates.gains.promise(proposal.tree, asked_count, max_depth or MAX_DRAFT_COUNT)
            estimates.levels.add(asked_count, max(proposal.forward_count, 1))
            estimates.has_depths = estimates.has_depths or max_depth > 0

    def _known(self, drafters: Iterable[str]) -> list[str]:
        return [drafter for drafter in drafters if self._estimates(drafter).step_us.known]

    def _plain_or_probe(self, drafter: str, best: int, most: int, *, ready: bool) -> Choice:
        """Plain decoding, while guesses are not worth it; now and then some rounds that look whether they are."""
        minimum, maximum = PROBE_TOKENS
        if self._plain_tokens < minimum or (self._plain_tokens < maximum * self._load and self._lost_us > 0):
            return Choice(0, PLAIN_BUDGET)
        if ready:
            self._plain_tokens = 0
            self._estimates(drafter).step_us.renew()
        return self._asked(drafter, best, most, rounds=PROBE_ROUNDS)

    @property
    def best_count(self) -> int:
        """K as it would be chosen now, for an observer on any thread; 0 says that plain decoding is faster."""
        drafter = self._usual_drafter
        if not self._estimates(drafter).step_us.known:
            return FIRST_GUESS
        return max((0, *self._estimates(drafter).counts), key=lambda count: self.speed(count, drafter))

    def speed(self, draft_count: int, drafter: str = "") -> float:
        """Tokens per microsecond that K draft tokens a round are expected to bring to each session."""
        cost_us = self.cost_us(draft_count, drafter)
        return self._estimates(drafter).tokens()[draft_count] / cost_us

    def cost_us(self, draft_count: int, drafter: str = "") -> float:
        """Expected microseconds of a round with K draft tokens, if all sessions had such rounds at the present load.

        For K = 0 of a token of plain decoding. Where the target takes turns with groups of sessions, a round takes at
        least the forwards of all, and drafting is hidden by them.
        """
        load = self._load
        if not draft_count:
            return max(self._verify_us.at(load) + self._plain_overhead_us.at(load), 1.0)
        estimates = self._estimates(drafter)
        share = self._share(estimates)
        width = 1.0 if estimates.gains is None else max(1.0, estimates.width.mean)
        step_us = estimates.step_us.at(max(width, share * load * width))
        verify_us = self._shared_us(estimates, draft_count)
        num_steps, levels = float(draft_count), 0
        if estimates.gains is not None:
            fixed_us = max(verify_us + estimates.overhead_us.at(load), 1.0)
            levels = self._best_depth(estimates, draft_count, step_us, fixed_us)
            num_steps = levels or estimates.levels.at(draft_count) or num_steps
        draft_us = num_steps * step_us
        # Groups are of unequal size, and most answers come from the larger ones.
        num_groups = 1 if share > ONE_GROUP else 2
        model_us = max(draft_us + verify_us + estimates.overhead_us.at(load), num_groups * verify_us, 1.0)
        if estimates.is_unasked:
            # How long such a round took here says nothing, because its verdict may have waited for its reader.
            return model_us
        return estimates.round_us[draft_count, levels].blend(load, model_us, self._num_rounds)

    @staticmethod
    def _best_depth(estimates: DrafterEstimates, draft_count: int, step_us: float, fixed_us: float) -> int:
        """The best depth of trees of so many rows, which is kept; 0 where it is not chosen here."""
        if estimates.gains is None or not estimates.has_depths:
            return 0
        gains = estimates.gains
        depths = range(1, MAX_DRAFT_COUNT + 1)
        best = max(depths, key=lambda depth: gains.at(draft_count, depth) / (fixed_us + depth * step_us))
        estimates.depths[draft_count] = best
        return best

    def _shared_us(self, estimates: DrafterEstimates, draft_count: int) -> float:
        """Cost of the target's forward when all sessions have so many guesses."""
        num_rows = self._share(estimates) * self._load * (draft_count + 1)
        return self._verify_us.at(max(draft_count + 1.0, num_rows))

    def _share(self, estimates: DrafterEstimates) -> float:
        """The part of all sessions' rows that one forward of the target has."""
        return estimates.share.at(self._load, 1.0) if self._load > 1 else 1.0

    def _costs_of(self, drafter: str) -> dict[int, float]:
        costs = self._costs.get(drafter)
        if costs is None:
            estimates = self._estimates(drafter)
            costs = {count: self.cost_us(count, drafter) for count in (0, *estimates.counts)}
            self._costs[drafter] = costs
            estimates.judge(costs)
        return costs

    def _forget_costs(self) -> None:
        self._costs.clear()
        self._num_observed = 0

    def _see_load(self, load: int) -> None:
        if max(load, 1) != self._load:
            self._load = max(load, 1)
            self._forget_costs()

    def note(self, session: SessionEstimates, *, is_drafting: bool) -> None:
        """A session drafts from now on, or does not."""
        self._num_drafting += is_drafting - session.is_drafting
        session.is_drafting = is_drafting

    def _estimates(self, drafter: str) -> DrafterEstimates:
        estimates = self._drafters.get(drafter)
        if estimates is None:
            is_chain = not drafter.endswith(TREE)
            estimates = self._drafters[drafter] = DrafterEstimates(self._verify_us, is_chain=is_chain)
        return estimates

    @property
    def _usual_drafter(self) -> str:
        return next(iter(self._drafters), "")
