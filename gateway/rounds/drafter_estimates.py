"""Estimates of one drafter, of the trees that it makes, and of one session. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from gateway.rounds.estimates import (
    MAX_DRAFT_COUNT,
    MAX_TREE_ROWS,
    AcceptanceRates,
    Average,
    ByLoad,
    RowTable,
    TreeGains,
)
from gateway.rounds.round import Proposal

TREE = " tree"  # after a drafter's name, for the trees that it makes
MOST_ASKED = 8  # sessions that try a drafter of which nothing becomes known
WORTH_CHANGING = 1.03  # how much faster guesses must look before sessions that decode plainly begin with them
CHAIN_COUNTS = tuple(range(1, MAX_DRAFT_COUNT + 1))
# Of larger proposals not every size is looked at, because that takes longer than it is worth.
TREE_COUNTS = (*CHAIN_COUNTS, 10, 12, 16, 20, 24, 32)


def estimates_key(proposal: Proposal) -> str:
    """Key of the estimates that a proposal belongs to: a drafter's trees, which have values, have one of their own."""
    return proposal.drafter + TREE if proposal.tree.values else proposal.drafter


class DrafterEstimates:
    """Estimates of one drafter, or of the trees that it makes."""

    def __init__(self, verify_us: RowTable, *, is_chain: bool = True) -> None:
        """The cost of a draft's rows is like that of the target's until more is known."""
        self.counts = CHAIN_COUNTS if is_chain else TREE_COUNTS
        """Numbers of guesses that are looked at."""
        self.acceptance = AcceptanceRates()
        self.gains = None if is_chain else TreeGains()
        self.levels = RowTable()  # by the guesses of a tree that were asked for, the forwards that they took
        self.has_depths = False  # whether trees are asked for with a depth, which then is their forwards
        self.depths: dict[int, int] = {}  # the best one by the guesses that are asked for
        self.width = Average()  # rows of a session in each
        self.step_us = RowTable(verify_us)
        self.overhead_us = ByLoad()  # of a round, beside both computations
        # Rows of a forward, of those that all sessions together have: 1 where all are verified at the same time, a half
        # where two groups take turns, of which one drafts while the other is verified.
        self.share = ByLoad()
        # By K, what rounds have cost in fact when most sessions had some: how groups form cannot be foretold.
        # Of trees by the forwards that made them too.
        self.round_us: defaultdict[tuple[int, int], ByLoad] = defaultdict(ByLoad)
        self.is_unasked = False  # its rounds come without a message from here, but for the first of a stretch
        self.explorer: SessionEstimates | None = None  # that finds out what it costs
        self.num_asked = 0  # sessions that were to find out what it costs
        self.is_worth = True  # whether guesses were worth it when costs were last looked at
        self.allowed = 1  # sessions that may draft, while it has not been tried what that is like for more of them
        self.rounds_allowed = 0  # since that number grew

    @property
    def is_worth_asking(self) -> bool:
        """Whether nothing is known of it, and few sessions have been sent to find out; it may never guess anything."""
        return not self.step_us.known and self.num_asked < MOST_ASKED

    def ramp(self, num_sessions: int) -> None:
        """Lets twice as many sessions draft when those that do have had two rounds each."""
        self.rounds_allowed += 1
        if self.allowed < num_sessions and self.rounds_allowed >= 2 * self.allowed:
            self.rounds_allowed, self.allowed = 0, 2 * self.allowed

    def tokens(self, own: AcceptanceRates | None = None) -> list[float]:
        """Tokens that a round with K guesses is expected to commit, by K; `own` are the rates of one session."""
        if self.gains is None:
            return (own or self.acceptance).tokens()
        depths = (self.depths.get(count, MAX_DRAFT_COUNT) for count in range(MAX_TREE_ROWS + 1))
        return [self.gains.at(count, depth) for count, depth in enumerate(depths)]

    def judge(self, costs: Mapping[int, float]) -> None:
        """Looks whether guesses are worth it at the present costs of K; where not, the next time begins with one."""
        tokens = self.tokens()
        gain = max(tokens[count] / costs[count] for count in self.counts) * costs[0]
        self.is_worth = gain > (1.0 if self.is_worth else WORTH_CHANGING)
        if not self.is_worth:
            self.allowed, self.rounds_allowed = 1, 0


class SessionEstimates:
    """Estimates of one session, beside those of the pool: for each drafter that it may have."""

    def __init__(self, pools: Mapping[str, AcceptanceRates]) -> None:
        self.acceptance = {drafter: AcceptanceRates(pool) for drafter, pool in pools.items()}
        self.is_drafting = False

    @property
    def drafters(self) -> Collection[str]:
        return self.acceptance
