"""Puts the draft service together. Knows no messages."""

from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.drafters.task import DRAFTERS, DraftTask
from draft_service.servicer import draft_service
from draft_service.sessions import DraftSession, DraftSessions
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.worker import DeviceWorker
from outrider.model_service.server import (
    LoadedModel,
    RunningModelService,
    describe,
    device_setup,
    load_model_aside,
    metrics_of,
    serve_model,
)
from outrider.model_service.servicer import model_service
from outrider.model_service.session_store import SessionTable
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
    table = SessionTable[DraftSession](settings.lease_s)
    drafter = ModelDrafter(model.runner, table.with_room, top_n)
    worker = DeviceWorker[DraftTask](drafter.advance, device_setup(model), "draft device")
    sessions = DraftSessions(model.runner, table, worker.submit, prefix_cache=settings.prefix_cache)
    facts = describe("draft", model, drafters=DRAFTERS)
    metrics = metrics_of(settings, model, facts, sessions, worker)
    own = draft_service(facts, sessions, worker, metrics.observe)
    services = {**own, **model_service(facts, sessions, worker, metrics.observe_rollback)}
    return await serve_model(settings, model, facts, worker, table, services, metrics)
