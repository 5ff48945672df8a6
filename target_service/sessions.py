"""The sessions of a target: which message is taken, which verdicts are repeated, and how far it goes on unasked.

Everything here runs on the device thread, between two forwards, so that no session changes under one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from outrider.drafters.drafter import NO_GUESSES, Drafter, GuessLimits, HostedSession
from outrider.engine.runner import ModelRunner
from outrider.errors import Field, InvalidRequest, ProtocolViolation
from outrider.estimates.timing import ComputeTimes, Meter
from outrider.grammar import Grammar
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outbox, SessionAnswer
from outrider.model_service.sessions import SessionStore
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence, MessageStatus, classify
from outrider.token_tree import EMPTY
from target_service.acceptance import TargetVerdict
from target_service.recorder import may_be_recorded
from target_service.states import (
    BeamState,
    OpenSearch,
    PushedBranches,
    Record,
    Step,
    TargetState,
    check_branches,
    check_proposal,
)
from target_service.verifier import TargetTask, VerifyTask


class TargetSessions(SessionStore[TargetState]):
    """Sessions of a target service."""

    def __init__(
        self,
        runner: ModelRunner,
        table: LeaseTable[TargetState],
        submit: Callable[[TargetTask], None],
        *,
        prefix_cache: bool = True,
        drafters: Sequence[Drafter[Any]] = (),
        record: Record | None = None,
    ) -> None:
        """`submit` hands a task to the device worker that advances it; prefix_cache as in SessionStore.

        `drafters` are those that sessions may have in this process. `record` takes what sessions have said that may be
        kept, when their link ends them.
        """
        super().__init__(runner, table, prefix_cache=prefix_cache)
        self._submit = submit
        self._drafters = {each.name: each for each in drafters}
        self._record = record

    def open(
        self,
        fence: Fence,
        spec: SessionSpec,
        step: Step,
        owner: Outbox,
        drafter: str = "",
        search: OpenSearch | None = None,
        grammar: Grammar | None = None,
        *,
        tells_reading: bool = False,
    ) -> None:
        """Opens a session, or opens it again with a newer epoch, and takes its first step.

        `drafter` is one of this process, or empty. With a search, the spec's tokens are the prompt. `grammar` is the
        spec's, compiled for this session. With `tells_reading` its owner hears how much of its tokens is read.
        """
        status, held = self._classify_open(fence, owner)
        if status is MessageStatus.CURRENT:
            output = spec.token_ids[spec.prompt_len :]
            if grammar is not None and grammar.follower is not None and not grammar.follower.follows(output):
                # No target would have committed it.
                what = (
                    f"an output of {len(output)} tokens, of which {max(grammar.follower.reach(output), 0)} are allowed"
                )
                raise InvalidRequest("session.token_ids", what, ("one that follows ", Field("session.grammar")))
            if search is None:
                check_proposal(step.tree, spec, fence.base_len)
            found = self._drafters.get(drafter)
            _check_limits(found, step.guess_limits, "step")
            hosted = None if found is None else HostedSession.of(found, spec, grammar, self._salt(spec))
            kind = TargetState if search is None else partial(BeamState, search=search)
            record = self._record if search is None and may_be_recorded(spec) else None
            make = partial(kind, hosted=hosted, tells_reading=tells_reading, record=record)
            held = self._open(fence, spec, grammar, owner, make)
            held.opened()
            self._accept(held, fence, step)
        elif status is MessageStatus.REPEAT and held is not None:
            self._attach(fence, held, owner)
            self._repeat(held, fence, step)

    def step(self, fence: Fence, step: Step, owner: Outbox) -> None:
        """Verifies a proposal, answers a step again, or asks for tokens."""
        held = self.table.get(fence.session_id)
        is_owner = held is not None and held.owner is owner
        status = classify(fence, held.view if held else None, is_owner=is_owner)
        if held is None or status is MessageStatus.FUTURE:
            self.want_tokens(fence, held, owner)
        elif status is MessageStatus.REPEAT:
            held.acknowledge(fence.base_len)
            self._repeat(held, fence, step)
        elif status is MessageStatus.REWIND and not held.can_return(fence.base_len):
            self.want_tokens(fence, held, owner)
        elif status is not MessageStatus.STALE:
            held.check(step, fence.base_len)
            _check_limits(held.hosted and held.hosted.drafter, step.guess_limits, "step")
            if status is MessageStatus.REWIND:
                self._rewind(held, fence.epoch, fence.base_len)
            held.acknowledge(fence.base_len)
            self._accept(held, fence, step)

    def acknowledge(
        self,
        fence: Fence,
        plain_budget: int,
        arrived_ns: int,
        owner: Outbox,
        guess_limits: GuessLimits = NO_GUESSES,
    ) -> None:
        """Forgets verdicts, and lets the target go on unasked; never answered."""
        held = self.table.get(fence.session_id)
        if held is None or held.owner is not owner:
            return
        if fence.epoch < held.epoch or fence.base_len > held.committed_len or isinstance(held, BeamState):
            return
        if fence.epoch > held.epoch:
            self._rewind(held, fence.epoch, fence.base_len)
        if fence.base_len < held.acknowledged_len:
            return
        _check_limits(held.hosted and held.hosted.drafter, guess_limits, "acknowledge")
        held.acknowledge(fence.base_len)
        held.allow(fence.base_len, plain_budget)
        held.guess_limits = guess_limits
        if not held.may_go_on and len(held.session) > held.asked_len:
            # The stretch ends here: a step is about to come, and what has begun unasked would only delay it.
            held.stop_job()
            if held.hosted is not None:
                held.hosted.part.truncate(len(held.session))
        self._go_on(fence.session_id, held, arrived_ns)

    def run_ahead(self, fence: Fence, ahead: PushedBranches, owner: Outbox) -> None:
        """Goes on with a branch as soon as the verdict on its length has fallen, or now if it has; never answered.

        Branches of another epoch or of a length that the session has passed are old, and dropped.
        """
        held = self.table.get(fence.session_id)
        if held is None or held.owner is not owner or fence.epoch != held.epoch:
            return
        if isinstance(held, BeamState):
            raise InvalidRequest("branches", "present", "absent for a beam search")
        if held.finish_reason is not None or fence.base_len > held.committed_len:
            return
        check_branches(ahead.branches, held.spec, fence.base_len)
        held.acknowledge(fence.base_len)
        if fence.base_len == held.committed_len:
            held.ahead = ahead
            return
        last = held.verdicts[-1] if held.verdicts else None
        if (
            held.task is None
            and last is not None
            and last.fence.base_len == fence.base_len
            and last.content is not None
        ):
            tree = held.branch_after(last.content, ahead)
            if tree is not None:
                self._start(fence.session_id, held, Step(tree, 0, ahead.arrived_ns, is_of_branch=bool(tree)))

    def _repeat(self, held: TargetState, fence: Fence, step: Step) -> None:
        """Sends the verdicts from a length on once more, and goes on as far as the repetition allows.

        A verdict that is under way comes anyway; one whose job was stopped with its stream is begun anew.
        """
        if fence.base_len < held.committed_len:
            for answer in held.verdicts:
                if answer.fence.base_len >= fence.base_len:
                    held.owner.put(answer)
            held.allow(fence.base_len, step.plain_budget, is_repeat=True)
            self._go_on(fence.session_id, held, step.arrived_ns)
        elif held.task is None:
            held.check(step, fence.base_len)
            self._accept(held, fence, step)

    def _go_on(self, session_id: bytes, held: TargetState, arrived_ns: int) -> None:
        if held.task is None and held.may_go_on:
            self._start(session_id, held, Step(EMPTY, 0, arrived_ns))

    def _accept(self, held: TargetState, fence: Fence, step: Step) -> None:
        if held.finish_reason is not None:
            raise ProtocolViolation(
                f"the request has ended at {fence.base_len} tokens and takes no more steps", base_len=fence.base_len
            )
        is_repeat = fence.base_len == held.asked_len
        held.allow(fence.base_len, step.plain_budget, is_repeat=is_repeat)
        held.asked_len, held.guess_limits = fence.base_len, step.guess_limits
        if held.task is None:
            self._start(fence.session_id, held, step)
        elif isinstance(held.task, VerifyTask) and not is_repeat and (step.tree or not held.task.has_guesses):
            # A verdict on just this length is under way, because the budget allowed it: it becomes the step's own. Only
            # guesses that have been made for it stay.
            held.task.next_verdict(step.tree, Meter(step.arrived_ns), held.next_limits)

    def _start(self, session_id: bytes, held: TargetState, step: Step) -> None:
        on_verdict, on_failure = partial(self._on_verdict, session_id, held), partial(self.fail, session_id, held)
        held.task = held.begin(step, on_verdict, on_failure, partial(self._on_reading, session_id, held))
        self._submit(held.task)

    def _on_reading(self, session_id: bytes, held: TargetState) -> None:
        reading = held.next_reading()
        if reading is not None:
            fence = Fence(session_id, held.epoch, held.committed_len)
            held.owner.put(SessionAnswer(fence, reading, 0, 0, ComputeTimes()))

    def _on_verdict(self, session_id: bytes, held: TargetState, verdict: TargetVerdict, times: ComputeTimes) -> None:
        fence = Fence(session_id, held.epoch, verdict.base_len)
        # Later it finds what it had and has lost.
        found_len, prefix_len = (verdict.prefix_len, held.prefix_len) if held.is_new else (0, 0)
        self._prefix_hit_tokens += found_len
        held.is_new, held.finish_reason = False, verdict.finish_reason
        held.go_on(verdict)
        verdict = verdict._replace(goes_on=held.task is not None, prefix_len=prefix_len + found_len)
        answer = SessionAnswer(fence, verdict, verdict.base_len, held.cached_len, times)
        held.verdicts.append(answer)
        held.tells_reading = False
        held.answer(answer)


def _check_limits(drafter: Drafter[Any] | None, limits: GuessLimits, message: str) -> None:
    """Raises InvalidRequest unless a session's drafter, if it has one, makes what a message asks for."""
    if drafter is None and limits.draft_count:
        limit = "0 for a session that was opened without a drafter"
        raise InvalidRequest(f"{message}.own_draft_count", limits.draft_count, limit)
    if limits.shape is not None and (drafter is None or not drafter.makes_trees):
        who = "a session without a drafter" if drafter is None else f"the drafter {drafter.name}, which makes chains"
        raise InvalidRequest(f"{message}.own_shape", "present", f"absent for {who}")
