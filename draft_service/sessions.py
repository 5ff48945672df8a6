"""The sessions of a draft: which message is taken, and what is known of the committed tokens.

Everything here runs on the device thread, between two steps, so that no session changes under one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from draft_service.states import BeamDraftState, DraftState, Ends, HostedState, ModelState, Wanted, check_shape
from draft_service.tasks import HostedTask, Task
from outrider.drafters.drafter import Drafter, HostedSession
from outrider.drafters.masked import PARD
from outrider.drafters.model_drafter import MODEL, Ahead
from outrider.drafters.run_ahead import BranchingTask
from outrider.drafters.scales import Experience
from outrider.engine.runner import ModelRunner
from outrider.estimates.timing import ComputeTimes, Meter
from outrider.grammar import Grammar
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outbox, SessionAnswer
from outrider.model_service.sessions import SessionStore
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence, MessageStatus, classify
from outrider.token_tree import Branch, TokenTree


class DraftSessions(SessionStore[DraftState]):
    """Sessions of a draft service."""

    def __init__(
        self,
        runner: ModelRunner,
        table: LeaseTable[DraftState],
        submit: Callable[[Task], None],
        *,
        prefix_cache: bool = True,
        ahead: Ahead | None = None,
        drafters: Sequence[Drafter[Any]] = (),
    ) -> None:
        """`submit` hands a task to the device worker that advances it; prefix_cache as in SessionStore.

        `ahead` is that of the worker's drafter, where it has one; `drafters` are those beside it.
        """
        super().__init__(runner, table, prefix_cache=prefix_cache)
        self._context_len = runner.context_len
        self._submit = submit
        self._known, self._known_of_masks = Experience(), Experience()
        self._masks = runner.config.masks
        self._ahead = ahead
        self._drafters = {each.name: each for each in drafters}

    def open(
        self,
        fence: Fence,
        spec: SessionSpec,
        wanted: Wanted,
        owner: Outbox,
        drafter: str = MODEL,
        lane: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        """Opens a session, or opens it again with a newer epoch, and asks for guesses.

        `drafter` is one that serves the spec's rule; see outrider.drafters.model_drafter. Sessions that guess for one
        request beside each other have lanes of their own. `grammar` is the spec's, compiled for this session.
        """
        status, held = self._classify_open(fence, owner)
        if status is MessageStatus.CURRENT:
            found = self._drafters.get(drafter)
            if found is not None:
                check_shape(found, wanted, "open")
            salt = self._salt(spec)
            make: Callable[..., DraftState]
            if wanted.search is not None:
                make = BeamDraftState
            elif found is not None:
                make = partial(HostedState, hosted=HostedSession.of(found, spec, grammar, salt))
            else:
                inner = None if self._ahead is None else self._ahead.open(spec, salt)
                masks: dict[str, Any] = {"known": self._known}
                if drafter == PARD:
                    masks = {"known": self._known_of_masks, "masks": self._masks}
                make = partial(ModelState, drafter=drafter, lane=lane, inner=inner, **masks)
            held = self._open(fence, spec, grammar, owner, make)
            self._draft(held, fence, wanted)
        elif status is MessageStatus.REPEAT and held is not None:
            self._attach(fence, held, owner)
            self._repeat(held, fence, wanted)

    def advance(self, fence: Fence, token_ids: tuple[int, ...], wanted: Wanted, owner: Outbox) -> None:
        """Commits tokens and asks for guesses, answers a request again, or asks for tokens."""
        held = self.table.get(fence.session_id)
        is_owner = held is not None and held.owner is owner
        num_new = len(token_ids) if wanted.search is None else wanted.search.output_len
        status = classify(fence, held.view if held else None, num_new, is_owner=is_owner)
        if held is None or status is MessageStatus.FUTURE:
            self.want_tokens(fence, held, owner)
        elif status is MessageStatus.REPEAT:
            self._repeat(held, fence, wanted)
        elif status is not MessageStatus.STALE:
            held.check(wanted, fence.base_len)
            if status is MessageStatus.REWIND:
                self._rewind(held, fence.epoch, fence.base_len - num_new)
            elif held.task is not None:
                # The gateway has moved on; the request that it overtakes is answered with what there is.
                held.task.finish()
            held.commit(fence.base_len - num_new, token_ids)
            self._draft(held, fence, wanted)

    def _repeat(self, held: DraftState, fence: Fence, wanted: Wanted) -> None:
        """Sends the last answer once more; one that is under way comes anyway, and one that was stopped begins anew."""
        if held.reply is not None:
            held.owner.put(held.reply)
        elif held.task is None:
            held.back_to(fence.base_len)
            self._draft(held, fence, wanted)

    def _draft(self, held: DraftState, fence: Fence, wanted: Wanted) -> None:
        """Starts the job of a request, whose tokens the session holds."""
        held.committed_len = held.asked_len = fence.base_len
        held.reply = None
        # The last token of a request is the target's alone, and no guess may lie past the draft's context.
        room = min(held.spec.max_len - 1, self._context_len) - fence.base_len
        ends = Ends(
            partial(self._on_done, fence, held),
            partial(self._on_found, fence, held),
            partial(self.fail, fence.session_id, held),
        )
        held.task = task = held.new_task(wanted, room, ends)
        if isinstance(task, BranchingTask):
            task.begin()
        if not task.done:
            self._submit(task)

    def _on_done(self, fence: Fence, held: DraftState, task: Task) -> None:
        held.task = None
        if isinstance(task, BranchingTask):
            # What it has found was handed on before.
            return
        times = task.found.times if isinstance(task, HostedTask) else task.meter.times()
        self._reply(fence, held, task.proposal, times)

    def _on_found(self, fence: Fence, held: DraftState, task: BranchingTask, found: TokenTree | list[Branch]) -> None:
        times, task.meter = task.meter.times(), Meter()
        if isinstance(found, TokenTree):
            self._reply(fence, held, found, times)
        else:
            held.answer(SessionAnswer(fence, found, held.committed_len, held.cached_len, times))

    def _reply(self, fence: Fence, held: DraftState, proposal: TokenTree, times: ComputeTimes) -> None:
        held.reply = SessionAnswer(fence, proposal, held.committed_len, held.cached_len, times)
        held.answer(held.reply)
