"""The target service: its settings, and how it is put together."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog

from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.pass_embeddings import is_pass, read_pass
from outrider.engine.models.weights import DTYPES, resolve
from outrider.engine.worker import DeviceWorker
from outrider.errors import ModelRefused
from outrider.model_service.server import LoadedModel, RunningModelService, describe, load_model_aside, serve_model
from outrider.model_service.session_store import LeaseTable, Outboxes
from outrider.model_service.settings import MAX_THREADS, Listen, ModelServiceSettings, check_model
from outrider.process.options import Setting, within
from target_service.own_drafts import HOSTED, HostedModel, Hosting, host_head
from target_service.probing import LOOKAHEAD, PASS, Lookahead, PassChain, ProbeDrafter
from target_service.servicer import TargetServicer
from target_service.sessions import UNACKNOWLEDGED_WINDOW, TargetSessions, TargetState
from target_service.verifier import Verifier, VerifyTask

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TargetSettings(ModelServiceSettings):
    """What an operator can set of the target service."""

    listen: Listen = "127.0.0.1:50052"
    draft_model: Annotated[
        str, Setting("A draft model in this process, for guesses that cost no message; named as --model. Empty: none.")
    ] = ""
    draft_threads: Annotated[int, Setting("Compute threads of that model.", within(1, MAX_THREADS))] = 1
    head: Annotated[
        str, Setting("A head in this process that reads the target's state: a folder or a hub id. Empty: none.")
    ] = ""
    lookahead: Annotated[
        bool, Setting("Guess with n-grams that are found by Jacobi iteration, in rows beside every verdict.")
    ] = False

    def __post_init__(self) -> None:
        ModelServiceSettings.__post_init__(self)
        if self.draft_model:
            object.__setattr__(self, "draft_model", check_model("--draft-model", self.draft_model, "draft"))
        if self.head:
            check_model("--head", self.head)


async def start(settings: TargetSettings) -> RunningModelService:
    """Loads the models and serves; raises ModelRefused, InvalidRequest, AddressTaken."""
    model = await load_model_aside(settings)
    hostings: list[Hosting[Any]] = []
    if settings.lookahead:
        hostings.append(Hosting(LOOKAHEAD, ProbeDrafter(Lookahead)))
    if settings.head:
        hostings.append(await asyncio.to_thread(load_head, model, settings))
    if settings.draft_model:
        draft = await load_model_aside(replace(settings, model=settings.draft_model, threads=settings.draft_threads))
        difference = model.vocabulary.difference(draft.vocabulary)
        if difference:
            raise ModelRefused(f"--draft-model {settings.draft_model} does not fit the target: {difference}")
        hostings.append(Hosting(HOSTED, HostedModel(draft.runner), draft.runner))
    return await start_with(model, settings, hostings)


def load_head(model: LoadedModel, settings: TargetSettings) -> Hosting[Any]:
    """The head that the settings name, beside the target, or PaSS's embeddings within it; raises ModelRefused."""
    runner, folder = model.runner, Path(settings.head).expanduser()
    # Unlike a model's, a head's weights may have any name in their folder.
    folder = folder if folder.is_dir() else resolve(settings.head)
    if is_pass(folder):
        probe_ids = runner.extend(read_pass(folder, runner.parts))
        log.info("embeddings of PaSS loaded", folder=str(folder), count=len(probe_ids))
        return Hosting(PASS, ProbeDrafter(partial(PassChain, probe_ids)))
    found = read_head(folder, runner.parts)
    head = found.load(runner.parts, runner.device, DTYPES[settings.dtype], runner.ops)
    log.info("head loaded", method=found.method, folder=str(found.folder), taps=head.facts.taps, switches=found.notes)
    return host_head(runner, head, found.digest())


async def start_with(
    model: LoadedModel, settings: ModelServiceSettings, hostings: Sequence[Hosting[Any]] = ()
) -> RunningModelService:
    """Serves models that are loaded already; those of the settings are not looked at."""
    table, outboxes = LeaseTable[TargetState](settings.lease_seconds), Outboxes()
    verifier = Verifier(model.runner, table)
    worker = DeviceWorker[VerifyTask](verifier.advance, model.set_threads, "target device", outboxes.flush)
    sessions = TargetSessions(model.runner, table, worker.submit, prefix_cache=settings.prefix_cache, hostings=hostings)
    facts = replace(
        describe("target", model),
        unacknowledged_window=UNACKNOWLEDGED_WINDOW,
        drafters={hosting.name: hosting.rules for hosting in hostings},
        hosted={hosting.name: hosting.runner for hosting in hostings if hosting.runner is not None},
    )
    serving = partial(TargetServicer, facts, sessions, worker, outboxes)
    return await serve_model(settings, model, facts, worker, sessions, serving)
