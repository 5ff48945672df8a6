"""Guesses of the target's own lower layers, in its own cache; verification goes on where they ended.

Elhoushi et al., 2024, "LayerSkip", arXiv 2404.16710: what leaves layer E - 1 goes through the final norm and the output
matrix. Keys and values of the layers below E are the target's own, and lie where those of the checked rows will.
"""

from collections.abc import Sequence
from functools import partial

import structlog

from outrider.drafters.model_drafter import MODEL, DraftTask, ModelDrafter, noise_of
from outrider.engine.runner import ModelRunner
from outrider.engine.session import LowerRows, Session
from outrider.errors import CacheFull, OutriderError
from outrider.parameters import Rule, SessionSpec
from outrider.rpc.fencing import Meter
from target_service.own_drafts import NO_PROPOSAL, Hosting, OwnProposal, without_room

log = structlog.get_logger()

LAYER_SKIP = "layer_skip"


class LayerDraft:
    """A session that guesses in the slots behind the target's own; see OwnDraft."""

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
        first, end = task.base_len - 1, task.session.cached_len
        session.lower = LowerRows(tuple(task.session.token_ids[first:end]), self._exit_layer)
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
