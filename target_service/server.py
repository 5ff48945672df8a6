"""Puts the target service together. Knows no messages."""

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
from target_service.servicer import target_service
from target_service.sessions import UNACKNOWLEDGED_WINDOW, TargetSession, TargetSessions
from target_service.verifier import Verifier, VerifyTask


async def start(settings: ModelServiceSettings) -> RunningModelService:
    """Loads the model and serves; raises ModelRefused, InvalidRequest, AddressTaken."""
    return await start_with(await load_model_aside(settings), settings)


async def start_with(model: LoadedModel, settings: ModelServiceSettings) -> RunningModelService:
    """Serves a model that is loaded already; the settings' model is not looked at."""
    table = SessionTable[TargetSession](settings.lease_s)
    verifier = Verifier(model.runner, table)
    worker = DeviceWorker[VerifyTask](verifier.advance, device_setup(model), "target device")
    sessions = TargetSessions(model.runner, table, worker.submit, prefix_cache=settings.prefix_cache)
    facts = describe("target", model, unacknowledged_window=UNACKNOWLEDGED_WINDOW)
    metrics = metrics_of(settings, model, facts, sessions, worker)
    own = target_service(facts, sessions, worker, metrics.observe)
    services = {**own, **model_service(facts, sessions, worker, metrics.observe_rollback)}
    return await serve_model(settings, model, facts, worker, table, services, metrics)
