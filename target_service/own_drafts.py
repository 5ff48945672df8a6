"""Guesses that the target makes for itself, just before the forward that checks them.

A drafter in the target's process costs no message: a round of such guesses takes one hop, and none where it is unasked.
A proposal is made and decided within one step, so that nothing undecided exists between two messages; it depends on
tokens, K, noise and sampling alone, and never on what was computed before. All of it runs on the device thread.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import structlog

from outrider.drafters.model_drafter import MODEL, DraftTask, ModelDrafter, noise_of
from outrider.engine.batching import MAX_STEP_TOKENS
from outrider.engine.runner import Allocate, ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.session import Session
from outrider.errors import OutriderError
from outrider.parameters import Rule, SessionSpec
from outrider.rpc.fencing import ComputeTimes, Meter
from outrider.token_tree import EMPTY, TokenTree

log = structlog.get_logger()

HOSTED = "hosted"
"""Name of the ordinary draft model in the target's process."""


class OwnProposal(NamedTuple):
    """What a session's own drafter proposed, what that cost, and how many committed tokens it had to read first."""

    tree: TokenTree
    times: ComputeTimes
    caught_up_count: int


NO_PROPOSAL = OwnProposal(EMPTY, ComputeTimes(), 0)


class OwnDraft(Protocol):
    """What a drafter keeps of one session, and the proposal that it makes for it."""

    proposal: OwnProposal | None
    """The one that was begun last; None while it is on its way."""

    @property
    def is_reading(self) -> bool:
        """Whether many tokens are to be read first, for which other sessions need not wait."""

    def begin(self, token_ids: Sequence[int], draft_count: int) -> None:
        """Begins a proposal behind these committed tokens, or just reads them for 0; whatever was begun before ends."""

    def truncate(self, length: int) -> None:
        """Committed tokens from here on are no longer so, and what was begun ends."""

    def free(self) -> None:
        """Gives back what is kept; what was begun ends."""


DraftT = TypeVar("DraftT", bound=OwnDraft)


class OwnDrafter(Protocol[DraftT]):
    """Makes proposals in the target's process."""

    rules: frozenset[Rule]

    def open(self, spec: SessionSpec, salt: bytes | None) -> DraftT:
        """A session's part; with a salt it shares what is read of equal tokens with those of the same salt."""

    def advance(self, drafts: Sequence[DraftT]) -> None:
        """One step of all of them, none of which has its proposal."""


class Hosting(Generic[DraftT]):
    """A drafter, and the proposals that sessions make with it."""

    def __init__(self, name: str, drafter: OwnDrafter[DraftT]) -> None:
        self.name = name
        self._drafter = drafter

    @property
    def rules(self) -> frozenset[Rule]:
        return self._drafter.rules

    def open(self, spec: SessionSpec, salt: bytes | None) -> DraftT:
        return self._drafter.open(spec, salt)

    def advance(self, drafts: Sequence[DraftT]) -> None:
        """One step of all that have no proposal yet; those of a step that fails have an empty one."""
        busy = [draft for draft in drafts if draft.proposal is None]
        if not busy:
            return
        try:
            self._drafter.advance(busy)
        except Exception:
            # Guesses are worth no request, and what a bug says is for the log.
            log.exception("drafting failed", drafter=self.name, num_sessions=len(busy))
            for draft in busy:
                draft.free()
                draft.proposal = NO_PROPOSAL


class HostedDraft:
    """A session of the draft model, which follows a session of the target."""

    def __init__(self, runner: ModelRunner, spec: SessionSpec, salt: bytes | None) -> None:
        self.proposal: OwnProposal | None = NO_PROPOSAL
        self.task: DraftTask | None = None
        self._runner = runner
        self._spec = spec
        self._salt = salt
        self._session: Session | None = None
        self._known_len = 0  # committed tokens that its session holds

    @property
    def is_reading(self) -> bool:
        return self.task is not None and self.task.draw_input.feed.num_committed > MAX_STEP_TOKENS

    def begin(self, token_ids: Sequence[int], draft_count: int) -> None:
        self._stop()
        # The last token of a request is the target's alone, and no guess may lie past the draft's context.
        room = min(self._spec.max_len - 1, self._runner.context_len) - len(token_ids)
        if room < 0:
            return
        if self._session is None:
            self._session = self._runner.open(token_ids, self._spec.prompt_len, self._salt)
            self._session.take_prefix()
        else:
            self._session.replace_tail(self._known_len, token_ids[self._known_len :])
        self._known_len = len(token_ids)
        caught_up_count = len(token_ids) - self._session.cached_len
        self.proposal = None
        self.task = DraftTask(
            session=self._session,
            spec=self._spec,
            noise=noise_of(MODEL, self._spec.acceptance.rule),
            draft_count=max(0, min(draft_count, room)),
            meter=Meter(),
            on_done=lambda task: self._end(OwnProposal(task.proposal, task.meter.times(), caught_up_count)),
            on_failure=self._fail,
        )

    def truncate(self, length: int) -> None:
        self._stop()
        self._known_len = min(self._known_len, length)

    def free(self) -> None:
        self._stop()
        if self._session is not None:
            self._session.free()
        self._session, self._known_len = None, 0

    def _stop(self) -> None:
        if self.task is not None:
            self.task.stopped = True
        self._end(NO_PROPOSAL)

    def _end(self, proposal: OwnProposal) -> None:
        self.task, self.proposal = None, proposal

    def _fail(self, error: OutriderError) -> None:
        log.info("no guesses", drafter=HOSTED, reason=error.message)
        self.free()


class HostedModel:
    """The ordinary draft model; its proposals are those of a draft service with the same model, bit for bit.

    It has a cache of its own. A session for which that has no room has no guesses, and takes nothing from others.
    """

    rules = frozenset(Rule)

    def __init__(self, runner: ModelRunner, top_n: int = DEFAULT_TOP_N) -> None:
        self._runner = runner
        self._drafter = ModelDrafter(runner, _without_room, top_n)

    def open(self, spec: SessionSpec, salt: bytes | None) -> HostedDraft:
        return HostedDraft(self._runner, spec, salt)

    def advance(self, drafts: Sequence[HostedDraft]) -> None:
        self._drafter.advance([draft.task for draft in drafts if draft.task is not None])


def _without_room(allocate: Allocate) -> None:
    allocate()


class OwnSession(NamedTuple):
    """One session's part in a drafter."""

    hosting: Hosting[Any]
    draft: OwnDraft


def guess(sessions: Sequence[OwnSession], awaited: Sequence[OwnDraft]) -> None:
    """Lets drafters go on until all awaited proposals are there, but for those that have much to read first.

    Such a one gets one step of its drafter, with as many rows as that reads at a time, and then its turn again; so
    does a session that is not awaited.
    """
    hostings = {each.hosting.name: each.hosting for each in sessions}
    while True:
        for name, hosting in hostings.items():
            hosting.advance([each.draft for each in sessions if each.hosting.name == name])
        if not any(draft.proposal is None and not draft.is_reading for draft in awaited):
            return
