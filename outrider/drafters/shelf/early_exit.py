"""Guesses of the target's own lower layers, in its own cache; verification goes on where they ended.

Elhoushi et al., 2024, "LayerSkip", arXiv 2404.16710: what leaves layer E - 1 goes through the final norm and the output
matrix. Keys and values of the layers below E are the target's own, and lie where those of the checked rows will.
Kangaroo (Liu et al., 2024, arXiv 2404.18911) has an adapter instead of that norm: one attention with keys of its own.
"""

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns

import structlog

from outrider.drafters.drafter import DrafterProposal, GuessLimits
from outrider.drafters.hosted import FeatureCopy, HostedDraft, TaskDraft, head_runner, without_room
from outrider.drafters.model_drafter import MODEL, DraftTask, ModelDrafter, noise_of
from outrider.drafters.shelf.lower_layers import BegunRows, lower_runner, session_ahead
from outrider.engine.batching import Feed
from outrider.engine.heads.head import Head
from outrider.engine.ops import Ops
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.errors import CacheFull, OutriderError
from outrider.estimates.timing import Meter
from outrider.parameters import Rule, SessionSpec

log = structlog.get_logger()

LAYER_SKIP = "layer_skip"


class LayerDraft(TaskDraft):
    """A session that guesses in the slots after the target's own."""

    def __init__(self, runner: ModelRunner, begun: BegunRows, exit_layer: int, spec: SessionSpec) -> None:
        TaskDraft.__init__(self)
        self._runner = runner
        self._begun = begun
        self._exit_layer = exit_layer
        self._spec = spec

    @property
    def reads_features(self) -> bool:
        # But for the last token everything must be cached, so that a guess is one row of the lower layers.
        return True

    def propose(self, session: Session, limits: GuessLimits) -> None:
        self._end()
        # The last token of a request is the target's alone.
        draft_count = min(limits.draft_count, min(self._spec.max_len - 1, self._runner.context_len) - len(session))
        if draft_count < 1:
            return
        try:
            own = session_ahead(session, draft_count)
        except CacheFull as error:
            self._fail(error)
            return
        own.grammar, self.proposal = self.grammar, None
        self.task = DraftTask(
            session=own,
            spec=self._spec,
            noise=noise_of(MODEL, self._spec.acceptance.rule),
            draft_count=draft_count,
            meter=Meter(),
            on_done=partial(self._done, session),
            on_failure=self._fail,
        )

    def _done(self, session: Session, task: DraftTask) -> None:
        self._begun.add(session, task.session, self._exit_layer)
        self._end(DrafterProposal(task.proposal, task.meter.times(), 0))

    def _fail(self, error: OutriderError) -> None:
        log.info("no guesses", drafter=LAYER_SKIP, reason=error.message)
        self._end()


class LayerSkip:
    """The target's layers below an exit layer, as a drafter."""

    name = LAYER_SKIP
    rules = frozenset(Rule)
    makes_trees = False
    runner = None

    def __init__(self, target: ModelRunner, exit_layer: int) -> None:
        """exit_layer is from 1 to one less than the target has layers; raises ModelRefused."""
        self._lower = lower_runner(target, exit_layer)
        self._exit_layer = exit_layer
        self._begun = BegunRows.in_forwards_of(target)
        self._drafter = ModelDrafter(self._lower, without_room)

    def open(self, spec: SessionSpec, salt: bytes | None) -> LayerDraft:
        return LayerDraft(self._lower, self._begun, self._exit_layer, spec)

    def advance(self, drafts: Sequence[LayerDraft]) -> None:
        self._drafter.advance([draft.task for draft in drafts if draft.task is not None])


class AdapterDraft(HostedDraft):
    """An adapter's session, which reads the target's tokens, and one ahead of the target's, which guesses with it."""

    source: Session
    ahead: Session | None = None

    def propose(self, session: Session, limits: GuessLimits) -> None:
        HostedDraft.propose(self, session, limits)
        self.source, self.ahead = session, None

    def look_ahead(self, task: DraftTask) -> Session | None:
        """The target's session with all guesses so far; None, and no guesses, where a cache has no place for them."""
        try:
            if len(self.source) != task.base_len or self.source.cached_len < task.base_len - 1:
                raise CacheFull("the target went on, or lost its cache, while the adapter read its tokens")
            if self.ahead is None:
                self.ahead = session_ahead(self.source, task.draft_count)
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

    def __init__(self, target: ModelRunner, head: Head, digest: str, ops: Ops | None = None) -> None:
        """`head` reads its own rows (HeadFacts.reads_own), the others as in head_runner. Raises ModelRefused."""
        self.name = head.facts.method
        self._lower = lower_runner(target, head.facts.taps[0], has_logits=False)
        self._begun = BegunRows.in_forwards_of(target)
        self.runner = head_runner(target, head, digest, ops)
        self._copy = FeatureCopy(target.cache, head, self.runner.model)
        self._drafter = ModelDrafter(self.runner, without_room)

    def open(self, spec: SessionSpec, salt: bytes | None) -> AdapterDraft:
        return AdapterDraft(self.runner, spec, salt, self._copy)

    def advance(self, drafts: Sequence[AdapterDraft]) -> None:
        if reading := [draft.task.session for draft in drafts if draft.task is not None and draft.is_reading]:
            self.runner.forward([Feed(session, without_last=True) for session in reading])
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
                self._begun.add(draft.source, draft.ahead, self._copy.head.facts.taps[0])
