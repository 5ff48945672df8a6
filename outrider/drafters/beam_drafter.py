"""Guesses for a beam search: the same search by the draft, some steps ahead and with more beams than are wanted.

From the target's own live beams and their sums a draft goes on with at least as many beams as the search is wide
(Leviathan et al., 2023, arXiv 2211.17192, appendix A.4). All of its beams are the proposal, each after the one that it
came from.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.beams import plant
from outrider.engine.batching import Feed
from outrider.engine.beams import Beams, beam_logprobs
from outrider.engine.device_thread import EndingTask, own_fault
from outrider.engine.runner import Allocate, ModelRunner, reserve
from outrider.engine.sampling.beams import select
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.session import Session
from outrider.engine.sharing import ForwardPace
from outrider.errors import OutriderError
from outrider.estimates.timing import Meter
from outrider.parameters import SessionSpec
from outrider.token_tree import EMPTY, TokenTree

# Of the draft's beams over the search's. A step of the target stands only where all that it keeps is among them, so
# many beams for a few steps save more passes than few beams for many.
SURPLUS = 3.5
MAX_STEPS = 8


@dataclass(slots=True, eq=False)
class BeamDraftTask(EndingTask):
    """The live beams of a search on their way to `draft_count` guesses, or none: then only the prompt is cached."""

    beams: Beams
    spec: SessionSpec
    width: int
    draft_count: int
    max_steps: int
    """Number of tokens after the live beams that there is room for."""
    meter: Meter
    last_token_ids: list[int] = field(init=False)
    steps_left: int = field(init=False)
    num_candidates: int = field(init=False)
    """Number of beams of each step."""
    rows: list[int] = field(init=False)
    """Row in the proposal of each of the draft's beams."""
    parents: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_token_ids = self.beams.last_token_ids
        self.rows = list(range(1, len(self.last_token_ids) + 1))
        wanted = max(1, round(self.draft_count / (SURPLUS * self.width))) if self.draft_count >= self.width else 0
        self.steps_left = max(0, min(wanted, self.max_steps, MAX_STEPS))
        self.num_candidates = self.draft_count // max(1, self.steps_left)

    @property
    def session(self) -> Session:
        return self.beams.trunk

    @property
    def proposal(self) -> TokenTree:
        return plant(self.last_token_ids, self.parents, self.token_ids) if self.token_ids else EMPTY

    def take(self, runner: ModelRunner, logits: Tensor, ranges: Sequence[range | None]) -> None:
        """Goes one step on from rows of logits, if all that it fed is computed; ends after the last step."""
        behind = [rows for rows in ranges if rows is not None]
        if len(behind) < len(ranges):
            return
        if self.feeds[0].session is self.beams.trunk and self.beams.sessions:
            return
        if not self.steps_left:
            self.finish()
            return
        inputs = [DrawInput(feed, self.spec) for feed in self.feeds]
        logprobs, _ = beam_logprobs(runner, logits, inputs, behind)
        ends = self.spec.eos_token_ids | self.spec.stop_token_ids
        try:
            step = select(logprobs, self.beams.scores, self.num_candidates, ends)
        except ValueError:
            # Nothing can follow, which is the target's to say.
            self.finish()
            return
        places = [(beam, 0) for beam in range(len(self.feeds))]
        # Whatever the target keeps, it goes on from the live beams.
        self.beams.step(places, step.live, keep_parents=not self.token_ids)
        self.parents += [self.rows[each.parent] for each in step.live]
        self.token_ids += [each.token_id for each in step.live]
        num_rows = len(self.last_token_ids) + len(self.token_ids)
        self.rows = list(range(num_rows - len(step.live) + 1, num_rows + 1))
        self.steps_left -= 1
        if not self.steps_left or not step.live:
            self.finish()


class BeamDrafter:
    """Makes one step of all searches at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        with_room: Callable[[Allocate], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """See outrider.drafters.model_drafter.ModelDrafter."""
        self._runner = runner
        self._with_room = with_room
        self._pace = ForwardPace(clock)

    def advance(self, tasks: Sequence[BeamDraftTask]) -> bool:
        """Makes one forward over all beams of all tasks, and a step of each whose tokens are cached; none waits."""
        for task in tasks:
            if not task.stopped:
                try:
                    task.feeds = [Feed(session) for session in task.beams.next_sessions]
                    for feed in task.feeds:
                        reserve(self._runner, feed, self._with_room)
                except OutriderError as error:
                    task.fail(error)
        # A task that made room for another has no part in this forward.
        tasks = [task for task in tasks if not (task.done or task.stopped)]
        started_ns = time.perf_counter_ns()
        feeds = [feed for task in tasks for feed in task.feeds]
        result = self._runner.forward(feeds, self._pace.begin(feeds, self._runner.max_rows))
        self._pace.end(result.grants)
        num_rows, start = result.num_rows, 0
        for task in tasks:
            ranges = result.ranges[start : start + len(task.feeds)]
            grants = result.grants[start : start + len(task.feeds)]
            start += len(task.feeds)
            with own_fault(task):
                if any(grants):
                    task.meter.add(started_ns, time.perf_counter_ns(), num_rows)
                task.session.publish(len(task.session))
                task.take(self._runner, result.logits, ranges)
        self._runner.finish()
        return True
