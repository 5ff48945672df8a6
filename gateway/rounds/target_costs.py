"""Costs of a target's forwards at the present load, as far as rounds have shown. Pure.

Forwards are shared: with N sessions on the target, plain decoding costs each of them the forward of N rows, and rounds
with K guesses one of up to N (K + 1) rows, so that one more row is paid by everybody. The cost of a forward is a table
over its rows and no line: it is a staircase on CPUs, and flat up to the tiles of an accelerator.
"""

import math

from gateway.rounds.branching import most_within
from gateway.rounds.plain import PlainCosts
from gateway.rounds.round import Round
from gateway.rounds.tuning import PolicyTuning
from outrider.estimates.row_costs import Average, RowCosts


class TargetCosts:
    """Costs of forwards and of plain decoding on one target, learnt from the rounds of all sessions."""

    def __init__(self, tuning: PolicyTuning) -> None:
        self.tuning = tuning
        self.verify_us = RowCosts()
        self.load = 1  # sessions on the target, those of other gateways too
        self.most_branches = 0  # of a session, as the gateway was set
        self.num_rounds = 0
        self.plain = PlainCosts(self.verify_us, tuning)
        self.rows = Average()  # of the target's forwards
        self.tokens = Average()  # that a round commits
        self._forward = (0.0, 0)  # rows and microseconds of the target's last one
        self._num_repeats = 0  # verdicts of it after the first one
        self._rounds_since_prompt = math.inf

    @property
    def knows_plain(self) -> bool:
        """Whether it was seen what plain decoding costs at this load; alone it is what a forward costs."""
        return self.load == 1 or self.plain.is_known(self.load, self.num_rounds)

    @property
    def plain_us(self) -> float:
        """Expected microseconds of a token of plain decoding at this load."""
        return self.plain.token_us(self.load, self.num_rounds)

    def branch_limit(self, draft_count: int) -> int:
        """Most branches of a session with K guesses: as the gateway was set, and so many that messages stay small.

        All sessions together have no more than an accelerator makes at the price of one.
        """
        tuning = self.tuning
        limits = self.most_branches, most_within(tuning.branch_bytes, draft_count), tuning.branch_rows // self.load
        return max(1, min(limits))

    def observe_forward(self, committed: Round, num_sessions: int) -> bool:
        """Learns what a forward costs, and the load; returns whether the round's own time says what rounds take.

        `num_sessions` are at work here, of which the target may not have heard yet.
        """
        verdict, rows = committed.verdict, rows_of(committed)
        self.load = max(verdict.session_count, num_sessions, 1)
        forward = rows, verdict.compute_us
        self._num_repeats = self._num_repeats + 1 if forward == self._forward else 0
        self._forward = forward
        if self._num_repeats % self.load == 0:
            # All sessions that had a part in a forward have its times, and it is one sample.
            self.verify_us.add(rows, verdict.compute_us / max(verdict.forward_count, 1))
        # Prompts are paid by the token and not by the round: what waited for one says nothing of rounds.
        self._rounds_since_prompt = 0 if verdict.prompt_row_count else self._rounds_since_prompt + 1
        has_waited = bool(verdict.hop.queue_us) and self._rounds_since_prompt <= self.load
        is_telling = self._rounds_since_prompt > 0 and not has_waited
        if is_telling:
            self.rows.add(rows)
            self.tokens.add(len(committed.token_ids))
        return is_telling


def rows_of(committed: Round) -> float:
    """Rows of a forward of the target in a round."""
    verdict = committed.verdict
    return verdict.row_count / max(verdict.forward_count, 1) or committed.draft_count + 1
