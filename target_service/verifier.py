"""Verifies the proposals of all sessions in one forward: draw behind every row, walk, commit what was accepted.

Knows no messages and no epochs; runs on the device thread. An empty proposal is plain decoding, a prompt is a proposal
that has to wait for its tokens: there is one kind of step. A full pool makes tasks wait; it ends none of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.compute_times import ComputeTimes, Meter
from outrider.engine.decoding import Ask, Outcome, forward_and_draw
from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.session import Session
from outrider.engine.tree import TokenTree
from outrider.engine.worker import own_fault
from outrider.errors import OutriderError
from outrider.parameters import SessionSpec
from target_service.acceptance import Verdict, settle, walk
from target_service.room import Holdings, Room


@dataclass(slots=True, eq=False)
class VerifyTask:
    """A session on its way to one verdict or several."""

    session: Session
    spec: SessionSpec
    tree: TokenTree
    meter: Meter
    on_verdict: Callable[[Verdict, ComputeTimes], None]
    """Called with each verdict, when the session holds its tokens; prepares the task for the next one, or ends it."""
    on_failure: Callable[[OutriderError], None]
    done: bool = False
    stopped: bool = False

    def fail(self, error: OutriderError) -> None:
        """Ends the task with an error."""
        self.done = True
        self.on_failure(error)


class Verifier:
    """Makes one step of all verification tasks at a time."""

    def __init__(self, runner: ModelRunner, holdings: Holdings) -> None:
        """`holdings` are all sessions that hold blocks; see target_service.room."""
        self._runner = runner
        self._room = Room(runner, holdings)

    def advance(self, tasks: Sequence[VerifyTask]) -> bool:
        """One ragged forward over all tasks that have room, and the verdicts that it allows; False when none has.

        When it raises, no session has changed but for what is cached: see outrider.engine.worker.
        """
        tasks = self._ready(tasks)
        if not tasks:
            return False
        before = [task.session.last_forward for task in tasks]
        started_ns = time.perf_counter_ns()
        outcomes = forward_and_draw(self._runner, [Ask(Feed(task.session, task.tree), task.spec) for task in tasks])
        ended_ns = time.perf_counter_ns()
        for task, last_forward, outcome in zip(tasks, before, outcomes, strict=True):
            if task.session.last_forward != last_forward:
                task.meter.add(started_ns, ended_ns)
            # A verdict that was given must not be given again, so what fails from here on fails alone.
            with own_fault(task):
                self._settle(task, outcome)
        return True

    def _ready(self, tasks: Sequence[VerifyTask]) -> list[VerifyTask]:
        """The tasks that have their blocks; those that have to wait are asked again before the next forward."""
        ages = self._room.begin_step()
        served = [
            task for task in sorted(tasks, key=lambda task: ages.get(task.session, len(ages))) if self._take(task)
        ]
        # Whoever made room for another has no part in this forward.
        return [task for task in served if not (task.done or task.stopped)]

    def _take(self, task: VerifyTask) -> bool:
        """Gives a task the blocks of its step, without its proposal when there is no room for that; tells whether."""
        if task.stopped:
            return False
        try:
            tree = self._room.take(task.session, task.tree)
        except OutriderError as error:
            task.fail(error)
            return False
        if tree is None:
            return False
        task.tree = tree
        return True

    def _settle(self, task: VerifyTask, outcome: Outcome) -> None:
        if isinstance(outcome, OutriderError):
            task.fail(outcome)
        elif outcome is not None:
            task.on_verdict(commit(task.session, task.spec, task.tree, outcome), task.meter.times())


def commit(session: Session, spec: SessionSpec, tree: TokenTree, drawn: Sequence[int]) -> Verdict:
    """Decides about a tree that the last forward computed, and makes the session hold what the verdict commits."""
    verdict = settle(tree, walk(tree, drawn), spec, len(session))
    session.keep(verdict.accepted_rows)
    if verdict.next_token_id is not None:
        session.extend([verdict.next_token_id])
    return verdict
