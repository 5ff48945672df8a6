"""Verifies the proposals of all sessions in one forward: decide about every proposal, commit what was accepted.

Runs on the device thread. An empty proposal is plain decoding, a prompt is a proposal that has to wait for its tokens:
there is one kind of step. A full pool makes tasks wait; it ends none of them. Log-probabilities of what a session says
and, where wanted, of its prompt come from the logits of the same steps.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.sampling.logprobs import row_logprobs
from outrider.engine.session import Session
from outrider.engine.worker import own_fault
from outrider.errors import OutriderError
from outrider.model_service.session_store import LeaseTable
from outrider.parameters import SessionSpec, TokenLogprob
from outrider.rpc.fencing import ComputeTimes, Meter
from outrider.token_tree import TokenTree
from target_service.acceptance import Verdict, Walk, commit_walk
from target_service.block_allocator import BlockAllocator
from target_service.rules.batched import decide


def of_verdict(runner: ModelRunner, spec: SessionSpec, verdict: Verdict, logits: Tensor) -> tuple[TokenLogprob, ...]:
    """One entry for each token of a verdict, from the logits of the proposal's root and rows."""
    # Each token follows the row before it, the first one the root; the bonus follows the last accepted row.
    rows = [0, *verdict.accepted_rows][: len(verdict.token_ids)]
    return tuple(_entries(runner, spec, logits[rows], verdict.token_ids))


def wants_prompt(session: Session, spec: SessionSpec) -> bool:
    """Whether the next verdict carries the prompt's log-probabilities: it stands on nothing but the prompt."""
    return spec.prompt_logprobs and len(session) == spec.prompt_len


def align(session: Session, entries: list[TokenLogprob]) -> None:
    """Lets a session's next forward begin at the first row whose number is missing in entries, before it reserves.

    entries[i] came from the row of token i. A cache that is ahead of them is computed again, which happens when the
    session had it before its prompt was asked about, or when a step has failed; a cache that was lost takes entries
    along.
    """
    if session.next_position > len(entries):
        session.free()
    del entries[session.next_position :]


def extend(
    runner: ModelRunner, session: Session, spec: SessionSpec, entries: list[TokenLogprob], logits: Tensor
) -> None:
    """Adds the numbers of the prompt's rows that a forward computed, the first of which belongs to token len(entries).

    At once, chunk by chunk, because the logits of a whole prompt may be larger than the model.
    """
    first = len(entries) + 1
    entries += _entries(runner, spec, logits, session.token_ids[first : first + logits.shape[0]])


def _entries(runner: ModelRunner, spec: SessionSpec, logits: Tensor, token_ids: Sequence[int]) -> list[TokenLogprob]:
    return row_logprobs(logits, token_ids, spec.logprob_count or 0, runner.vocabulary_size, runner.ops)


# None for a task whose tokens are not all computed yet.
Outcome = Verdict | OutriderError | None


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
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """What is known so far of those that the first verdict carries."""

    @property
    def draw_input(self) -> DrawInput:
        """What its next forward computes, and how tokens are drawn behind it."""
        return DrawInput(Feed(self.session, self.tree, wants_prompt(self.session, self.spec)), self.spec)

    def fail(self, error: OutriderError) -> None:
        """Ends the task with an error."""
        self.done = True
        self.on_failure(error)


