"""Puts a gateway together: links to the services, then the server.

The target must be there before the gateway serves; the draft need not, because a gateway without it only is slower.
"""

import asyncio
import ctypes
import http.client
import importlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from gateway.generation.admission import Admission
from gateway.generation.audit import ShadowAudit
from gateway.generation.backend import Backend
from gateway.generation.frontend import Frontend, ModelNames
from gateway.generation.policies import Policies
from gateway.generation.request import CheckedRequest
from gateway.generation.sample import decode
from gateway.grpc.keys import KeyInterceptor, accounts_of
from gateway.grpc.servicer import generation_service
from gateway.keys.door import Door
from gateway.keys.usage import KeyUsage, SharedUsage
from gateway.lookup.datastore.reader import Datastore
from gateway.lookup.guesses import LookupSources
from gateway.lookup.memory import Memories
from gateway.metrics import GatewayMetrics
from gateway.rest.app import build_app
from gateway.rest.server import RunningRest, serve_rest
from gateway.rest.settings import RestSettings
from gateway.rounds.round import Round
from gateway.sessions.discovery import Discovery, places_of
from gateway.sessions.peer import ModelInfo, ServicePeer
from gateway.sessions.replicas import Placing, Replicas, Targets
from gateway.sessions.session import DraftDeadline, TargetTimeouts
from gateway.settings import GatewaySettings
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.text.turn_end import TurnEnd, turn_end
from outrider.errors import NotReady, OutriderError, VocabularyMismatch
from outrider.model_files.generation_defaults import OperatorDefaults
from outrider.model_files.vocabulary import Vocabulary
from outrider.process.metrics import (
    SCRAPE_S,
    LoopTasks,
    ProcessFigures,
    RunningMetrics,
    exposition,
    new_registry,
    scraped,
    serve_metrics,
)
from outrider.process.options import ServicePlace, listed, named_places, without_password
from outrider.process.streams import LostLines
from outrider.process.upkeep import Upkeep
from outrider.rpc import channels
from outrider.rpc.memory import RequestMemory

PROGRESS_S = 5.0
NAME_AN_END = "send what ends an answer as `stop`, or name its token as eos_token_id in generation_config.json"
# Of the time to stop, what is left to those whose answers end without their end.
LAST_WORDS_S = 1.0
# How often free memory goes back to the system. That takes 0.1 ms, and where 240 MB go back 20 ms, in a thread.
GIVE_BACK_S = 30.0

# By its name, for it needs an extra.
KEY_STORE = "gateway.keys.store"

log = structlog.get_logger()


