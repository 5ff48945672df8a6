"""How many tokens to draft: what rounds cost at the present load, what they bring, and the K that is worth most. Pure.

With acceptance rate a(d) of the d-th guess a round with K guesses commits tau(K) = 1 + a(1) + a(1)a(2) + ... tokens
(Leviathan et al. 2023 for a constant a), and it costs K draft steps, one forward of the target, and the way of the
messages. Forwards are shared: with N sessions on the target, plain decoding costs each of them the forward of N rows,
and rounds with K guesses one of up to N (K + 1) rows, so that one more row is paid by everybody. The best K has the
largest tau(K) / cost(K) when all sessions take it, which is the goodput of the whole device. The cost of a forward is a
table over its rows and no line: it is a staircase on CPUs, and flat up to the tiles of an accelerator.

One policy serves all requests of a gateway, because they share the machines that it measures; what is known of one load
is remembered for the next time. Estimates move, and no outlier rules them, not even a first one.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from gateway.rounds.round import Round

NUM_SEEDS = 3  # samples of which the median begins an estimate
OUTLIER = 4.0  # a sample counts as so many times what was expected at most
MAX_DRAFT_COUNT = 8
FIRST_GUESS = 4  # before anything is known
PLAIN_PROBE_ROUNDS = 64  # speculative rounds between two looks at what plain decoding costs
PROBE_COST = 0.005  # share of the time that probes, which look for a faster draft, may cost
PROBE_TOKENS = (32, 2048)  # minimum of plain tokens between two probes, and maximum for each session
PROBE_ROUNDS = 4  # a draft that has to catch up in the first one is warm in the others
LARGE_CATCH_UP = 16  # a draft that had to read more than this says nothing about the cost of a step
OTHER_PROBE_ROUNDS = 256  # speculative rounds between two looks at what another drafter costs
PLAIN_BUDGET = 32  # tokens committed unasked while plain decoding is what is wanted
SHORT_BUDGET = 8  # the same while that may soon be otherwise
WORTH_CHANGING = 1.03  # how much faster guesses must look before sessions that decode plainly begin with them
FIRST_RATE, FIRST_WEIGHT = 0.7, 4.0  # of a guess, before any was tested, and its weight in tested tokens
POOL_WEIGHT = 16.0  # of the pool's rate in that of a session, in tested tokens
SLOPE_WEIGHT = 0.5  # of what is believed of the cost of a row before there are two entries, in squared rows
DRIFT = 0.02  # how much of a sample's surprise about one number of rows is believed of all others
LEAST_SHARE = 0.5  # a target that waits for groups which are almost there serves two in turn; more do not last
ONE_GROUP = 0.8
MEMORY_ROUNDS = 1000  # of each session, behind which half of what was measured is forgotten
TRUST_ROUNDS = 4  # of each session, behind which half of what was measured is believed
EXACT_ROWS = 32  # larger numbers of rows share an entry with their neighbours


class Average:
    """An exponential moving average that begins with the median of its first samples; `known` when it has them."""

    def __init__(self) -> None:
        self.known = False
        self.mean = 0.0
        self._seeds: list[float] | None = []

    def add(self, sample: float) -> None:
        """Adds a sample, at least 0."""
        if self._seeds is None:
            self.mean += 0.1 * (min(sample, OUTLIER * self.mean + 1.0) - self.mean)
            return
        self._seeds.append(sample)
        complete = len(self._seeds) == NUM_SEEDS
        if complete or not self.known:
            self.mean = median(self._seeds)
        if complete:
            self.known, self._seeds = True, None

    def renew(self) -> None:
        """What was learnt is old: the next samples replace it as if they were the first, as soon as all are there."""
        if self._seeds is None:
            self._seeds = []


class RowTable:
    """Cost of a forward by its rows: an entry for each number that was seen, a straight line between and beyond.

    All entries follow a little when one of them changes, because what slows a machine slows every forward. Behind the
    last entry a row costs what rows cost on the whole; while there is only one, what a row costs in the model table,
    in proportion, and without that a tenth of the entry, or its share where that is less.
    """

    def __init__(self, model: "RowTable | None" = None) -> None:
        self.known = False
        """Whether there is an entry that is more than a first impression."""
        self._model = model
        self._rows: list[int] = []
        self._entries: dict[float, Average] = {}
        self._scale = 1.0
        # Over all entries, without the scale: what a straight line through them is made of.
        self._sum_rows = self._sum_squares = 0
        self._sum_costs = self._sum_products = 0.0

    def add(self, rows: float, cost: float) -> None:
        """Adds the cost of a forward."""
        key = _row_key(rows)
        if self.known:
            expected = self.at(key)
            cost = min(cost, OUTLIER * expected + 1.0)
            self._scale *= 1 + DRIFT * (cost / max(expected, 1e-9) - 1)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Average()
            insort(self._rows, key)
            self._sum_rows += key
            self._sum_squares += key**2
        before = entry.mean
        entry.add(cost / self._scale)
        self.known = self.known or entry.known
        self._sum_costs += entry.mean - before
        self._sum_products += key * (entry.mean - before)

    def at(self, rows: float) -> float:
        """Expected cost of a forward; 0 before the first sample."""
        entry = self._entries.get(rows)
        if entry is not None:
            return self._scale * entry.mean
        if not self._rows:
            return 0.0
        index = bisect_left(self._rows, rows)
        above = self._rows[min(index, len(self._rows) - 1)]
        below = self._rows[max(index - 1, 0)]
        cost_above, cost_below = self._scale * self._entries[above].mean, self._scale * self._entries[below].mean
        if rows >= above:
            return cost_above + self._row_cost() * (rows - above)
        if rows <= below:
            return max(cost_below - self._row_cost() * (below - rows), 0.1 * cost_below)
        return cost_below + (cost_above - cost_below) * (rows - below) / (above - below)

    @property
    def row_share(self) -> float:
        """Cost of one more row, as a share of a forward."""
        mean_cost = self._scale * self._sum_costs / max(len(self._rows), 1)
        return self._row_cost() / mean_cost if mean_cost > 0 else 0.1

    def _row_cost(self) -> float:
        """Cost of one more row by least squares over all entries, at least 0."""
        num_entries = len(self._rows)
        mean_rows, mean_cost = self._sum_rows / num_entries, self._sum_costs / num_entries
        spread = self._sum_squares - mean_rows * self._sum_rows
        together = self._sum_products - mean_rows * self._sum_costs
        share = min(0.1, 1 / mean_rows) if self._model is None else self._model.row_share
        return self._scale * max(0.0, (together + SLOPE_WEIGHT * share * mean_cost) / (spread + SLOPE_WEIGHT))

    def renew(self) -> None:
        """What was learnt is old; see Average."""
        for entry in self._entries.values():
            entry.renew()


def _row_key(rows: float) -> int:
    """Where a number of rows belongs: large ones share an entry when they differ by less than a sixteenth."""
    if rows <= EXACT_ROWS:
        return max(1, round(rows))
    step = 1 << (int(rows).bit_length() - 5)
    return round(rows / step) * step


class ByLoad:
    """An average for each load, in sessions; loads of the same order share one."""

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._added: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def add(self, load: int, sample: float, now: int = 0) -> None:
        """Adds a sample; `now` counts whatever samples grow old by."""
        key = _load_key(load)
        if key not in self._averages:
            self._averages[key] = Average()
        self._averages[key].add(sample)
        self._added[key] = now
        self._counts[key] = self._counts.get(key, 0) + 1

    def known(self, load: int) -> bool:
        """Whether this very load has been seen."""
        return _load_key(load) in self._averages

    def blend(self, load: int, model: float, now: int) -> float:
        """The average at this very load where there is one; of what a model says the more, the older it is, and the
        fewer rounds each session has had: while a load changes, rounds are like nothing that lasts.
        """
        key = _load_key(load)
        if key not in self._averages:
            return model
        each = max(load, 1)
        weight = MEMORY_ROUNDS / (MEMORY_ROUNDS + (now - self._added[key]) / each)
        weight *= self._counts[key] / (self._counts[key] + TRUST_ROUNDS * each)
        return weight * self._averages[key].mean + (1 - weight) * model

    def at(self, load: int, unknown: float = 0.0) -> float:
        """The average at this load, or at the one that is nearest to it; `unknown` before the first sample."""
        key = _load_key(load)
        if key not in self._averages:
            if not self._averages:
                return unknown
            key = min(self._averages, key=lambda each: (abs(each - key), -each))
        return self._averages[key].mean


@cache
def _load_key(load: int) -> int:
    return round(2 * math.log2(max(load, 1)))


class AcceptanceRates:
    """How often the guess of each depth is accepted, recent rounds first; drawn towards a prior while little is known.

    The prior is that of another estimate, or else each depth is like the one before it.
    """

    def __init__(self, prior: "AcceptanceRates | None" = None) -> None:
        self._prior = prior
        self._accepted = [0.0] * MAX_DRAFT_COUNT
        self._evaluated = [0.0] * MAX_DRAFT_COUNT

    def observe(self, accepted_count: int, evaluated_count: int) -> None:
        """Adds a chain of which so many guesses were tested, and so many of these accepted."""
        # Each round that tests a depth takes a fiftieth off the weight of its past.
        evaluated, accepted = self._evaluated, self._accepted
        for depth in range(min(evaluated_count, MAX_DRAFT_COUNT)):
            evaluated[depth] = 0.98 * evaluated[depth] + 1
            accepted[depth] = 0.98 * accepted[depth] + (depth < accepted_count)

    @property
    def rates(self) -> list[float]:
        """The rate at each depth, given that all guesses before it are accepted."""
        priors = None if self._prior is None else self._prior.rates
        rates, last = [], FIRST_RATE
        for depth in range(MAX_DRAFT_COUNT):
            prior, weight = (last, FIRST_WEIGHT) if priors is None else (priors[depth], POOL_WEIGHT)
            last = min((self._accepted[depth] + weight * prior) / (self._evaluated[depth] + weight), 0.999)
            rates.append(last)
        return rates

    @property
    def mean(self) -> float:
        """Share of the guesses of all depths that are accepted."""
        weight = sum(self._evaluated) + FIRST_WEIGHT
        return min((sum(self._accepted) + FIRST_WEIGHT * FIRST_RATE) / weight, 0.999)

    def tokens(self) -> list[float]:
        """Tokens that a round with K guesses is expected to commit, for K in [0, MAX_DRAFT_COUNT]."""
        tokens, reached = [1.0], 1.0
        for rate in self.rates:
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


class DrafterEstimates:
    """What is known of one drafter."""

    def __init__(self, verify_us: RowTable) -> None:
        """The cost of a draft's rows is like that of the target's until more is known."""
        self.acceptance = AcceptanceRates()
        self.step_us = RowTable(verify_us)
        self.overhead_us = ByLoad()  # of a round, beside both computations
        # Rows of a forward, of those that all sessions together have: 1 where all are verified at the same time, a half
        # where two groups take turns, of which one drafts while the other is verified.
        self.share = ByLoad()
        # By K, what rounds have cost in fact when most sessions had some: how groups form cannot be foretold.
        self.round_us = [ByLoad() for _ in range(MAX_DRAFT_COUNT + 1)]
        self.is_unasked = False  # its rounds come without a message from here, but for the first of a stretch
        self.explorer: SessionEstimates | None = None  # that finds out what it costs
        self.is_worth = True  # whether guesses were worth it when costs were last looked at
        self.allowed = 1  # sessions that may draft, while it has not been tried what that is like for more of them
        self.rounds_allowed = 0  # since that number grew

    def ramp(self, num_sessions: int) -> None:
        """Lets twice as many sessions draft when those that do have had two rounds each."""
        self.rounds_allowed += 1
        if self.allowed < num_sessions and self.rounds_allowed >= 2 * self.allowed:
            self.rounds_allowed, self.allowed = 0, 2 * self.allowed

    def judge(self, costs: Sequence[float]) -> None:
        """Looks whether guesses are worth it at the present costs of K; where not, the next time begins with one."""
        tokens = self.acceptance.tokens()
        gain = max(tokens[count] / costs[count] for count in range(1, MAX_DRAFT_COUNT + 1)) * costs[0]
        self.is_worth = gain > (1.0 if self.is_worth else WORTH_CHANGING)
        if not self.is_worth:
            self.allowed, self.rounds_allowed = 1, 0


@dataclass(frozen=True, slots=True)
class Choice:
    """How to go on: K, whose guesses, for how many rounds, and for K = 0 how many tokens may be committed unasked."""

    draft_count: int
    plain_budget: int = 0
    rounds: int = 1
    drafter: str = ""


class SessionEstimates:
    """What is known of one session, beside what the pool knows: of each drafter that it may have."""

    def __init__(self, pools: Mapping[str, AcceptanceRates]) -> None:
        self.acceptance = {drafter: AcceptanceRates(pool) for drafter, pool in pools.items()}
        self.is_drafting = False

    @property
    def drafters(self) -> Collection[str]:
        return self.acceptance


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
        self._costs: dict[str, list[float]] = {}
        self._num_observed = 0
        self._num_rounds = 0
        self._rounds_since_other = 0

    def session(self, *drafters: str) -> SessionEstimates:
        """A session that may have these drafters, of which it begins with what is known of all."""
        return SessionEstimates({each: self._estimates(each).acceptance for each in drafters or ("",)})

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
        if draft_count:
            self._observe_draft(committed, session, rows, unasked=unasked)
        elif unasked:
            self._plain_tokens += 1
            self._rounds_without_plain = 0
            self._plain_overhead_us.add(self._load, max(0, committed.round_us - verdict.compute_us))
        # What a round with a draft, or with one that failed, lost against plain decoding; plain tokens pay for it.
        plain_us = self.cost_us(0)
        if unasked and not draft_count:
            self._lost_us -= PROBE_COST * plain_us
        elif draft_count or proposal.fallback_reason:
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
        estimates = self._estimates(proposal.drafter)
        self._plain_tokens = 0
        self._rounds_without_plain += 1
        self._rounds_since_other += 1
        estimates.ramp(len(self._sessions))
        own = session.acceptance.get(proposal.drafter) if session else None
        for acceptance in (estimates.acceptance, *([own] if own else [])):
            acceptance.observe(committed.accepted_count, verdict.evaluated_count)
        if proposal.caught_up_count <= LARGE_CATCH_UP:
            num_forwards = max(proposal.forward_count, draft_count)
            draft_rows = proposal.row_count / num_forwards or 1
            estimates.step_us.add(draft_rows, proposal.compute_us / num_forwards)
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
            count = min(draft_count, MAX_DRAFT_COUNT)
            estimates.round_us[count].add(self._load, max(committed.round_us, 1), self._num_rounds)
            estimates.share.add(self._load, min(max(share, LEAST_SHARE), 1.0))

    def choose(self, limit: int, session: SessionEstimates | None = None, *, ready: bool = True) -> Choice:
        """The best K in [0, limit], or now and then one that keeps the estimates of the other side alive.

        Only a session that is ready, so that it carries the choice out at once, uses such an opportunity up: one that
        ends before its turn must not take it from the others.
        """
        most = min(limit, MAX_DRAFT_COUNT)
        choice = self._choose(most, session, ready=ready) if most > 0 else Choice(0)
        if session is not None and ready:
            self.note(session, is_drafting=choice.draft_count > 0)
        return choice

    def _choose(self, most: int, session: SessionEstimates | None, *, ready: bool) -> Choice:
        drafters = list(session.drafters) if session else [self._usual_drafter]
        unknown = self._unknown(drafters, session)
        known = [drafter for drafter in drafters if self._estimates(drafter).step_us.known]
        if unknown is not None and ready:
            self._estimates(unknown).explorer = session
        if unknown is not None or not known:
            return Choice(0, SHORT_BUDGET) if unknown is None else Choice(min(FIRST_GUESS, most), drafter=unknown)
        worths = {drafter: self._best(drafter, most, session) for drafter in known}
        drafter = max(known, key=lambda each: worths[each][0])
        others = [each for each in known if each != drafter]
        if others and ready and self._rounds_since_other >= OTHER_PROBE_ROUNDS * self._load:
            self._rounds_since_other = 0
            other = others[0]
            return Choice(worths[other][1], rounds=PROBE_ROUNDS, drafter=other)
        estimates, costs, best = self._estimates(drafter), self._costs_of(drafter), worths[drafter][1]
        tokens = self._tokens(drafter, session)
        if estimates.is_worth:
            may_draft = session is None or session.is_drafting or self._num_drafting < estimates.allowed
            if not may_draft or tokens[best] * costs[0] <= costs[best]:
                return Choice(0, SHORT_BUDGET)
            if not ready or self._rounds_without_plain < PLAIN_PROBE_ROUNDS * self._load:
                return Choice(best, drafter=drafter)
            self._rounds_without_plain = 0
            return Choice(0, 2)  # the unasked tokens are what measures plain decoding
        return self._plain_or_probe(drafter, best, ready=ready)

    def _unknown(self, drafters: Sequence[str], session: SessionEstimates | None) -> str | None:
        """A drafter of which nothing is known, for this session to find out; the others need not pay for it."""
        for drafter in drafters:
            estimates = self._estimates(drafter)
            if not estimates.step_us.known and (estimates.explorer is None or estimates.explorer is session):
                return drafter
        return None

    def _tokens(self, drafter: str, session: SessionEstimates | None) -> list[float]:
        own = session.acceptance.get(drafter) if session else None
        return (own or self._estimates(drafter).acceptance).tokens()

    def _best(self, drafter: str, most: int, session: SessionEstimates | None) -> tuple[float, int]:
        """The most tokens a microsecond with some guesses of a drafter, and how many these are."""
        costs, tokens = self._costs_of(drafter), self._tokens(drafter, session)
        return max((tokens[count] / costs[count], count) for count in range(1, most + 1))

    def _plain_or_probe(self, drafter: str, best: int, *, ready: bool) -> Choice:
        """Plain decoding, while guesses are not worth it; now and then some rounds that look whether they are."""
        minimum, maximum = PROBE_TOKENS
        if self._plain_tokens < minimum or (self._plain_tokens < maximum * self._load and self._lost_us > 0):
            return Choice(0, PLAIN_BUDGET)
        if ready:
            self._plain_tokens = 0
            self._estimates(drafter).step_us.renew()
        return Choice(best, rounds=PROBE_ROUNDS, drafter=drafter)

    @property
    def best_count(self) -> int:
        """K as it would be chosen now, for an observer on any thread; 0 says that plain decoding is faster."""
        drafter = self._usual_drafter
        if not self._estimates(drafter).step_us.known:
            return FIRST_GUESS
        return max(range(MAX_DRAFT_COUNT + 1), key=lambda count: self.speed(count, drafter))

    def speed(self, draft_count: int, drafter: str = "") -> float:
        """Tokens per microsecond that K draft tokens a round are expected to bring to each session."""
        tokens = self._estimates(drafter).acceptance.tokens()
        return tokens[draft_count] / self.cost_us(draft_count, drafter)

    def cost_us(self, draft_count: int, drafter: str = "") -> float:
        """Expected microseconds of a round with K draft tokens, if all sessions had such rounds at the present load.

        For K = 0 of a token of plain decoding. Where the target takes turns with groups of sessions, a round takes at
        least the forwards of all, and drafting hides behind them.
        """
        load = self._load
        if not draft_count:
            return max(self._verify_us.at(load) + self._plain_overhead_us.at(load), 1.0)
        estimates = self._estimates(drafter)
        share = estimates.share.at(load, 1.0) if load > 1 else 1.0
        draft_us = draft_count * estimates.step_us.at(max(1.0, share * load))
        verify_us = self._verify_us.at(max(draft_count + 1.0, share * load * (draft_count + 1)))
        # Groups are of unequal size, and most answers come from the larger ones.
        num_groups = 1 if share > ONE_GROUP else 2
        model_us = max(draft_us + verify_us + estimates.overhead_us.at(load), num_groups * verify_us, 1.0)
        return (
            model_us
            if estimates.is_unasked
            else estimates.round_us[draft_count].blend(load, model_us, self._num_rounds)
        )

    def _costs_of(self, drafter: str) -> list[float]:
        costs = self._costs.get(drafter)
        if costs is None:
            costs = self._costs[drafter] = [self.cost_us(count, drafter) for count in range(MAX_DRAFT_COUNT + 1)]
            self._estimates(drafter).judge(costs)
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
            estimates = self._drafters[drafter] = DrafterEstimates(self._verify_us)
        return estimates

    @property
    def _usual_drafter(self) -> str:
        return next(iter(self._drafters), "")