class Verifier:
    """Makes one step of all verification tasks at a time."""

    def __init__(self, runner: ModelRunner, table: LeaseTable[Any]) -> None:
        """The table has all sessions that hold blocks; see target_service.block_allocator."""
        self._runner = runner
        self._allocator = BlockAllocator(runner, table)

    def advance(self, tasks: Sequence[VerifyTask]) -> bool:
        """One ragged forward over all tasks that have room, and the verdicts that it allows; False when none has.

        When it raises, no session has changed but for what is cached: see outrider.engine.worker.
        """
        tasks = self._ready(tasks)
        if not tasks:
            return False
        before = [task.session.last_forward for task in tasks]
        started_ns = time.perf_counter_ns()
        outcomes = self._judge(tasks)
        ended_ns = time.perf_counter_ns()
        for task, last_forward, outcome in zip(tasks, before, outcomes, strict=True):
            if task.session.last_forward != last_forward:
                task.meter.add(started_ns, ended_ns)
            # A verdict that was given must not be given again, so what fails from here on fails alone.
            with own_fault(task):
                _settle(task, outcome)
                task.session.publish(len(task.session))
        return True

    def _judge(self, tasks: Sequence[VerifyTask]) -> list[Outcome]:
        """Computes and decides for all tasks; commits nothing, so that it can be done again."""
        inputs = [task.draw_input for task in tasks]
        result = self._runner.forward([draw_input.feed for draw_input in inputs])
        finished = [number for number, rows in enumerate(result.ranges) if rows is not None]
        ranges = [rows for rows in result.ranges if rows is not None]
        ways = decide(self._runner, [inputs[number] for number in finished], result.logits, ranges)
        self._read_prompts(tasks, result)
        outcomes: list[Outcome] = [None] * len(tasks)
        for number, rows, way in zip(finished, ranges, ways, strict=True):
            logits = result.logits[rows.start : rows.stop]
            outcomes[number] = way if isinstance(way, OutriderError) else self._verdict(tasks[number], way, logits)
        return outcomes

    def _read_prompts(self, tasks: Sequence[VerifyTask], result: ForwardResult) -> None:
        for task, rows in zip(tasks, result.prefixes, strict=True):
            if rows:
                logits = result.logits[rows.start : rows.stop]
                extend(self._runner, task.session, task.spec, task.prompt_logprobs, logits)

    def _verdict(self, task: VerifyTask, way: Walk, logits: Tensor) -> Verdict:
        verdict = commit_walk(task.tree, way, task.spec, len(task.session))
        if task.spec.logprob_count is None:
            return verdict
        entries = of_verdict(self._runner, task.spec, verdict, logits)
        return replace(verdict, logprobs=entries, prompt_logprobs=tuple(task.prompt_logprobs))

    def _ready(self, tasks: Sequence[VerifyTask]) -> list[VerifyTask]:
        """The tasks that have their blocks; those that have to wait are asked again before the next forward."""
        ages = self._allocator.begin_step()
        served = [
            task for task in sorted(tasks, key=lambda task: ages.get(task.session, len(ages))) if self._take(task)
        ]
        # Whoever made room for another has no part in this forward.
        return [task for task in served if not (task.done or task.stopped)]

    def _take(self, task: VerifyTask) -> bool:
        """Gives a task the blocks of its step, without its proposal when there is no room for that; tells whether."""
        if task.stopped:
            return False
        # Whoever has nothing because it gave way looks for what is left of it; while it waits, it has nothing again.
        had_nothing = not task.session.cached_len
        if wants_prompt(task.session, task.spec):
            align(task.session, task.prompt_logprobs)
        elif had_nothing:
            task.session.take_prefix()
        try:
            tree = self._allocator.take(task.session, task.tree)
        except OutriderError as error:
            task.fail(error)
            return False
        if tree is None:
            if had_nothing:
                task.session.free()
            return False
        task.tree = tree
        return True


def _settle(task: VerifyTask, outcome: Outcome) -> None:
    if isinstance(outcome, OutriderError):
        task.fail(outcome)
    elif outcome is not None:
        commit(task.session, outcome)
        task.prompt_logprobs = []
        task.on_verdict(outcome, task.meter.times())


def commit(session: Session, verdict: Verdict) -> None:
    """Makes the session of the last forward's tree hold what the verdict commits."""
    session.keep(verdict.accepted_rows)
    if verdict.next_token_id is not None:
        session.extend([verdict.next_token_id])
