"""Puts the draft service together."""

from functools import partial

from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.drafters.task import DRAFTERS, DraftTask
from draft_service.servicer import draft_service
from draft_service.sessions import DraftSessions, DraftState
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.worker import DeviceWorker
from outrider.model_service.server import LoadedModel, RunningModelService, describe, load_model_aside, serve_model
from outrider.model_service.session_store import LeaseTable
from outrider.model_service_flags import ModelServiceSettings


async def start(settings: ModelServiceSettings, top_n: int = DEFAULT_TOP_N) -> RunningModelService:
    """Loads the model and serves; raises ModelRefused, InvalidRequest, AddressTaken."""
    return await start_with(await load_model_aside(settings), settings, top_n)


async def start_with(
    model: LoadedModel, settings: ModelServiceSettings, top_n: int = DEFAULT_TOP_N
) -> RunningModelService:
    """Serves a model that is loaded already; the settings' model is not looked at.

    A distribution that a guess was drawn from has at most top_n tokens, 1 to 256.
    """
    table = LeaseTable[DraftState](settings.lease_s)
    drafter = ModelDrafter(model.runner, table.with_room, top_n)
    worker = DeviceWorker[DraftTask](drafter.advance, model.set_threads, "draft device")
    sessions = DraftSessions(model.runner, table, worker.submit, prefix_cache=settings.prefix_cache)
    facts = describe("draft", model, drafters=DRAFTERS)
    return await serve_model(settings, model, facts, worker, sessions, partial(draft_service, facts, sessions, worker))
