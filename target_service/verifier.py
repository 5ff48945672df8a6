"""Verifies the proposals of all sessions in one forward: draw behind every row, walk, commit what was accepted.

Knows no messages and no epochs; runs on the device thread. An empty proposal is plain decoding, a prompt is a proposal
that has to wait for its tokens: there is one kind of step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.compute_times import ComputeTimes, Meter
from outrider.engine.decoding import Allocate, Ask, Outcome, forward_and_draw, reserve
from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.session import Session
from outrider.engine.tree import TokenTree
from outrider.errors import OutriderError
from outrider.parameters import SessionSpec
from target_service.acceptance import Verdict, settle, walk


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

    def __init__(self, runner: ModelRunner, with_room: Callable[[Allocate], None]) -> None:
        """`with_room` makes room for an allocation when the pool is full; see outrider.engine.decoding.reserve."""
        self._runner = runner
        self._with_room = with_room

    def advance(self, tasks: Sequence[VerifyTask]) -> None:
        """One ragged forward over all tasks, and the verdicts that it allows."""
        tasks = [task for task in tasks if self._is_ready(task)]
        before = [task.session.last_forward for task in tasks]
        started_ns = time.perf_counter_ns()
        outcomes = forward_and_draw(self._runner, [Ask(Feed(task.session, task.tree), task.spec) for task in tasks])
        ended_ns = time.perf_counter_ns()
        for task, last_forward, outcome in zip(tasks, before, outcomes, strict=True):
            if task.session.last_forward != last_forward:
                task.meter.add(started_ns, ended_ns)
            self._settle(task, outcome)

    def _is_ready(self, task: VerifyTask) -> bool:
        try:
            reserve(self._runner, Feed(task.session, task.tree), self._with_room)
        except OutriderError as error:
            task.fail(error)
        return not task.done

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
