"""Account of guesses: the time that all sessions together have lost with them against plain decoding. Pure.

What rounds cost is learnt from forwards and rounds one by one, and may be wrong in what none of them shows: a forward
that begins later because a message with guesses came later, a processor that is busy beside it. What counts in the end
is tokens a second of the whole, so that is checked too, at each load, by a cumulative sum (Page, "Continuous Inspection
Schemes", Biometrika 41, 1954): it grows by what a round lost, falls by what one won, and is never below nothing. Where
it is too large there are no guesses at this load for a while, and a longer one each time.
"""

from collections import defaultdict
from dataclasses import dataclass

from gateway.rounds.by_load import load_key
from gateway.rounds.tuning import PolicyTuning


@dataclass(slots=True)
class _Sum:
    """Time and tokens of the rounds with guesses, or beside some, since nothing was lost."""

    us: float = 0.0
    tokens: float = 0.0
    num_tried: float = 0.0
    """Tokens with guesses since the last rest."""
    rest: float = 0.0
    """Plain tokens that are left of a rest."""
    times: int = 1
    """How many times as long as the first one the next rest is."""


class GuessAccount:
    """What guesses have lost at each load, and whether there should be none for a while."""

    def __init__(self, tuning: PolicyTuning) -> None:
        self._tuning = tuning
        self._sums: defaultdict[int, _Sum] = defaultdict(_Sum)

    def observe(self, load: int, round_us: float, num_tokens: int, plain_us: float, *, is_pure: bool) -> None:
        """Adds a round of a session, where a plain token takes `plain_us`; a pure one had no guesses beside it."""
        tuning, found = self._tuning, self._sums[load_key(load)]
        most_lost = tuning.most_lost + tuning.most_lost_each * load
        if found.rest:
            found.rest -= num_tokens * is_pure
            # Plain decoding may turn out to be slower than it was believed to be.
            if found.rest <= 0 or found.us / plain_us - found.tokens < most_lost / 2:
                found.us = found.tokens = found.rest = 0.0
            return
        if is_pure:
            return
        # A machine that stood still says nothing of guesses.
        found.us += min(round_us, (num_tokens + tuning.most_lost_round) * plain_us)
        found.tokens += num_tokens
        found.num_tried += num_tokens
        lost = found.us / plain_us - found.tokens
        if lost <= 0:
            found.us = found.tokens = 0.0
        elif lost > most_lost:
            first = tuning.rest_times * most_lost
            found.times = 1 if found.num_tried > first else found.times
            found.rest, found.num_tried = found.times * first, 0.0
            found.times = min(2 * found.times, tuning.most_rests)

    def rest(self, load: int) -> float:
        """Plain tokens of all sessions for which there should be no guesses; 0 where there may be some."""
        key = load_key(load)
        return self._sums[key].rest if key in self._sums else 0.0
