"""The draft service: its settings, and how it is put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from draft_service.servicer import DraftServicer
from draft_service.sessions import DraftSessions
from draft_service.states import DraftState
from draft_service.tasks import Steps, Task
from outrider.drafters.beam_drafter import BeamDrafter
from outrider.drafters.drafter import Drafter
from outrider.drafters.masked import drafters_of
from outrider.drafters.model_drafter import DRAFTERS, ModelDrafter
from outrider.drafters.registry import registered
from outrider.drafters.shelf.cascade import Cascade, model_cascade, text_cascade
from outrider.engine.device_thread import DeviceWorker
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N, MAX_TOP_N
from outrider.errors import ModelRefused
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outboxes
from outrider.model_service.server import LoadedModel, RunningModelService, describe, load_model_aside, serve_model
from outrider.model_service.servicer import MAX_DRAFT_COUNT
from outrider.model_service.settings import Listen, ModelServiceSettings, check_cascade, split_cascade
from outrider.process.options import Setting, within


@dataclass(frozen=True, slots=True)
class DraftSettings(ModelServiceSettings):
    """Options that an operator sets for the draft service."""

    role: ClassVar[str] = "draft"

    listen: Listen = "127.0.0.1:50051"
    top_n: Annotated[
        int,
        Setting(
            "Tokens of the distribution that a guess is drawn from and sent with, where needed.", within(1, MAX_TOP_N)
        ),
    ] = DEFAULT_TOP_N
    cascade: Annotated[
        str,
        Setting(
            "What guesses for the draft, which then verifies several of its guesses at once and proposes the same: "
            "`lookup` for repetitions in the text, a smaller model, named as --model, or `MODEL+lookup`. Empty: none."
        ),
    ] = ""
    cascade_depth: Annotated[
        int,
        Setting(
            "Guesses of a proposal behind which --cascade itself proposes the others. 0: none.",
            within(0, MAX_DRAFT_COUNT),
        ),
    ] = 0

    def __post_init__(self) -> None:
        ModelServiceSettings.__post_init__(self)
        object.__setattr__(self, "cascade", check_cascade(self.cascade, self.cascade_depth))

    @property
    def has_guest(self) -> bool:
        return bool(split_cascade(self.cascade)[0])


async def start(settings: DraftSettings) -> RunningModelService:
    """Loads the models and serves; raises ModelRefused, InvalidRequest, AddressTaken."""
    model, smaller = await load_model_aside(settings), None
    cascade_model, _ = split_cascade(settings.cascade)
    if cascade_model:
        smaller = await load_model_aside(replace(settings, model=cascade_model, context_len=None))
        difference = model.vocabulary.difference(smaller.vocabulary)
        if difference:
            raise ModelRefused(f"--cascade {cascade_model} does not fit the draft: {difference}")
    return await start_with(await model.measured(), settings, smaller, registered(model.runner))


async def start_with(
    model: LoadedModel,
    settings: DraftSettings,
    smaller: LoadedModel | None = None,
    drafters: Sequence[Drafter[Any]] = (),
) -> RunningModelService:
    """Serves models that are loaded already, `smaller` being that of the cascade; the settings' are not looked at.

    `drafters` are offered beside those of the model.
    """
    table, outboxes = LeaseTable[DraftState](settings.lease_seconds), Outboxes()
    cascade: Cascade | None = None
    hosted: Mapping[str, ModelRunner] = {}
    if smaller is not None:
        _, has_lookup = split_cascade(settings.cascade)
        cascade = model_cascade(smaller.runner, settings.top_n, settings.cascade_depth, with_text=has_lookup)
        hosted = {"cascade": smaller.runner}
    elif settings.cascade:
        cascade = text_cascade(settings.cascade_depth)
    drafter = ModelDrafter(model.runner, table.with_room, settings.top_n, ahead=cascade)

    steps = Steps(drafter, BeamDrafter(model.runner, table.with_room))
    worker = DeviceWorker[Task](steps.advance, model.set_threads, "draft device", outboxes.flush)
    sessions = DraftSessions(
        model.runner, table, worker.submit, prefix_cache=settings.prefix_cache, ahead=cascade, drafters=drafters
    )
    own = drafters_of(model.runner.config, has_cascade=cascade is not None)
    facts = replace(
        describe("draft", model),
        drafters={**own, **{each.name: each.rules for each in drafters}},
        hosted=hosted,
        hosted_costs=dict.fromkeys(own, model.row_costs),
        tree_drafters=frozenset(own) | {each.name for each in drafters if each.makes_trees},
        branch_drafters=frozenset(DRAFTERS),
    )
    serving = partial(DraftServicer, facts, sessions, worker, outboxes)
    return await serve_model(settings, model, facts, worker, sessions, serving)
