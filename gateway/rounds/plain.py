"""Costs of plain decoding, which guesses have to beat: learnt while no session has any. Pure.

Beside guesses a plain token takes longer than it would alone, so what is seen then says too much.
"""

from gateway.rounds.by_load import ByLoad, load_key
from gateway.rounds.round import LOOKUP, Round
from gateway.rounds.tuning import PolicyTuning
from outrider.estimates.row_costs import ENTRY_MOVES, RowCosts


class PlainCosts:
    """Costs of tokens without guesses, by load; `now` counts rounds of all sessions."""

    def __init__(self, verify_us: RowCosts, tuning: PolicyTuning) -> None:
        """`verify_us` is the cost of the target's forwards by their rows."""
        self._verify_us = verify_us
        self._tuning = tuning
        # In forwards of the same rounds: what else runs on the machine makes both slower, and while sessions guess only
        # forwards are seen.
        self._token_forwards = ByLoad(ENTRY_MOVES)
        self._overhead_us = ByLoad()
        self._asked_overhead_us = ByLoad()
        self._sought: dict[int, int] = {}
        """Round since when it is tried to see plain decoding at a load."""
        self._rounds_without_guesses = 0
        self._pending_us: list[tuple[int, int]] = []
        """Rounds, and their forwards, of which not all sessions have had one: what a busy gateway reads late comes
        several at a time, and only their sum says what a token takes."""

    def observe(self, committed: Round, load: int, now: int, *, unasked: bool) -> None:
        """Learns from a round, of which `unasked` says that it came without a message."""
        proposal, verdict = committed.proposal, committed.verdict
        has_guesses = committed.draft_count > 0
        self._rounds_without_guesses = 0 if has_guesses else self._rounds_without_guesses + 1
        overhead_us = max(0, committed.round_us - verdict.compute_us)
        if not unasked and (not has_guesses or proposal.drafter == LOOKUP):
            # With its wait for a forward of the others: an unasked round has its part in each of them.
            self._asked_overhead_us.add(load, overhead_us)
        if has_guesses or not unasked:
            return
        # A session that was verified beside guesses of others has had its round since then, or had them beside it.
        is_pure = self.is_pure(committed, load)
        if not is_pure:
            self._pending_us.clear()
        else:
            self._pending_us.append((committed.round_us, verdict.compute_us))
            if len(self._pending_us) >= load:
                rounds_us, forwards_us = map(sum, zip(*self._pending_us, strict=True))
                forwards = max(rounds_us, 1) / max(forwards_us, 1)
                self._token_forwards.add(load, forwards, now, len(self._pending_us))
                self._pending_us.clear()
        if is_pure or not self._overhead_us.known(load):
            self._overhead_us.add(load, overhead_us, now)

    def is_pure(self, committed: Round, load: int) -> bool:
        """Whether a round, which was observed last, had no guesses beside it or before it."""
        num_rows = committed.verdict.row_count / max(committed.verdict.forward_count, 1)
        return self._rounds_without_guesses > 2 * load and num_rows <= load

    def token_us(self, load: int, now: int) -> float:
        """Expected microseconds of an unasked token, if no session had guesses."""
        forward_us = max(self._verify_us.at(load), 1.0)
        model = 1 + self._overhead_us.blend(load, 0.0, now, self._tuning) / forward_us
        return self._token_forwards.blend(load, model, now, self._tuning) * forward_us

    def overhead_us(self, load: int) -> float:
        """Microseconds of an unasked token beside the target's forward."""
        return self._overhead_us.scaled(load)

    def asked_overhead_us(self, load: int) -> float:
        """Microseconds of an asked round without a draft, beside the forward: with a lookup's guesses, or first."""
        return self._asked_overhead_us.scaled(load)

    def is_known(self, load: int, now: int) -> bool:
        """Whether it was seen at this load lately, or cannot be: sessions in long stretches do not all stop."""
        tuning, key = self._tuning, load_key(load)
        most_age = tuning.plain_age_rounds * load
        if self._token_forwards.count(load, now, most_age) >= tuning.plain_rounds * load:
            self._sought.pop(key, None)
            return True
        if now - self._sought.setdefault(key, now) > most_age:
            self._sought[key] = now
        return now - self._sought[key] > tuning.plain_patience_rounds * load
