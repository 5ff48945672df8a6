"""The target service: its settings, and how it is put together."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from outrider.engine.worker import DeviceWorker
from outrider.errors import ModelRefused
from outrider.model_service.server import LoadedModel, RunningModelService, describe, load_model_aside, serve_model
from outrider.model_service.session_store import LeaseTable, Outboxes
from outrider.model_service.settings import MAX_THREADS, Listen, ModelServiceSettings, check_model
from outrider.process.options import Setting, within
from target_service.own_drafts import HOSTED, HostedDraft, HostedModel, Hosting
from target_service.servicer import TargetServicer
from target_service.sessions import UNACKNOWLEDGED_WINDOW, TargetSessions, TargetState
from target_service.verifier import Verifier, VerifyTask


@dataclass(frozen=True, slots=True)
class TargetSettings(ModelServiceSettings):
    """What an operator can set of the target service."""

    listen: Listen = "127.0.0.1:50052"
    draft_model: Annotated[
        str, Setting("A draft model in this process, for guesses that cost no message; named as --model. Empty: none.")
    ] = ""
    draft_threads: Annotated[int, Setting("Compute threads of that model.", within(1, MAX_THREADS))] = 1

    def __post_init__(self) -> None:
        ModelServiceSettings.__post_init__(self)
        if self.draft_model:
            object.__setattr__(self, "draft_model", check_model("--draft-model", self.draft_model, "draft"))


async def start(settings: TargetSettings) -> RunningModelService:
    """Loads the models and serves; raises ModelRefused, InvalidRequest, AddressTaken."""
    model, draft = await load_model_aside(settings), None
    if settings.draft_model:
        draft = await load_model_aside(replace(settings, model=settings.draft_model, threads=settings.draft_threads))
        difference = model.vocabulary.difference(draft.vocabulary)
        if difference:
            raise ModelRefused(f"--draft-model {settings.draft_model} does not fit the target: {difference}")
    return await start_with(model, settings, draft)


async def start_with(
    model: LoadedModel, settings: ModelServiceSettings, draft: LoadedModel | None = None
) -> RunningModelService:
    """Serves models that are loaded already; those of the settings are not looked at."""
    hostings = [] if draft is None else [Hosting[HostedDraft](HOSTED, HostedModel(draft.runner))]
    table, outboxes = LeaseTable[TargetState](settings.lease_seconds), Outboxes()
    verifier = Verifier(model.runner, table)
    worker = DeviceWorker[VerifyTask](verifier.advance, model.set_threads, "target device", outboxes.flush)
    sessions = TargetSessions(model.runner, table, worker.submit, prefix_cache=settings.prefix_cache, hostings=hostings)
    drafters = {hosting.name: hosting.rules for hosting in hostings}
    facts = replace(describe("target", model), unacknowledged_window=UNACKNOWLEDGED_WINDOW, drafters=drafters)
    serving = partial(TargetServicer, facts, sessions, worker, outboxes)
    return await serve_model(settings, model, facts, worker, sessions, serving)
