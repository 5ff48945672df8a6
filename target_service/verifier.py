"""Verifies the proposals of all sessions in one forward: decide about every proposal, commit what was accepted.

Runs on the device thread. An empty proposal is plain decoding, a prompt is a proposal that has to wait for its tokens:
there is one kind of step. A full pool makes tasks wait; it ends none of them. Log-probabilities of what a session says
and, where wanted, of its prompt come from the logits of the same steps.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor

from outrider.drafters.drafter import NO_GUESSES, NO_PROPOSAL, DrafterProposal, GuessLimits, HostedSession, guess
from outrider.engine.batching import Feed
from outrider.engine.device_thread import own_fault
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, model_fault
from outrider.engine.sampling.logprobs import row_logprobs
from outrider.engine.sampling.transforms import index
from outrider.engine.session import Session
from outrider.engine.sharing import ForwardPace
from outrider.engine.walk import Walk
from outrider.errors import OutriderError
from outrider.estimates.timing import ComputeTimes, Meter
from outrider.model_service.leases import LeaseTable
from outrider.parameters import SessionSpec, TokenLogprob
from outrider.token_tree import TokenTree
from target_service.acceptance import TargetVerdict, commit_walk, decide
from target_service.beam_tasks import BeamTask
from target_service.block_allocator import BlockAllocator
from target_service.gathering import Gathering


@dataclass(slots=True, eq=False)
class VerifyTask:
    """A session on its way to one verdict or several."""

    session: Session
    spec: SessionSpec
    tree: TokenTree
    meter: Meter
    on_verdict: Callable[[TargetVerdict, ComputeTimes], None]
    """Called with each verdict, when the session holds its tokens; prepares the task for the next one, or ends it."""
    on_failure: Callable[[OutriderError], None]
    on_reading: Callable[[], None]
    """Called after each forward that has read some of its tokens, and not all."""
    hosted: HostedSession | None = None
    """Session of the drafter that guesses where the tree is empty."""
    guess_limits: GuessLimits = NO_GUESSES
    """Guesses that it is to make for the next verdict."""
    proposal: DrafterProposal | None = None
    """Proposal that it has made for the next verdict."""
    is_drafting: bool = False
    """Whether it is about to make that."""
    is_of_branch: bool = False
    """Whether the tree was there before it was known what it would follow."""
    done: bool = False
    stopped: bool = False
    found_len: int = 0
    """Tokens that others have read for it while it waited for its first verdict."""
    most_cached: int = 0
    """The most that it has had cached before a step, which may be lost again."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Entries known so far of those that the first verdict carries; entry i came from the row of token i."""

    @property
    def wants_prompt(self) -> bool:
        """Whether the next verdict carries the prompt's log-probabilities: it stands on nothing but the prompt."""
        return self.spec.prompt_logprobs and len(self.session) == self.spec.prompt_len

    @property
    def draw_inputs(self) -> list[DrawInput]:
        """Input of its next forward, and of the draws after it: one entry."""
        # A drafter that reads features has to have those of all tokens before the last.
        feed = Feed(self.session, self.tree, self.wants_prompt, self.wants_guesses)
        return [DrawInput(feed, self.spec)]

    @property
    def num_step_rows(self) -> int:
        """Rows of its next forward, once all but its last token is cached."""
        return 1 + len(self.tree) + (self.hosted.part.num_rows_beside if self.hosted is not None else 0)

    @property
    def wants_guesses(self) -> bool:
        """Whether guesses are to be made before its next forward; they are made once for each verdict."""
        return bool(self.guess_limits.draft_count) and not self.tree and self.proposal is None

    @property
    def has_guesses(self) -> bool:
        """Whether guesses were made for the next verdict, by its own drafter or in a branch."""
        return self.proposal is not None or self.is_of_branch

    def next_verdict(self, tree: TokenTree, meter: Meter, guess_limits: GuessLimits) -> None:
        """Prepares the task for what follows the session's tokens now; guesses that are under way end."""
        if self.is_drafting and self.hosted is not None:
            self.hosted.part.truncate(len(self.session))
        self.tree, self.meter = tree, meter
        self.guess_limits, self.proposal, self.is_drafting, self.is_of_branch = guess_limits, None, False, False

    def reserve(self, allocator: BlockAllocator) -> bool:
        """Takes the blocks of its step, without its proposal when that finds no room; returns whether it has them.

        A session that is to read what another one reads in this step waits for that.
        """
        session = self.session
        # A session that has nothing because it gave way looks for what is left of it; while it waits, it has nothing
        # again.
        had_nothing, waits = not session.cached_len, False
        if self.wants_prompt:
            # The forward begins at the first row whose number is missing. A cache that is ahead of them is computed
            # again: the session had it before its prompt was asked about, or a step has failed. One that was lost takes
            # them along.
            if session.next_position > len(self.prompt_logprobs):
                session.free()
            del self.prompt_logprobs[session.next_position :]
        else:
            most = max(self.most_cached, session.cached_len)
            waits = allocator.read_once.waits(session)
            self.most_cached = max(most, session.cached_len)
            self.found_len += self.most_cached - most
        try:
            feed = None if waits else allocator.reserve(session, self.tree)
        except OutriderError as error:
            self.fail(error)
            return False
        if feed is None:
            if had_nothing:
                session.free()
            return False
        allocator.read_once.begin(session)
        self.tree = feed.tree
        return True

    def take(self, verdict: TargetVerdict) -> None:
        """Commits a verdict, and hands it on."""
        commit(self.session, verdict)
        self.prompt_logprobs = []
        found_len, self.found_len = self.found_len, 0
        self.on_verdict(verdict._replace(prefix_len=found_len) if found_len else verdict, self.meter.times())

    def fail(self, error: OutriderError) -> None:
        self.done = True
        self.on_failure(error)


