"""How many tokens to draft: the policy that learns what pays, and the plan of each round within all limits. Pure.

With acceptance rate a and K draft tokens a round commits tau(K) = (1 - a^(K+1)) / (1 - a) tokens (Leviathan et al.
2023), and it costs K draft steps, one forward of the target over K + 1 rows, and the way of the messages. The best K
has the largest tau(K) / cost(K); K = 0 is plain decoding, which pays no message per token. One policy serves all
requests of a gateway, because they share the machines that it measures. Its estimates move, and no outlier rules them,
not even a first one.
"""

from dataclasses import dataclass, replace
from statistics import median

from gateway.rounds.round import FallbackReason, Proposal, Round, TokenLog

NUM_SEEDS = 3  # samples of which the median begins an estimate
OUTLIER = 4.0  # a sample counts as so many times what was expected at most
MAX_DRAFT_COUNT = 8
FIRST_GUESS = 4  # before anything is known
PLAIN_PROBE_ROUNDS = 64  # speculative rounds between two looks at what plain decoding costs
PROBE_COST = 0.005  # share of the time that probes, which look for a faster draft, may cost
PROBE_TOKENS = (32, 2048)  # minimum and maximum of plain tokens between two probes
PROBE_ROUNDS = 4  # a draft that has to catch up in the first one is warm in the others
LARGE_CATCH_UP = 16  # a draft that had to read more than this says nothing about the cost of a step
PLAIN_BUDGET = 32  # tokens committed unasked while plain decoding is what is wanted
WAITING_BUDGET = 8  # the same while the draft is away and may come back at any time


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


