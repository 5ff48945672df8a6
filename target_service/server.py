"""The target service: its settings, and how it is put together."""

from dataclasses import dataclass, replace
from functools import partial

from outrider.engine.worker import DeviceWorker
from outrider.model_service.server import LoadedModel, RunningModelService, describe, load_model_aside, serve_model
from outrider.model_service.session_store import LeaseTable, Outboxes
from outrider.model_service.settings import Listen, ModelServiceSettings
from target_service.servicer import TargetServicer
from target_service.sessions import UNACKNOWLEDGED_WINDOW, TargetSessions, TargetState
from target_service.verifier import Verifier, VerifyTask


@dataclass(frozen=True, slots=True)
class TargetSettings(ModelServiceSettings):
    """What an operator can set of the target service."""

    listen: Listen = "127.0.0.1:50052"


async def start(settings: ModelServiceSettings) -> RunningModelService:
    """Loads the model and serves; raises ModelRefused, InvalidRequest, AddressTaken."""
    return await start_with(await load_model_aside(settings), settings)


async def start_with(model: LoadedModel, settings: ModelServiceSettings) -> RunningModelService:
    """Serves a model that is loaded already; the settings' model is not looked at."""
    table, outboxes = LeaseTable[TargetState](settings.lease_seconds), Outboxes()
    verifier = Verifier(model.runner, table)
    worker = DeviceWorker[VerifyTask](verifier.advance, model.set_threads, "target device", outboxes.flush)
    sessions = TargetSessions(model.runner, table, worker.submit, prefix_cache=settings.prefix_cache)
    facts = replace(describe("target", model), unacknowledged_window=UNACKNOWLEDGED_WINDOW)
    serving = partial(TargetServicer, facts, sessions, worker, outboxes)
    return await serve_model(settings, model, facts, worker, sessions, serving)
