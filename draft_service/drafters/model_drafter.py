"""Guesses with a small model: a chain of draws, each behind the one before. One step is one token of every active task.

Knows no messages and no epochs; runs on the device thread. It draws with the target's own noise at each position, so
that both choose the same token wherever their distributions allow it (Daliri, Musco and Suresh, 2024).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.compute_times import Meter
from outrider.engine.decoding import Allocate, Ask, Outcome, forward_and_draw, reserve
from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.session import Session
from outrider.engine.worker import own_fault
from outrider.errors import OutriderError
from outrider.parameters import SessionSpec


@dataclass(slots=True, eq=False)
class DraftTask:
    """A session on its way to `draft_count` guesses, or none: then only its tokens are cached."""

    session: Session
    spec: SessionSpec
    draft_count: int
    meter: Meter
    on_done: Callable[["DraftTask"], None]
    on_failure: Callable[[OutriderError], None]
    guesses: list[int] = field(default_factory=list)
    done: bool = False
    stopped: bool = False

    def fail(self, error: OutriderError) -> None:
        """Ends the task with an error."""
        self.done = True
        self.on_failure(error)

    def finish(self) -> None:
        """Ends the task with the guesses so far."""
        self.done = True
        self.on_done(self)


class ModelDrafter:
    """Makes one step of all draft tasks at a time."""

    def __init__(self, runner: ModelRunner, with_room: Callable[[Allocate], None]) -> None:
        """`with_room` makes room for an allocation when the pool is full; see outrider.engine.decoding.reserve."""
        self._runner = runner
        self._with_room = with_room

    def advance(self, tasks: Sequence[DraftTask]) -> bool:
        """One forward over all tasks, and one guess for each whose tokens are cached; no task ever waits.

        When it raises, no session has changed but for what is cached: see outrider.engine.worker.
        """
        served = [task for task in tasks if self._is_ready(task)]
        # Whoever made room for another has no part in this forward.
        tasks = [task for task in served if not (task.done or task.stopped)]
        before = [task.session.last_forward for task in tasks]
        started_ns = time.perf_counter_ns()
        outcomes = forward_and_draw(self._runner, [Ask(Feed(task.session), task.spec) for task in tasks])
        ended_ns = time.perf_counter_ns()
        for task, last_forward, outcome in zip(tasks, before, outcomes, strict=True):
            if task.session.last_forward != last_forward:
                task.meter.add(started_ns, ended_ns)
            # A guess that was made must not be made again, so what fails from here on fails alone.
            with own_fault(task):
                _take(task, outcome)
        return True

    def _is_ready(self, task: DraftTask) -> bool:
        if task.stopped:
            return False
        try:
            reserve(self._runner, Feed(task.session), self._with_room)
        except OutriderError as error:
            task.fail(error)
        return not task.done


def _take(task: DraftTask, outcome: Outcome) -> None:
    if isinstance(outcome, OutriderError):
        task.fail(outcome)
    elif outcome is not None:
        if task.draft_count:
            _guess(task, outcome[0])
        # Nothing can follow a token that ends the request.
        ends = task.spec.eos_token_ids | task.spec.stop_token_ids
        if len(task.guesses) == task.draft_count or task.guesses[-1] in ends:
            task.finish()


def _guess(task: DraftTask, token_id: int) -> None:
    task.guesses.append(token_id)
    task.session.extend([token_id])
