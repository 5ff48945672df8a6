"""The sessions of a draft: which message is taken, and what is known of the committed tokens.

Everything here runs on the device thread, between two steps, so that no session changes under one.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from outrider.beams import LiveBeam
from outrider.drafters.beam_drafter import BeamDraftTask
from outrider.drafters.cascade import Cascade, CheaperDraft
from outrider.drafters.model_drafter import MODEL, DraftTask, Learn, noise_of
from outrider.drafters.scales import Experience
from outrider.drafters.tree_drafter import as_tree
from outrider.engine.beams import Beams
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outbox, SessionAnswer
from outrider.model_service.session_state import SessionState
from outrider.model_service.sessions import SessionStore
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence, MessageStatus, classify
from outrider.timing import Meter
from outrider.token_tree import TokenTree, TreeShape


class Search(NamedTuple):
    """A beam search that a message asks for: how wide it is, and its live beams, none at the prompt."""

    width: int
    beams: tuple[LiveBeam, ...]

    @property
    def output_len(self) -> int:
        """Number of tokens of each beam after the prompt."""
        return len(self.beams[0].token_ids) if self.beams else 0


class Wanted(NamedTuple):
    """Number of guesses that a message asks for. `arrived_ns` is when it came, on time.perf_counter_ns.

    With a shape they are rows of a tree, without one a chain.
    """

    draft_count: int
    arrived_ns: int
    shape: TreeShape | None = None
    search: Search | None = None


@dataclass(slots=True, eq=False)
class DraftState(SessionState[DraftTask | BeamDraftTask]):
    """A session as the draft keeps it. After the committed tokens its `session` may hold guesses, as a cache."""

    drafter: str = MODEL
    lane: int = 0
    """Number of the draft among those of the request."""
    cheaper: CheaperDraft | None = None
    """Cheaper guesser of the draft, where there is a cascade."""
    committed_len: int = field(init=False)
    asked_len: int = 0
    """base_len of the last request of this epoch, 0 before the first."""
    reply: SessionAnswer[TokenTree] | None = None
    """The answer to the last request of this epoch, None while it is under way."""
    beams: Beams | None = None
    """Beams on its tokens, the prompt, where it is a search; after the live ones they hold guesses."""
    learn: Learn | None = None
    """Function that learns from the tokens that follow it."""

    def __post_init__(self) -> None:
        self.committed_len = len(self.session)

    @property
    def answerable(self) -> Collection[int]:
        return (self.asked_len,)

    def rewind(self, epoch: int, length: int) -> bool:
        """Begins an epoch at a length, at most the committed one; returns whether a job was stopped."""
        was_stopped = self.stop_job()
        if self.beams is not None:
            self.beams.free_beams()
        self.session.truncate(min(length, len(self.session)))
        self.epoch, self.committed_len, self.asked_len, self.reply = epoch, length, 0, None
        return was_stopped

    @property
    def cached_len(self) -> int:
        if self.beams is None:
            return min(self.session.cached_len, self.committed_len)
        live = self.beams.parents or self.beams.sessions or [self.session]
        return min(*(session.cached_len for session in live), self.committed_len)

    def free(self) -> None:
        SessionState.free(self)  # super() does not know a class with slots that dataclass has made anew
        if self.beams is not None:
            self.beams.free_beams()
        if self.cheaper is not None:
            self.cheaper.free()


class DraftSessions(SessionStore[DraftState]):
    """Sessions of a draft service."""

    def __init__(
        self,
        runner: ModelRunner,
        table: LeaseTable[DraftState],
        submit: Callable[[DraftTask | BeamDraftTask], None],
        *,
        prefix_cache: bool = True,
        cascade: Cascade | None = None,
    ) -> None:
        """`submit` hands a task to the device worker that advances it; prefix_cache as in SessionStore.

        `cascade` is that of the worker's drafter, where it has one.
        """
        super().__init__(runner, table, DraftState, prefix_cache=prefix_cache)
        self._context_len = runner.context_len
        self._submit = submit
        self._known = Experience()
        self._cascade = cascade

    def open(
        self, fence: Fence, spec: SessionSpec, wanted: Wanted, owner: Outbox, drafter: str = MODEL, lane: int = 0
    ) -> None:
        """Opens a session, or opens it again with a newer epoch, and asks for guesses.

        `drafter` is one that serves the spec's rule; see outrider.drafters.model_drafter. Sessions that guess for one
        request beside each other have lanes of their own.
        """
        status, held = self._classify_open(fence, owner)
        if status is MessageStatus.CURRENT:
            held = self._open(fence, spec, owner)
            held.drafter, held.lane = drafter, lane
            held.beams = None if wanted.search is None else Beams(held.session)
            if self._cascade is not None:
                if held.cheaper is not None:
                    held.cheaper.free()
                held.cheaper = self._cascade.open(spec, held.session.salt)
            self._draft(held, fence, wanted)
        elif status is MessageStatus.REPEAT and held is not None:
            self._attach(fence, held, owner)
            self._repeat(held, fence, wanted)

    def advance(self, fence: Fence, token_ids: tuple[int, ...], wanted: Wanted, owner: Outbox) -> None:
        """Commits tokens and asks for guesses, answers a request again, or asks for tokens."""
        held = self.table.get(fence.session_id)
        is_owner = held is not None and held.owner is owner
        search = wanted.search
        num_new = len(token_ids) if search is None else search.output_len
        status = classify(fence, held.view if held else None, num_new, is_owner=is_owner)
        if held is None or status is MessageStatus.FUTURE:
            self.want_tokens(fence, held, owner)
        elif status is MessageStatus.REPEAT:
            self._repeat(held, fence, wanted)
        elif status is not MessageStatus.STALE:
            _check_search(search, held, fence)
            if status is MessageStatus.REWIND:
                self._rewind(held, fence.epoch, fence.base_len - num_new)
            elif held.task is not None:
                # The gateway has moved on; the request that it overtakes is answered with what there is.
                held.task.finish()
            if search is None:
                base_len, made = fence.base_len - len(token_ids), held.reply and held.reply.content
                if made is not None and held.learn is not None and held.asked_len == base_len:
                    held.learn(made, token_ids)
                held.session.replace_tail(base_len, token_ids)
            self._draft(held, fence, wanted)

    def _repeat(self, held: DraftState, fence: Fence, wanted: Wanted) -> None:
        """Sends the last answer once more; one that is under way comes anyway, and one that was stopped begins anew."""
        if held.reply is not None:
            held.owner.put(held.reply)
        elif held.task is None:
            if wanted.search is None:
                held.session.truncate(fence.base_len)
            self._draft(held, fence, wanted)

    def _draft(self, held: DraftState, fence: Fence, wanted: Wanted) -> None:
        """Starts the job of a request, whose tokens the session holds."""
        held.committed_len = held.asked_len = fence.base_len
        held.reply = None
        # The last token of a request is the target's alone, and no guess may lie past the draft's context.
        room = min(held.spec.max_len - 1, self._context_len) - fence.base_len
        if wanted.search is not None and held.beams is not None:
            self._search(held, held.beams, fence, wanted, wanted.search, room)
            return
        task = DraftTask(
            session=held.session,
            spec=held.spec,
            noise=noise_of(held.drafter, held.spec.acceptance.rule),
            draft_count=max(0, min(wanted.draft_count, room)),
            meter=Meter(wanted.arrived_ns),
            on_done=partial(self._on_done, fence, held),
            on_failure=partial(self.fail, fence.session_id, held),
            lane=held.lane,
            inner=held.cheaper,
        )
        if wanted.shape is not None and task.draft_count:
            # Where it is the room that counts, a tree may have as many rows as are wanted, and no deeper ones.
            task = as_tree(task, wanted.shape, wanted.draft_count, room, self._known)
        held.task = task
        self._submit(task)

    def _search(self, held: DraftState, beams: Beams, fence: Fence, wanted: Wanted, search: Search, room: int) -> None:
        """Starts the job of a search, whose beams come with each request."""
        beams.become(search.beams)
        held.task = BeamDraftTask(
            beams=beams,
            spec=held.spec,
            width=search.width,
            draft_count=wanted.draft_count if search.beams else 0,
            max_steps=room,
            meter=Meter(wanted.arrived_ns),
            on_done=partial(self._on_done, fence, held),
            on_failure=partial(self.fail, fence.session_id, held),
        )
        self._submit(held.task)

    def _on_done(self, fence: Fence, held: DraftState, task: DraftTask | BeamDraftTask) -> None:
        held.task = None
        held.learn = task.learn if isinstance(task, DraftTask) else None
        held.reply = SessionAnswer(fence, task.proposal, held.committed_len, held.cached_len, task.meter.times())
        held.answer(held.reply)


def _check_search(search: Search | None, held: DraftState, fence: Fence) -> None:
    """Raises InvalidRequest unless a message has beams just where its session does, after its prompt."""
    if (search is None) != (held.beams is None):
        limit = "present where the session was opened with beams, and only there"
        raise InvalidRequest("advance.beams", "absent" if search is None else "present", limit)
    if search is not None and fence.base_len != held.spec.prompt_len + search.output_len:
        limit = f"{held.spec.prompt_len + search.output_len}, a prompt and its beams"
        raise InvalidRequest("fence.base_len", fence.base_len, limit)
