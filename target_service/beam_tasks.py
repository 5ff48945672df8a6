"""A beam search on its way to one verdict: a pass over all live beams with their guesses, and the steps that it allows.

Every step is computed from the target's own rows. It stands, and the next one needs no other pass, when each beam that
it keeps is a row of the guesses; the first step that does not is the last of the verdict. So a pass makes one step at
least, and none that a search without guesses would not make.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.beams import BeamStep, BeamTree
from outrider.engine.batching import Feed
from outrider.engine.beams import Beams, Place, beam_logprobs
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.beams import select
from outrider.engine.sampling.draw import DrawInput, row_contexts, undrawable
from outrider.engine.sampling.transforms import index
from outrider.engine.session import Session
from outrider.engine.walk import child_with
from outrider.errors import OutriderError
from outrider.estimates.timing import ComputeTimes, Meter
from outrider.parameters import FinishReason, SessionSpec
from outrider.token_tree import EMPTY
from target_service.acceptance import TargetVerdict
from target_service.block_allocator import BlockAllocator


@dataclass(slots=True, eq=False)
class BeamTask:
    """Step of a session's live beams; `trees` has the guesses after each."""

    beams: Beams
    spec: SessionSpec
    width: int
    trees: list[BeamTree]
    meter: Meter
    on_verdict: Callable[[TargetVerdict, ComputeTimes], None]
    on_failure: Callable[[OutriderError], None]
    on_reading: Callable[[], None]
    feeds: list[Feed] = field(default_factory=list)
    """Feeds of its next forward, where their blocks are reserved."""
    done: bool = False
    stopped: bool = False

    @property
    def session(self) -> Session:
        """The session that stands for all beams."""
        return self.beams.trunk

    @property
    def draw_inputs(self) -> list[DrawInput]:
        """Inputs of its next forward."""
        return [DrawInput(feed, self.spec) for feed in self.feeds]

    @property
    def num_step_rows(self) -> int:
        """Rows of its next forward, once all but the beams' last tokens are cached."""
        return sum(1 + len(each.tree) for each in self.trees)

    def reserve(self, allocator: BlockAllocator) -> bool:
        """Gives every beam the blocks of its step, without guesses that do not fit; returns whether all have theirs."""
        self.feeds = []
        if not self.session.cached_len:
            self.session.take_prefix()
        sessions = self.beams.next_sessions
        trees = [each.tree for each in self.trees] if sessions is self.beams.sessions else [EMPTY]
        for session, tree in zip(sessions, trees, strict=True):
            try:
                feed = allocator.reserve(session, tree)
            except OutriderError as error:
                self.fail(error)
                return False
            if feed is None:
                return False
            self.feeds.append(feed)
        return True

    def decide(
        self, runner: ModelRunner, logits: Tensor, ranges: Sequence[range | None]
    ) -> TargetVerdict | OutriderError | None:
        """The steps that a forward allows, None while it has not computed all rows; changes nothing."""
        behind = [rows for rows in ranges if rows is not None]
        if len(behind) < len(self.feeds) or (self.beams.sessions and self.feeds[0].session is self.beams.trunk):
            return None
        logprobs, starts = beam_logprobs(runner, logits, self.draw_inputs, behind)
        places: list[Place | None] = [(beam, 0) for beam in range(len(self.feeds))]
        scores, steps, length = self.beams.scores or [0.0], list[BeamStep](), self.beams.length
        path: tuple[int, ...] = ()
        ends = self.spec.eos_token_ids | self.spec.stop_token_ids
        num_tested = 0
        while places and None not in places:
            found = [place for place in places if place is not None]
            length += 1
            num_tested += any(self.feeds[beam].tree.children(row) for beam, row in found)
            rows = logprobs.index_select(0, index([starts[beam] + row for beam, row in found], logprobs))
            try:
                step = select(rows, scores, self.width, ends, is_last=length >= self.spec.max_len)
            except ValueError as error:
                numbers = [behind[beam].start + row for beam, row in found]
                beam, row = found[0]
                draw_input = self.draw_inputs[beam]
                return undrawable(
                    runner,
                    logits.index_select(0, index(numbers, logits)),
                    draw_input,
                    row_contexts(draw_input)[row],
                    error,
                )
            steps.append(step)
            best = (step.live or step.ended)[0]
            beam, row = found[best.parent]
            path = tuple(self.trees[beam].rows[each - 1] for each in self.feeds[beam].tree.path(row))
            places, scores = self._below(found, step), [each.score for each in step.live]
        reason = None if steps[-1].live else FinishReason.LENGTH
        return TargetVerdict(self.beams.length, path, (), best.token_id, reason, num_tested, beam_steps=tuple(steps))

    def take(self, verdict: TargetVerdict) -> None:
        """Makes the live beams those of the verdict's last step; before it they have only gone down the guesses."""
        places: list[Place] = [(beam, 0) for beam in range(len(self.feeds))]
        for step in verdict.beam_steps[:-1]:
            places = [place for place in self._below(places, step) if place is not None]
        if verdict.beam_steps[-1].live:
            self.beams.step(places, verdict.beam_steps[-1].live)
        else:
            self.beams.end(self.spec.max_len)
        self.on_verdict(verdict, self.meter.times())

    def fail(self, error: OutriderError) -> None:
        self.done = True
        self.on_failure(error)

    def _below(self, places: Sequence[Place], step: BeamStep) -> list[Place | None]:
        """Places in the guesses of the beams that go on, None for one that was not proposed."""
        below: list[Place | None] = []
        for each in step.live:
            beam, row = places[each.parent]
            child = child_with(self.feeds[beam].tree, row, each.token_id)
            below.append((beam, child) if child else None)
        return below
