"""Guesses of the target's own lower layers, in its own cache; verification goes on where they ended.

Elhoushi et al., 2024, "LayerSkip", arXiv 2404.16710: what leaves layer E - 1 goes through the final norm and the output
matrix. Keys and values of the layers below E are the target's own, and lie where those of the checked rows will.
Kangaroo (Liu et al., 2024, arXiv 2404.18911) has an adapter instead of that norm: one attention with keys of its own.
"""

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns

import structlog

from outrider.drafters.model_drafter import MODEL, DraftTask, ModelDrafter, noise_of
from outrider.engine.batching import Feed
from outrider.engine.heads.head import Head
from outrider.engine.ops import Ops
from outrider.engine.runner import ModelRunner
from outrider.engine.session import LowerRows, Session
from outrider.errors import CacheFull, OutriderError
from outrider.parameters import Rule, SessionSpec
from outrider.timing import Meter
from target_service.own_drafts import (
    NO_PROPOSAL,
    FeatureCopy,
    HostedDraft,
    Hosting,
    OwnProposal,
    head_runner,
    without_room,
)

log = structlog.get_logger()

LAYER_SKIP = "layer_skip"


def go_on_behind(session: Session, ahead: Session, boundary: int) -> None:
    """Lets a session's next forward go on where those rows have ended that lie ahead of it."""
    session.lower = LowerRows(tuple(ahead.token_ids[len(session) - 1 : ahead.cached_len]), boundary)


class LayerDraft:
    """A session that guesses in the slots after the target's own; see OwnDraft."""

    is_reading = False
    # But for the last token everything must be cached, so that a guess is one row of the lower layers.
    reads_features = True

    def __init__(self, runner: ModelRunner, exit_layer: int, spec: SessionSpec) -> None:
        self.proposal: OwnProposal | None = NO_PROPOSAL
        self.task: DraftTask | None = None
        self._runner = runner
        self._exit_layer = exit_layer
        self._spec = spec

    def begin(self, session: Session, draft_count: int) -> None:
        self._stop()
        # The last token of a request is the target's alone.
        draft_count = min(draft_count, min(self._spec.max_len - 1, self._runner.context_len) - len(session))
        if draft_count < 1:
            return
        try:
            own = session.ahead(draft_count)
        except CacheFull as error:
            self._fail(error)
            return
        self.proposal = None
        self.task = DraftTask(
            session=own,
            spec=self._spec,
            noise=noise_of(MODEL, self._spec.acceptance.rule),
            draft_count=draft_count,
            meter=Meter(),
            on_done=partial(self._done, session),
            on_failure=self._fail,
        )

    def truncate(self, length: int) -> None:
        self._stop()

    def free(self) -> None:
        self._stop()

    def _done(self, session: Session, task: DraftTask) -> None:
        go_on_behind(session, task.session, self._exit_layer)
        self._end(OwnProposal(task.proposal, task.meter.times(), 0))

    def _stop(self) -> None:
        if self.task is not None:
            self.task.stopped = True
        self._end(NO_PROPOSAL)

    def _end(self, proposal: OwnProposal) -> None:
        self.task, self.proposal = None, proposal

    def _fail(self, error: OutriderError) -> None:
        log.info("no guesses", drafter=LAYER_SKIP, reason=error.message)
        self._stop()


class LayerSkip:
    """The target's layers below an exit layer, as a drafter."""

    rules = frozenset(Rule)
    makes_trees = False

    def __init__(self, runner: ModelRunner, exit_layer: int) -> None:
        """`runner` computes these layers; see ModelRunner.lower."""
        self._runner = runner
        self._exit_layer = exit_layer
        self._drafter = ModelDrafter(runner, without_room)

    def open(self, spec: SessionSpec, salt: bytes | None) -> LayerDraft:
        return LayerDraft(self._runner, self._exit_layer, spec)

    def advance(self, drafts: Sequence[LayerDraft]) -> None:
        self._drafter.advance([draft.task for draft in drafts if draft.task is not None])


def host_layers(target: ModelRunner, exit_layer: int) -> Hosting[LayerDraft]:
    """The drafter of the target's layers below exit_layer, from 1 to one less than it has; raises ModelRefused."""
    return Hosting(LAYER_SKIP, LayerSkip(target.lower(exit_layer), exit_layer))


class AdapterDraft(HostedDraft):
    """An adapter's session, which reads the target's tokens, and one ahead of the target's, which guesses with it."""

    source: Session
    ahead: Session | None = None

    def begin(self, session: Session, draft_count: int) -> None:
        HostedDraft.begin(self, session, draft_count)
        self.source, self.ahead = session, None

    def look_ahead(self, task: DraftTask) -> Session | None:
        """The target's session with all guesses so far; None, and no guesses, where a cache has no place for them."""
        try:
            if len(self.source) != task.base_len or self.source.cached_len < task.base_len - 1:
                raise CacheFull("the target went on, or lost its cache, while the adapter read its tokens")
            if self.ahead is None:
                self.ahead = self.source.ahead(task.draft_count)
            task.session.reserve()
        except CacheFull as error:
            self._fail(error)
            return None
        self.ahead.extend(task.session.token_ids[len(self.ahead) :])
        return self.ahead


class Kangaroo:
    """The target's lower layers and an adapter on top of them, as a drafter."""

    rules = frozenset(Rule)
    makes_trees = False

    def __init__(self, lower: ModelRunner, adapter: ModelRunner, copy: FeatureCopy) -> None:
        """`lower` computes the layers below the one that `copy` reads; see ModelRunner.lower."""
        self._lower = lower
        self._adapter = adapter
        self._copy = copy
        self._drafter = ModelDrafter(adapter, without_room)

    def open(self, spec: SessionSpec, salt: bytes | None) -> AdapterDraft:
        return AdapterDraft(self._adapter, spec, salt, self._copy)

    def advance(self, drafts: Sequence[AdapterDraft]) -> None:
        if reading := [draft.task.session for draft in drafts if draft.task is not None and draft.is_reading]:
            self._adapter.forward([Feed(session, without_last=True) for session in reading])
        # What follows goes on without a break until the proposal is there, so that nothing happens to the target's
        # session meanwhile.
        guessing = [(draft, task) for draft in drafts if (task := draft.task) is not None and not draft.is_reading]
        pairs = [(task, own) for draft, task in guessing if (own := draft.look_ahead(task)) is not None]
        while left := [(task, own) for task, own in pairs if own.cached_len < len(own)]:
            started_ns = perf_counter_ns()
            num_rows = self._lower.forward([Feed(own) for _, own in left]).num_rows
            for task, _ in left:
                task.meter.add(started_ns, perf_counter_ns(), num_rows)
        for task, own in pairs:
            self._copy(own, task.session, len(own) - 1, len(own))
        if pairs:
            self._drafter.advance([task for task, _ in pairs])
        for draft, task in guessing:
            if task.done and draft.ahead is not None:
                go_on_behind(draft.source, draft.ahead, self._copy.head.facts.taps[0])


def host_adapter(target: ModelRunner, head: Head, digest: str, ops: Ops | None = None) -> Hosting[AdapterDraft]:
    """The drafter of a head that reads its own rows (HeadFacts.reads_own); raises ModelRefused."""
    lower = target.lower(head.facts.taps[0], has_logits=False)
    runner = head_runner(target, head, digest, ops)
    return Hosting(head.facts.method, Kangaroo(lower, runner, FeatureCopy(target.cache, head, runner.model)), runner)
