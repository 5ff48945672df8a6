"""The draft service: its settings, and how it is put together."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

from draft_service.servicer import DraftServicer
from draft_service.sessions import DraftSessions, DraftState
from outrider.drafters.model_drafter import DRAFTERS, DraftTask, ModelDrafter
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N, MAX_TOP_N
from outrider.engine.worker import DeviceWorker
from outrider.model_service.server import LoadedModel, RunningModelService, describe, load_model_aside, serve_model
from outrider.model_service.session_store import LeaseTable, Outboxes
from outrider.model_service.settings import Listen, ModelServiceSettings
from outrider.process.options import Setting, within


@dataclass(frozen=True, slots=True)
class DraftSettings(ModelServiceSettings):
    """What an operator can set of the draft service."""

    role: ClassVar[str] = "draft"

    listen: Listen = "127.0.0.1:50051"
    top_n: Annotated[
        int,
        Setting(
            "Tokens of the distribution that a guess is drawn from and sent with, where needed.", within(1, MAX_TOP_N)
        ),
    ] = DEFAULT_TOP_N


async def start(settings: DraftSettings) -> RunningModelService:
    """Loads the model and serves; raises ModelRefused, InvalidRequest, AddressTaken."""
    return await start_with(await load_model_aside(settings), settings)


async def start_with(model: LoadedModel, settings: DraftSettings) -> RunningModelService:
    """Serves a model that is loaded already; the settings' model is not looked at."""
    table, outboxes = LeaseTable[DraftState](settings.lease_seconds), Outboxes()
    drafter = ModelDrafter(model.runner, table.with_room, settings.top_n)
    worker = DeviceWorker[DraftTask](drafter.advance, model.set_threads, "draft device", outboxes.flush)
    sessions = DraftSessions(model.runner, table, worker.submit, prefix_cache=settings.prefix_cache)
    facts = replace(describe("draft", model), drafters=DRAFTERS, tree_drafters=frozenset(DRAFTERS))
    serving = partial(DraftServicer, facts, sessions, worker, outboxes)
    return await serve_model(settings, model, facts, worker, sessions, serving)