class Line:
    """Least squares of a cost over the number of rows, recent samples first.

    Samples may all have the same number of rows, so the slope is drawn towards a tenth of the mean cost a row.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._seeds: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Adds the cost y of x rows."""
        if self._weight:
            self._sum(x, min(y, OUTLIER * self.at(x) + 1.0))
            return
        self._seeds.append((x, y))
        if len(self._seeds) == NUM_SEEDS:
            maximum = OUTLIER * self.at(x) + 1.0
            for seed_x, seed_y in self._seeds:
                self._sum(seed_x, min(seed_y, maximum))

    def at(self, x: float) -> float:
        """Expected cost of x rows; 0 before the first sample, and never falling with x."""
        if not self._weight:
            return median(y for _, y in self._seeds) if self._seeds else 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        together = self._xy / self._weight - mean_x * mean_y
        pull = 0.05
        slope = max(0.0, (together + pull * 0.1 * mean_y) / (spread + pull))
        return max(mean_y + slope * (x - mean_x), 0.1 * mean_y)

    def _sum(self, x: float, y: float) -> None:
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        new = (1.0, x, y, x * x, x * y)
        self._weight, self._x, self._y, self._xx, self._xy = (
            0.97 * old + added for old, added in zip(sums, new, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """How to go on: K, for how many rounds, and for K = 0 how many tokens the target may commit unasked."""

    draft_count: int
    plain_budget: int = 0
    rounds: int = 1


class SpeculationPolicy:
    """Learns from every round of the gateway; `choose` answers for one round of one request."""

    def __init__(self) -> None:
        self._accepted, self._evaluated = 0.7 * 4, 4.0  # alpha 0.7, worth four tokens
        self._draft_token_us = Average()
        self._verify_us = Line()
        self._round_overhead_us = Average()
        self._plain_overhead_us = Average()
        self._plain_tokens = 0
        self._rounds_without_plain = 0
        self._lost_us = 0.0  # time that drafting has cost above plain decoding and that is not yet earned back

    @property
    def acceptance_rate(self) -> float:
        """Pooled estimate of the share of evaluated draft tokens that the target accepts, recent rounds first."""
        return min(self._accepted / self._evaluated, 0.999)

    def observe(self, committed: Round, *, unasked: bool) -> None:
        """Learns from a round that is not a request's first one; unasked ones came without a message from here."""
        proposal, verdict = committed.proposal, committed.verdict
        self._verify_us.add(committed.draft_count + 1, verdict.compute_us)
        if committed.draft_count:
            self._plain_tokens = 0
            self._rounds_without_plain += 1
            # Each round that tested anything takes a fiftieth off the weight of the past.
            keep = 0.98 if verdict.evaluated_count else 1.0
            self._accepted = keep * self._accepted + committed.accepted_count
            self._evaluated = keep * self._evaluated + verdict.evaluated_count
            if proposal.caught_up_count <= LARGE_CATCH_UP:
                self._draft_token_us.add(proposal.compute_us / committed.draft_count)
            self._round_overhead_us.add(max(0, committed.round_us - proposal.compute_us - verdict.compute_us))
        elif unasked:
            self._plain_tokens += 1
            self._rounds_without_plain = 0
            self._plain_overhead_us.add(max(0, committed.round_us - verdict.compute_us))
        # What a round with a draft, or with one that failed, lost against plain decoding; plain tokens pay for it.
        plain_us = self.cost_us(0)
        if unasked:
            self._lost_us -= PROBE_COST * plain_us
        elif committed.draft_count or proposal.fallback_reason:
            self._lost_us += committed.round_us - len(committed.token_ids) * plain_us
        self._lost_us = max(self._lost_us, 0.0)

    def choose(self, limit: int, *, ready: bool = True) -> Choice:
        """The best K in [0, limit], or now and then one that keeps the estimates of the other side alive.

        Only a request that is ready, so that it carries the choice out at once, uses such an opportunity up: one that
        ends before its turn must not take it from the others.
        """
        counts = range(1, min(limit, MAX_DRAFT_COUNT) + 1)
        if not counts:
            return Choice(0)
        if not self._draft_token_us.known:
            return Choice(min(FIRST_GUESS, counts[-1]))
        best = max(counts, key=self.speed)
        if self.speed(best) > self.speed(0):
            if not ready or self._rounds_without_plain < PLAIN_PROBE_ROUNDS:
                return Choice(best)
            self._rounds_without_plain = 0
            return Choice(0, 2)  # the unasked tokens are what measures plain decoding
        minimum, maximum = PROBE_TOKENS
        if self._plain_tokens < minimum or (self._plain_tokens < maximum and self._lost_us > 0):
            return Choice(0, PLAIN_BUDGET)
        if ready:
            self._plain_tokens = 0
            self._draft_token_us.renew()
        return Choice(best, rounds=PROBE_ROUNDS)

    @property
    def best_count(self) -> int:
        """K as it would be chosen now, for an observer on any thread; 0 says that plain decoding is faster."""
        return max(range(MAX_DRAFT_COUNT + 1), key=self.speed) if self._draft_token_us.known else FIRST_GUESS

    def speed(self, draft_count: int) -> float:
        """Tokens per microsecond that K draft tokens a round are expected to bring."""
        alpha = self.acceptance_rate
        tau = sum(alpha**power for power in range(draft_count + 1))
        return tau / self.cost_us(draft_count)

    def cost_us(self, draft_count: int) -> float:
        """Expected microseconds of a round with K draft tokens; for K = 0 of a token of plain decoding."""
        overhead = self._round_overhead_us if draft_count else self._plain_overhead_us
        cost = draft_count * self._draft_token_us.mean + self._verify_us.at(draft_count + 1) + overhead.mean
        return max(cost, 1.0)


@dataclass(frozen=True, slots=True)
class DraftOutlook:
    """What can be expected of a draft session now; None where nothing is in the way, or nobody knows."""

    obstacle: FallbackReason | None = None  # why it is no use to ask for guesses now
    context_len: int | None = None
    max_draft_count: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round: draft tokens to ask for, tokens that the target may commit unasked, and why there is no draft."""

    draft_count: int
    plain_budget: int
    fallback_reason: FallbackReason | None = None

    def explain(self, proposal: Proposal) -> Proposal:
        """The proposal, with this plan's reason where it has none of its own."""
        is_explained = self.fallback_reason is None or proposal.fallback_reason is not None
        return proposal if is_explained else replace(proposal, fallback_reason=self.fallback_reason)


class RoundPlanner:
    """The planner of one request. draft_count None lets the policy choose for every round; 0 never speculates."""

    def __init__(self, policy: SpeculationPolicy, draft_count: int | None, max_len: int, max_draft_count: int) -> None:
        self._policy = policy
        self._draft_count = draft_count
        self._max_len = max_len
        self._max_draft_count = max_draft_count
        self._next: Choice | None = None
        self._plain_plan = RoundPlan(0, 0)
        self._unasked = False

    def expects_draft(self) -> bool:
        """Whether the draft should read the prompt at once, while the target does."""
        return self._choose(self._max_draft_count, ready=False).draft_count > 0

    def plan(self, log: TokenLog, outstanding: int, draft: DraftOutlook) -> RoundPlan:
        """Plans the round on top of the log, while the target may still commit `outstanding` tokens unasked."""
        if 2 * outstanding > self._plain_plan.plain_budget > 0:
            # Nothing is sent in the first half of a stretch, so there is nothing to choose at every token.
            self._unasked = True
            return RoundPlan(0, 0, self._plain_plan.fallback_reason)
        is_first, limit = len(log) == log.prompt_len, min(self._max_draft_count, self._max_len - len(log) - 1)
        past_context = draft.context_len is not None and len(log) + 1 > draft.context_len
        ready = not (is_first or outstanding or past_context or draft.obstacle)
        choice = self._next or self._choose(limit, ready=ready)
        self._next, self._unasked = None, outstanding > 0
        if choice.draft_count == 0 or limit == 0:
            return self._plain(choice.plain_budget)
        limit = min(limit, draft.max_draft_count or limit)
        if past_context:
            return self._plain(PLAIN_BUDGET, FallbackReason.DRAFT_CONTEXT, is_first)
        if draft.obstacle is not None:
            return self._plain(WAITING_BUDGET, draft.obstacle, is_first)
        if outstanding or is_first:
            # Choosing waits for the end of the stretch, or for the prompt's own pass.
            return RoundPlan(0, 0, None if is_first else self._plain_plan.fallback_reason)
        if choice.rounds > 1:
            self._next = replace(choice, rounds=choice.rounds - 1)
        room = limit if draft.context_len is None else draft.context_len - len(log)
        return RoundPlan(min(choice.draft_count, limit, room), 0)

    def observe(self, committed: Round) -> None:
        """Passes a round on to the policy, except for the prompt's own pass, which costs what the prompt costs."""
        if not committed.is_first:
            self._policy.observe(committed, unasked=self._unasked)

    def _plain(self, plain_budget: int, reason: FallbackReason | None = None, is_first: bool = False) -> RoundPlan:
        self._plain_plan = RoundPlan(0, plain_budget, reason)
        return RoundPlan(0, plain_budget, None if is_first else reason)

    def _choose(self, limit: int, *, ready: bool) -> Choice:
        if self._draft_count is None:
            return self._policy.choose(limit, ready=ready)
        return Choice(self._draft_count, 0 if self._draft_count else PLAIN_BUDGET)