TargetTask = VerifyTask | BeamTask


class Verifier:
    """Makes one step of all verification tasks at a time."""

    def __init__(
        self, runner: ModelRunner, table: LeaseTable[Any], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """The table has all sessions that hold blocks; see target_service.block_allocator. `clock` as in Pace."""
        self._runner = runner
        self._pace = ForwardPace(clock)
        self._gathering = Gathering(clock)
        self._allocator = BlockAllocator(runner, table)

    def advance(self, tasks: Sequence[TargetTask]) -> bool:
        """Makes one ragged forward over all tasks that have room, and the verdicts that it allows.

        False when none has, or when it is better to wait a moment for others. When it raises, no session has changed
        but for what is cached: see outrider.engine.device_thread.
        """
        tasks = _with_proposals(tasks)
        if not tasks:
            return True
        for task in tasks:
            self._gathering.came(task.session, task.meter.arrived_ns / 1e9)
        here, num_rows = [task.session for task in tasks], sum(task.num_step_rows for task in tasks)
        if self._gathering.is_worth_waiting(here, num_rows):
            return False
        ages = self._allocator.begin_step()
        in_order = sorted(tasks, key=lambda task: ages.get(task.session, len(ages)))
        served = [task for task in in_order if not task.stopped and task.reserve(self._allocator)]
        # A session that made room for another has no part in this forward.
        tasks = [task for task in served if not (task.done or task.stopped)]
        if not tasks:
            return False
        num_step_rows, started_ns = sum(task.num_step_rows for task in tasks), time.perf_counter_ns()
        outcomes, grants = self._forward_and_decide(tasks)
        ended_ns, num_rows = time.perf_counter_ns(), sum(grants)
        # What sessions have to read is beside the rows of their steps.
        num_prompt_rows = max(0, num_rows - num_step_rows)
        if not num_prompt_rows:
            self._gathering.costs.add(num_rows, (ended_ns - started_ns) / 1e9)
        for task, grant, outcome in zip(tasks, grants, outcomes, strict=True):
            if grant:
                task.meter.add(started_ns, ended_ns, num_rows, num_prompt_rows)
            # A verdict that was given must not be given again, so what fails from here on fails alone.
            with own_fault(task):
                if isinstance(outcome, OutriderError):
                    task.fail(outcome)
                elif outcome is not None:
                    task.take(outcome)
                    if not task.done:
                        self._gathering.stayed(task.session)
                    elif outcome.finish_reason is None:
                        self._gathering.left(task.session)
                elif grant:
                    task.on_reading()
                task.session.publish(len(task.session))
        return True

    def _forward_and_decide(
        self, tasks: Sequence[TargetTask]
    ) -> tuple[list[TargetVerdict | OutriderError | None], list[int]]:
        """Computes and decides for all tasks, None for one whose tokens are not all computed yet; and rows of each.

        Commits nothing, so that it can be done again.
        """
        groups = [task.draw_inputs for task in tasks]
        inputs = [each for group in groups for each in group]
        ends = list(accumulate(map(len, groups)))
        feeds = [each.feed for each in inputs]
        result = self._runner.forward(feeds, self._pace.begin(feeds, self._runner.max_rows))
        # A task that is verified has one feed, so that the last of its feeds is this.
        verified = {end - 1: task for end, task in zip(ends, tasks, strict=True) if isinstance(task, VerifyTask)}
        behind = {number: rows for number in verified if (rows := result.ranges[number]) is not None}
        walks = decide(self._runner, [inputs[number] for number in behind], result.logits, list(behind.values()))
        steps = {
            end - 1: task.decide(self._runner, result.logits, result.ranges[end - len(group) : end])
            for end, task, group in zip(ends, tasks, groups, strict=True)
            if isinstance(task, BeamTask)
        }
        self._runner.finish()
        outcomes: dict[int, TargetVerdict | OutriderError | None] = dict(steps)
        for number, task in verified.items():
            # At once, chunk by chunk, because the logits of a whole prompt may be larger than the model.
            if rows := result.prefixes[number]:
                first = len(task.prompt_logprobs) + 1
                token_ids = task.session.token_ids[first : first + len(rows)]
                try:
                    task.prompt_logprobs += self._logprobs(task, result.logits[rows.start : rows.stop], token_ids)
                except ValueError:
                    outcomes[number] = model_fault(self._runner, first)
        for (number, rows), walk in zip(behind.items(), walks, strict=True):
            if number not in outcomes:
                outcomes[number] = (
                    walk
                    if isinstance(walk, OutriderError)
                    else self._verdict(verified[number], walk, result.logits, rows.start)
                )
        self._pace.end(result.grants)
        grants = [sum(result.grants[end - len(group) : end]) for end, group in zip(ends, groups, strict=True)]
        return [outcomes.get(end - 1) for end in ends], grants

    def _verdict(self, task: VerifyTask, walk: Walk, logits: Tensor, root: int) -> TargetVerdict | OutriderError:
        """Verdict of a walk, with one entry for each token where wanted; the logits of its root are logits[root]."""
        verdict = commit_walk(task.tree, walk, task.spec, len(task.session))
        if task.proposal is not None and task.tree:
            verdict = verdict._replace(hosted=task.proposal)
        elif task.is_of_branch and task.tree:
            verdict = verdict._replace(hosted=NO_PROPOSAL._replace(tree=task.tree), is_of_branch=True)
        if task.spec.logprob_count is None:
            return verdict
        # Each token follows the row before it, the first one the root; the bonus follows the last accepted row.
        rows = [root + row for row in (0, *verdict.accepted_rows)][: len(verdict.token_ids)]
        try:
            entries = self._logprobs(task, logits.index_select(0, index(rows, logits)), verdict.token_ids)
        except ValueError:
            # What was drawn has a number; what is beside it, perhaps above the tokenizer's ids, has none.
            return model_fault(self._runner, len(task.session))
        return verdict._replace(logprobs=tuple(entries), prompt_logprobs=tuple(task.prompt_logprobs))

    def _logprobs(self, task: VerifyTask, logits: Tensor, token_ids: Sequence[int]) -> list[TokenLogprob]:
        runner = self._runner
        return row_logprobs(logits, token_ids, task.spec.logprob_count or 0, runner.vocabulary_size, runner.ops)


def _with_proposals(tasks: Sequence[TargetTask]) -> list[TargetTask]:
    """Lets the sessions guess that are to; returns the tasks that need not wait for that any longer.

    Or not yet, because their drafters read features that are still to be computed.
    """
    guessing = [
        (task, task.hosted)
        for task in tasks
        if isinstance(task, VerifyTask) and task.hosted is not None and not task.stopped
    ]
    if not guessing:
        return list(tasks)
    for task, hosted in guessing:
        session = task.session
        has_features = not hosted.part.reads_features or session.cached_len >= len(session) - 1
        if task.wants_guesses and not task.is_drafting and has_features:
            hosted.propose(session, task.guess_limits)
            task.is_drafting = True
    guess([hosted for _, hosted in guessing], [hosted.part for task, hosted in guessing if task.is_drafting])
    for task, hosted in guessing:
        if task.is_drafting and hosted.part.proposal is not None:
            task.is_drafting, task.proposal = False, hosted.part.proposal
            task.tree = task.proposal.tree
    return [task for task in tasks if isinstance(task, BeamTask) or not task.is_drafting]


def commit(session: Session, verdict: TargetVerdict) -> None:
    """Makes the session of the last forward's tree hold what the verdict commits."""
    session.keep(verdict.accepted_rows)
    if verdict.next_token_id is not None:
        session.extend([verdict.next_token_id])