class ExtraMissing(OutriderError):
    """The operator must install an extra of this package, or do without what needs it."""

    status = "FAILED_PRECONDITION"
    reason = "EXTRA_MISSING"
    exit_code = 78


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that serves on `address`, and on the others if its settings say so."""

    address: str
    backend: Backend
    frontend: Frontend
    door: Door | None
    server: channels.RunningServer
    tasks: tuple[asyncio.Task[None], ...]
    metrics: RunningMetrics | None
    rest: RunningRest | None
    lame_duck_s: float

    @property
    def further_addresses(self) -> Mapping[str, str]:
        served = {"rest": self.rest, "metrics": self.metrics}
        return {name: running.address for name, running in served.items() if running is not None}

    @property
    def rest_address(self) -> str:
        """Address on which it serves REST; raises KeyError when it does not."""
        return self.further_addresses["rest"]

    async def stop(self, grace_s: float = channels.DRAIN_S) -> None:
        """Says that it stops, and after lame_duck_s turns away who waits or comes; requests that run have what is left
        of grace_s to end, and shortly before that learn that it is over. Only then it closes its ports and links.
        """
        admission, ends_s = self.frontend.admission, time.monotonic() + grace_s
        admission.is_leaving = True
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        await self.server.say_not_serving()
        await asyncio.sleep(min(self.lame_duck_s, grace_s))
        admission.close()
        # A closed port could not send clients elsewhere.
        try:
            wait_s = ends_s - min(LAST_WORDS_S, grace_s / 2) - time.monotonic()
            await asyncio.wait_for(admission.emptied(), max(0.0, wait_s))
        except TimeoutError:
            admission.end()
        # Both surfaces at once: the grace is one.
        left_s = max(0.0, ends_s - time.monotonic())
        await asyncio.gather(self.server.stop(left_s), *([self.rest.stop(left_s)] if self.rest else []))
        await _close(self.backend)
        if self.door is not None:
            await self.door.usage.close()
        if self.metrics is not None:
            await self.metrics.stop()


async def start(settings: GatewaySettings) -> RunningGateway:
    """Starts a gateway and returns when it serves.

    Raises NotReady when the target does not answer in time, VocabularyMismatch when the tokenizer does not fit it,
    WrongService, ModelRefused for tokenizer or chat template, KeysRefused, KeyStoreRefused, ExtraMissing, AddressTaken.
    """
    # First, because it takes no time, and nothing else does any good when it fails.
    door = Door(settings.api_keys, usage=_usage(settings)) if settings.api_keys else None
    tokenizer = await asyncio.to_thread(Tokenizer, settings.tokenizer)
    template = await asyncio.to_thread(ChatTemplate.read, settings.tokenizer, settings.tool_format)
    registry, upkeep = new_registry(), Upkeep()
    for collector in (ProcessFigures(), LoopTasks(), LostLines(), upkeep):
        registry.register(collector)
    async with AsyncExitStack() as undo:
        if door is not None:
            undo.push_async_callback(door.usage.close)
            await door.usage.start()
        figures = None
        if settings.metrics_listen:
            figures = serve_metrics(settings.metrics_listen, registry, upkeep)
            undo.push_async_callback(figures.stop)
            # With port 0 nothing else says where.
            log.info("serving metrics", address=figures.address)
        closing = turn_end(template, tokenizer)
        backend = _backend(settings, tokenizer, closing, registry, upkeep)
        undo.push_async_callback(_close, backend)
        await _await_target(backend.target, settings.target_wait_seconds)
        await asyncio.gather(*(_await_draft(each, settings.draft_wait_seconds) for each in backend.drafts.values()))
        _tell_ends(backend, closing)
        metrics = GatewayMetrics(registry)
        names = ModelNames.of(listed(settings.served_model_name), backend.target.present().model_name)
        frontend = Frontend(backend, Admission(settings.max_requests, settings.max_queue), metrics, template, names)
        metrics.watch(frontend.admission, backend, door)
        memory = RequestMemory(settings.request_memory_mib << 20)
        shares_port, tls = bool(settings.figures_of_all), settings.tls()
        server = await channels.serve(
            settings.listen,
            generation_service(frontend, settings.client_stall_seconds, door),
            reflects=settings.reflection,
            shares_port=shares_port,
            interceptors=[KeyInterceptor(door)] if door is not None else [],
            tls=tls,
            accounts=accounts_of(memory, door),
        )
        undo.push_async_callback(server.stop, 0.0)
        rest = None
        if settings.rest_listen:
            rest_settings = RestSettings.of(settings, memory, door, int(server.address.rpartition(":")[2]))
            app = build_app(frontend, rest_settings, registry, partial(_scrape, registry, settings.figures_of_all))
            rest = await serve_rest(settings.rest_listen, app, shares_port=shares_port, tls=tls, upkeep=upkeep)
        undo.pop_all()
    working: dict[str, Callable[[], Awaitable[None]]] = {
        "readiness": partial(server.follow, lambda: backend.target.info is not None),
        "audit": partial(backend.audit.run, partial(_again, backend)),
        "weights": backend.target.tell_left_out,
        "memory": give_back_memory,
    }
    tasks = tuple(asyncio.create_task(upkeep.keep(name, work), name=name) for name, work in working.items())
    lame_duck_s = settings.lame_duck_seconds
    return RunningGateway(server.address, backend, frontend, door, server, tasks, figures, rest, lame_duck_s)


def _usage(settings: GatewaySettings) -> KeyUsage | None:
    """Where what is used of the keys' limits is counted, None for this process alone; raises ExtraMissing."""
    if not settings.key_store:
        return SharedUsage(settings.usage_of_all, settings.worker) if settings.usage_of_all else None
    shown = without_password(settings.key_store)
    try:
        store = importlib.import_module(KEY_STORE)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("redis"):
            raise
        message = f"key_store is {shown!r}, but nothing here can ask it: pip install 'outrider[redis]'."
        raise ExtraMissing(message, field="key_store", value=shown) from None
    usage: KeyUsage = store.RedisUsage(settings.key_store, shown)
    return usage


def _tell_ends(backend: Backend, closing: TurnEnd) -> None:
    """Says with which tokens answers end, and what is wrong with that."""
    of_target, tokenizer = backend.target.present().eos_token_ids, backend.tokenizer
    told = {
        f"{tokenizer.piece(token_id).text} ({token_id})": [
            *(["the target"] if token_id in of_target else []),
            *(["the chat template"] if token_id in backend.turn_ends else []),
        ]
        for token_id in sorted(of_target | backend.turn_ends)
    }
    log.info("ends of answers", tokens=told)
    if not told:
        log.warning("no token ends an answer", advice=NAME_AN_END)
    if closing.fault:
        log.warning("the end of a turn is not known", reason=closing.fault, advice=NAME_AN_END)


