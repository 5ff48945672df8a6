"""Guesses with a small model: a chain of draws, each behind the one before. One step is one token of every active task.

Knows no messages and no epochs; runs on the device thread.
"""

import time
from collections.abc import Callable, Sequence

from draft_service.drafters.guessing import guess_each
from draft_service.drafters.task import DraftTask
from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.sampling.draw import Allocate, reserve
from outrider.engine.worker import own_fault
from outrider.errors import OutriderError


class ModelDrafter:
    """Makes one step of all draft tasks at a time, whatever noise each draws with."""

    def __init__(self, runner: ModelRunner, with_room: Callable[[Allocate], None], top_n: int = DEFAULT_TOP_N) -> None:
        """`with_room` makes room for an allocation when the pool is full; see outrider.engine.sampling.draw.reserve.

        top_n is the most tokens of a law that is sent; see outrider.engine.sampling.draft_distribution.
        """
        self._runner = runner
        self._with_room = with_room
        self._top_n = top_n

    def advance(self, tasks: Sequence[DraftTask]) -> bool:
        """One forward over all tasks, and one guess for each whose tokens are cached; no task ever waits.

        When it raises, no session has changed but for what is cached: see outrider.engine.worker.
        """
        served = [task for task in tasks if self._is_ready(task)]
        # Whoever made room for another has no part in this forward.
        tasks = [task for task in served if not (task.done or task.stopped)]
        before = [task.session.last_forward for task in tasks]
        started_ns = time.perf_counter_ns()
        result = self._runner.forward([Feed(task.session) for task in tasks])
        ready = [(task, rows) for task, rows in zip(tasks, result.ranges, strict=True) if rows is not None]
        guessing = [task for task, _ in ready]
        guesses = guess_each(self._runner, guessing, result.logits, [rows for _, rows in ready], self._top_n)
        ended_ns = time.perf_counter_ns()
        for task, last_forward in zip(tasks, before, strict=True):
            if task.session.last_forward != last_forward:
                task.meter.add(started_ns, ended_ns)
        for task, guess in zip(guessing, guesses, strict=True):
            # A guess that was made must not be made again, so what fails from here on fails alone.
            with own_fault(task):
                task.fail(guess) if isinstance(guess, OutriderError) else task.take(guess)
        for task in tasks:
            with own_fault(task):
                # Only what is committed; the guesses behind it are nobody's but this session's.
                task.session.publish(task.base_len)
        return True

    def _is_ready(self, task: DraftTask) -> bool:
        if task.stopped:
            return False
        try:
            reserve(self._runner, Feed(task.session), self._with_room)
        except OutriderError as error:
            task.fail(error)
        return not task.done
