"""Exploration: rounds and sessions that are spent on finding out what is not known, or may have changed. Pure.

What guesses cost and bring is learnt from rounds that have some, and what plain decoding costs from those that have
none, so whichever is not used is looked at now and then, for a share of the time that plain tokens have to earn. One
session finds out about a drafter of which nothing is known, and the others need not pay for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.rounds.choice import Case, Choice
from gateway.rounds.costs import RoundCosts, SessionEstimates
from gateway.rounds.round import DrafterId
from gateway.rounds.tuning import Margin, PolicyTuning


@dataclass(slots=True)
class Trial:
    """How far a drafter has been tried."""

    explorer: SessionEstimates | None = None
    """Session that finds out what it costs."""
    num_asked: int = 0
    """Sessions that were to find out what it costs."""
    is_worth: bool = True
    """Whether guesses were worth it when costs were last looked at."""
    allowed: int = 1
    """Sessions that may draft, while it has not been tried what that is like for more of them."""
    num_rounds: int = 0
    """Rounds with its guesses."""
    rounds_allowed: int = 0
    """Rounds since that number grew."""

    def ramp(self, num_sessions: int, explorer_rounds: int) -> None:
        """Lets twice as many sessions draft when those that do have had two rounds each, and explorers take turns."""
        self.rounds_allowed += 1
        self.num_rounds += 1
        if self.num_rounds % explorer_rounds == 0:
            self.explorer = None
        if self.allowed < num_sessions and self.rounds_allowed >= 2 * self.allowed:
            self.rounds_allowed, self.allowed = 0, 2 * self.allowed

    def judge(self, gain: float, margin: Margin, *, is_sure: bool = True) -> None:
        """Looks whether guesses are worth it, which are so many times as fast; else the next time begins with one.

        What is not sure ends nothing.
        """
        least = margin.keeping if self.is_worth else margin.changing
        self.is_worth = gain > least or (self.is_worth and not is_sure)
        if not self.is_worth:
            self.allowed, self.rounds_allowed = 1, 0


class Exploration:
    """Knows what is to be looked at, of drafters and of plain decoding."""

    def __init__(self, costs: RoundCosts, tuning: PolicyTuning) -> None:
        self.trials: defaultdict[DrafterId, Trial] = defaultdict(Trial)
        self._costs = costs
        self._tuning = tuning
        self._plain_tokens = 0
        self._rounds_without_plain = 0
        self._rounds_since_other = 0
        self._lost_us = 0.0  # time that drafting has cost above plain decoding and that is not yet earned back
        self._num_picked = 0

    def pick(self, drafters: Sequence[DrafterId], speed: Callable[[DrafterId], float]) -> DrafterId:
        """Drafter of those that a target has in its process that a session should have; it has one until its end.

        One of which nothing is known goes first, then the fastest, and now and then another one, to be looked at again.
        """
        for drafter in drafters:
            trial = self.trials[drafter]
            # Few sessions are sent to find out; it may never guess anything.
            if not self._costs.is_known(drafter) and trial.num_asked < self._tuning.most_asked:
                trial.num_asked += 1
                return drafter
        drafters = [each for each in drafters if self._costs.is_known(each)] or drafters
        if len(drafters) == 1:
            return drafters[0]
        self._num_picked += 1
        if self._num_picked % self._tuning.other_pick == 0:
            return drafters[self._num_picked // self._tuning.other_pick % len(drafters)]
        return max(drafters, key=speed)

    def unknown(
        self, drafters: Iterable[DrafterId], session: SessionEstimates | None, hope: Callable[[DrafterId], float]
    ) -> DrafterId | None:
        """A drafter of which too little is known, for this session to find out.

        `hope` is how many times as fast as plain decoding its guesses may be, for all that is known.
        """
        changing = self._tuning.margin(self._costs.load).changing
        for drafter in drafters:
            trial = self.trials[drafter]
            if trial.explorer not in {None, session}:
                continue
            # More tests of one that does not look worth it may change that.
            wanted = self._tuning.least_tests * min(self._costs.load, self._tuning.most_explorers)
            is_tested = trial.is_worth or trial.num_rounds >= wanted
            if not self._costs.is_known(drafter) or (not is_tested and hope(drafter) > changing):
                return drafter
        return None

    @property
    def other_turn(self) -> int | None:
        """Number of the turn of another drafter than the fastest; None while none is due."""
        is_due = self._rounds_since_other >= self._tuning.other_probe_rounds * self._costs.load
        return self._costs.num_rounds if is_due else None

    @property
    def is_probe_due(self) -> bool:
        """Whether guesses that are not worth it are looked at again."""
        minimum, maximum = self._tuning.probe_tokens
        is_paid = self._lost_us <= 0 or self._plain_tokens >= maximum * self._costs.load
        return self._plain_tokens >= minimum and is_paid

    @property
    def is_plain_due(self) -> bool:
        """Whether the cost of plain decoding is looked at again."""
        return self._rounds_without_plain >= self._tuning.plain_probe_rounds * self._costs.load

    def begin(self, choice: Choice, session: SessionEstimates | None) -> None:
        """Counts a choice that a session carries out at once."""
        match choice.case:
            case Case.EXPLORING:
                self.trials[choice.drafter].explorer = session
            case Case.OTHER:
                self._rounds_since_other = 0
            case Case.PROBE:
                self._plain_tokens = 0
                probed = self._costs.of(choice.drafter)
                probed.step_us.renew()
                probed.acceptance.renew()
            case Case.PLAIN_LOOK:
                self._rounds_without_plain = 0

    def leave(self, session: SessionEstimates) -> None:
        """A session has ended, and finds nothing out any more."""
        for trial in self.trials.values():
            if trial.explorer is session:
                trial.explorer = None

    def drafted(self, drafter: DrafterId, num_sessions: int) -> None:
        """Counts a round with guesses of a drafter."""
        self._plain_tokens = 0
        self._rounds_without_plain += 1
        self._rounds_since_other += 1
        self.trials[drafter].ramp(num_sessions, self._tuning.explorer_rounds)

    @property
    def owes(self) -> bool:
        """Whether drafting has cost time that is not yet earned back."""
        return self._lost_us > 0

    def decoded_plainly(self, plain_us: float) -> None:
        """Counts an unasked token, which took so long; how long is of interest only while something is owed."""
        self._plain_tokens += 1
        self._rounds_without_plain = 0
        self.pay(-self._tuning.probe_cost * plain_us)

    def pay(self, lost_us: float) -> None:
        """Adds time that a round lost against plain decoding, below 0 where it earned some."""
        self._lost_us = max(self._lost_us + lost_us, 0.0)