def _backend(
    settings: GatewaySettings, tokenizer: Tokenizer, closing: TurnEnd, registry: CollectorRegistry, upkeep: Upkeep
) -> Backend:
    lookup = None
    if settings.lookup:
        datastore = Datastore.open(settings.datastore, tokenizer.vocabulary()) if settings.datastore else None
        num_tokens = settings.lookup_memory_tokens
        memories = Memories(num_tokens, settings.lookup_memory_mib << 20) if num_tokens else None
        lookup = LookupSources(memories, datastore)
    target, drafts = _services(settings, partial(_check_vocabulary, tokenizer, settings.tokenizer), upkeep)
    return Backend(
        tokenizer=tokenizer,
        target=target,
        drafts=drafts,
        policies=Policies(),
        draft_deadline=DraftDeadline(settings.draft_deadline_min_s, settings.draft_deadline_max_s),
        target_timeouts=TargetTimeouts(
            stall_s=settings.target_stall_seconds, rebuild_budget_s=settings.rebuild_budget_seconds
        ),
        audit=ShadowAudit(settings.audit_fraction, registry),
        lookup=lookup,
        branches=settings.branches,
        turn_ends=frozenset() if closing.token_id is None else frozenset({closing.token_id}),
        upkeep=upkeep,
    )


def _again(backend: Backend, request: CheckedRequest, target: ModelInfo) -> AsyncGenerator[Round, None]:
    """The rounds of a request that is decoded again, on a target of such numerics where there is one."""
    return decode(request, backend, target, Placing(target.model_hash, numerics_id=target.numerics_id))[1]


def _services(
    settings: GatewaySettings, fits: Callable[[ModelInfo], None], upkeep: Upkeep
) -> tuple[Targets, dict[str, Replicas]]:
    """Targets, and drafts by name, which are looked for from now on; raises InvalidRequest about files of addresses."""

    def link(role: str, own_name: str, defaults: OperatorDefaults | None, address: str, name: str) -> ServicePeer:
        # Each looks for itself whether files have been replaced.
        tls = copy(files)
        return ServicePeer(role, address, fits, tls=tls, defaults=defaults, upkeep=upkeep, name=own_name or name)

    files = settings.service_tls()
    target, drafts = Targets([], "target", settings.target), dict[str, Replicas]()
    looks: list[tuple[Replicas, list[ServicePlace]]] = [(target, places_of("target", listed(settings.target)))]
    for name, words in named_places(settings.draft).items():
        drafts[name] = Replicas([], "draft", ",".join(words))
        looks.append((drafts[name], places_of("draft", words)))
    to_target = partial(link, "target", settings.target_name, settings.defaults)
    to_draft = partial(link, "draft", settings.draft_name, None)
    for replicas, places in looks:
        Discovery(replicas, places, to_target if replicas is target else to_draft).start(upkeep)
    return target, drafts


async def give_back_memory() -> None:
    """Gives free memory back to the system, again and again, where the C library can.

    By itself glibc keeps what lies in pieces between those in use: hundreds of MB once a few large requests were here.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while True:
        await asyncio.sleep(GIVE_BACK_S)
        if trim is not None:
            await asyncio.to_thread(trim, 0)


async def _scrape(registry: CollectorRegistry, figures_of_all: str, names: Sequence[str]) -> tuple[bytes, str]:
    """The figures of this gateway, and of a worker those of all: else every scrape would show another one's."""
    if not figures_of_all:
        return exposition(registry, names)
    try:
        # Longer than a worker that does not answer keeps the others' figures.
        return await asyncio.to_thread(scraped, figures_of_all, names, 2 * SCRAPE_S)
    except (OSError, http.client.HTTPException):
        raise NotReady("The figures of all workers are not to be had", address=figures_of_all) from None


def _check_vocabulary(tokenizer: Tokenizer, name: str, info: ModelInfo) -> None:
    """A model's ids must mean the same tokens as the gateway's tokenizer, which is the target's."""
    difference = tokenizer.misfit(Vocabulary(info.vocabulary_size, info.vocabulary_digests))
    if difference is not None:
        raise VocabularyMismatch(
            f"The {info.role} model {info.model_name} does not fit the tokenizer of {name}: "
            f"{difference[0].lower()}{difference[1:]}"
        )


async def _await_target(target: Replicas, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while not await target.settled(min(PROGRESS_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            reason = "" if target.refusal is None else f": {target.refusal.message}"
            message = f"{target} did not answer within {timeout_s:g} seconds{reason}"
            # A refusal of certificates is of its own kind, whose exit code keeps supervisors from trying for ever.
            kind = NotReady if target.refusal is None else type(target.refusal)
            raise kind(message, address=target.address)
        log.warning("waiting", service=str(target), seconds_left=round(until_s - time.monotonic()))
    target.present()


async def _await_draft(draft: Replicas, timeout_s: float) -> None:
    """Gives the draft a moment; without one that answers and fits, answers are the same, later."""
    if not await draft.settled(timeout_s):
        log.warning("serving without the draft until it answers", service=str(draft))
    elif draft.info is None and draft.mismatch is not None:
        log.warning("serving without the draft until one that fits is there", service=str(draft))


async def _close(backend: Backend) -> None:
    for replicas in (backend.target, *backend.drafts.values()):
        await replicas.close()
