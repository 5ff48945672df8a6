"""The record of a beam search: live beams, finished sequences, and when it is over. It can rebuild every session.

What ends a search, and which sequences are the answer, is that of transformers' beam search; the numbers are those of
the target, and scores are compared in float64.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.rounds.round import Proposal, Round, TokenLog, TokenOrigin, Verdict
from outrider.beams import BeamSearch, BeamStep, LiveBeam
from outrider.errors import ProtocolViolation
from outrider.parameters import FinishReason, SessionSpec
from outrider.token_tree import TokenTree


class Hypothesis(NamedTuple):
    """A finished sequence: its tokens after the prompt, the sum of their log-probabilities, and its rank by score."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


class BeamRecord(TokenLog):
    """State of a search. As a token log it has the length of the live beams, and the prompt for its tokens."""

    def __init__(self, spec: SessionSpec, search: BeamSearch) -> None:
        super().__init__(spec.token_ids)
        self.search = search
        self.live: tuple[LiveBeam, ...] = ()
        """Live beams, best first; none at the prompt."""
        self.finished: tuple[Hypothesis, ...] = ()
        """Finished sequences, best first, at most as many as beams."""
        self._spec = spec
        self._output_len = 0

    def __len__(self) -> int:
        return self.prompt_len + self._output_len

    def take(self, steps: Sequence[BeamStep]) -> None:
        """Makes the steps of a verdict on this length, up to the one that ends the search.

        Raises ProtocolViolation about a step that no search of these beams can have made.
        """
        if not steps:
            raise ProtocolViolation("a verdict on beams came without a step")
        for step in steps:
            if self.finish_reason is not None:
                # The target does not know what has finished, and goes on to the end of what was proposed.
                return
            parents = self.live or (LiveBeam((), 0.0),)
            candidates = (*step.live, *step.ended)
            if len(step.live) > self.search.width or any(not 0 <= each.parent < len(parents) for each in candidates):
                raise ProtocolViolation(f"a step names beams that {len(parents)} live ones cannot have led to")
            self._output_len += 1
            extended = [(*parents[each.parent].token_ids, each.token_id) for each in candidates]
            found = [*self.finished]
            for each, token_ids in zip(step.ended, extended[len(step.live) :], strict=True):
                if each.token_id in self._spec.eos_token_ids:
                    reason = FinishReason.EOS
                elif each.token_id in self._spec.stop_token_ids:
                    reason = FinishReason.STOP_TOKEN
                elif len(self) >= self._spec.max_len:
                    reason = FinishReason.LENGTH
                else:
                    raise ProtocolViolation(f"a sequence has ended with token {each.token_id}, which ends nothing")
                score = each.score / self._output_len**self.search.length_penalty
                found.append(Hypothesis(token_ids, each.score, score, reason))
            self.finished = tuple(sorted(found, key=lambda each: -each.score)[: self.search.width])
            self.live = tuple(map(LiveBeam, extended, [each.score for each in step.live]))
            if self._is_over:
                if not self.finished:
                    raise ProtocolViolation("a search has ended without a finished sequence")
                self.finish_reason = self.finished[0].finish_reason

    @property
    def room(self) -> int:
        """Number of steps until every sequence ends."""
        return self._spec.max_len - len(self)

    def commit_steps(self, proposal: Proposal, verdict: Verdict, steps: Sequence[BeamStep]) -> Round:
        """Takes the steps of a verdict; returns its round, without tokens and with the guesses alone.

        Raises ProtocolViolation as `take`, and about a verdict that is not about this length and proposal.
        """
        proposal = verdict.about(proposal)
        num_beams, tree, rows = len(self.live), proposal.tree, verdict.accepted_rows
        last_row = rows[-1] if rows else 0
        # A path begins with the beam's own row, which was not guessed.
        is_path = last_row <= len(tree) and rows == tree.path(last_row)[1:]
        if self.finish_reason is not None or verdict.base_len != len(self):
            raise ProtocolViolation(f"a verdict on length {verdict.base_len} came for beams of {len(self)} tokens")
        if not is_path or len(rows) != len(steps) - 1:
            raise ProtocolViolation(f"accepted rows {list(rows)} are no path of {len(steps) - 1} guesses")
        is_first = not self.live
        self.take(steps)
        parents = tuple(max(parent - num_beams, 0) for parent in tree.parents[num_beams:])
        guesses = TokenTree(tree.token_ids[num_beams:], parents)
        accepted = tuple(row - num_beams for row in rows)
        last = TokenOrigin.PLAIN if not guesses else TokenOrigin.CORRECTION
        started_ns, self._started_ns = self._started_ns, self._clock_ns()
        before_ns, self._committed_ns = self._committed_ns, self._started_ns
        return Round(
            replace(proposal, tree=guesses),
            replace(verdict, accepted_rows=accepted),
            (),
            (*(TokenOrigin.ACCEPTED for _ in accepted), last),
            (self._started_ns - started_ns) // 1000,
            (self._committed_ns - before_ns) // 1000,
            is_first,
        )

    @property
    def _is_over(self) -> bool:
        """Whether no live beam is left, or none that transformers would follow any further."""
        if not self.live:
            return True
        if len(self.finished) < self.search.width:
            return False
        early_stopping, penalty = self.search.early_stopping, self.search.length_penalty
        at_end = early_stopping == "never" and penalty > 0
        length = self._spec.max_len - self.prompt_len if at_end else self._output_len
        return early_stopping == "first" or self.live[0].score / length**penalty <= self.finished[-1].score
