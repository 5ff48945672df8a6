"""Puts a service with a model together: what draft and target have in common.

Loading happens off the loop; from then on only the device thread touches the model.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog
import torch

from outrider.engine.device_thread import DeviceWorker
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.models.progress import Progress
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused, NotReady, OutriderError
from outrider.estimates.timing import ComputeTimes
from outrider.grammar import GrammarEngine
from outrider.model_files.ends import find_ends, told
from outrider.model_files.generation_defaults import ModelDefaults
from outrider.model_files.vocabulary import Vocabulary, tokenizer_doubt, tokenizer_in
from outrider.model_service.leases import LeaseTable
from outrider.model_service.link import LinkServicer
from outrider.model_service.metrics import ServiceMetrics
from outrider.model_service.row_costs import measure_rows, warm_up
from outrider.model_service.servicer import ServiceFacts, model_service
from outrider.model_service.sessions import SessionStore
from outrider.model_service.settings import ModelServiceSettings
from outrider.model_service.watchdog import watch
from outrider.process.metrics import LoopTasks, RunningMetrics, serve_metrics
from outrider.process.options import flag_of
from outrider.process.progress import FITTING
from outrider.process.run import exit_now
from outrider.process.streams import LostLines
from outrider.rpc import channels

log = structlog.get_logger()

# After the grace at most one forward is under way, and no session wants it any more. Together with the default grace it
# is less than outrider.process.children.STOP_GRACE_S, so that a supervisor hears the reason before it kills.
DEVICE_PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and the digests of its tokenizer."""

    runner: ModelRunner
    vocabulary: Vocabulary
    grammars: GrammarEngine | None = None
    """None for a draft without a tokenizer."""
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer and that the model can say."""
    recommended: ModelDefaults = field(default_factory=ModelDefaults)
    row_costs: Mapping[int, int] = field(default_factory=dict)
    """Microseconds of a forward by its rows; empty where that was not measured."""

    async def measured(self) -> "LoadedModel":
        """The model with the costs of its forwards, before it serves."""
        with Progress("measuring forwards", self.runner.identity.model_name):
            await asyncio.to_thread(warm_up, self.runner)
            return replace(self, row_costs=await asyncio.to_thread(measure_rows, self.runner))

    def set_threads(self) -> None:
        """Sets torch's number of threads, which it keeps for each thread that calls it; runs on the device thread."""
        torch.set_num_threads(self.runner.torch_threads)


@dataclass(frozen=True, slots=True)
class RunningModelService:
    """A service that answers on `address`. The parts are there for tests and observers."""

    address: str
    server: channels.RunningServer
    worker: DeviceWorker[Any]
    table: LeaseTable[Any]
    runner: ModelRunner
    facts: ServiceFacts
    servicer: LinkServicer[Any, Any]
    tasks: tuple[asyncio.Task[None], ...]
    metrics: RunningMetrics | None = None
    at_end: Callable[[], object] = bool
    """What is to be done when the device has ended; it may write to disks."""

    @property
    def further_addresses(self) -> Mapping[str, str]:
        return {} if self.metrics is None else {"metrics": self.metrics.address}

    async def stop(self, grace_s: float = channels.DRAIN_S) -> None:
        """Takes no new sessions, gives running ones grace_s to end, frees what is left, and ends the device thread.

        Idempotent; a second call may shorten the grace of the first. Raises OutriderError when the device does not
        come to an end within DEVICE_PATIENCE_S after the grace; what is left then ends as soon as the device answers.
        """
        self.servicer.drain(grace_s)
        # gRPC cancels the calls and does not wait for their handlers, each of which waits for the device.
        await self.server.stop(grace_s)
        try:
            async with asyncio.timeout(DEVICE_PATIENCE_S):
                await asyncio.shield(self._end_device())
        except TimeoutError:
            raise OutriderError(f"the device has not answered for {DEVICE_PATIENCE_S} s after the grace") from None
        finally:
            # The code that stops a service hears how that went, and must not be ended by it later.
            for task in self.tasks:
                task.cancel()
            if self.metrics is not None:
                await self.metrics.stop()

    async def _end_device(self) -> None:
        # Where another call has ended the device, it has freed everything before.
        with suppress(NotReady):
            await self.worker.call(self.table.clear)
        await self.worker.close()
        await asyncio.to_thread(self.at_end)


def load_model(settings: ModelServiceSettings) -> LoadedModel:
    """Loads what the settings name; takes seconds, and raises ModelRefused and InvalidRequest."""
    checkpoint = find_checkpoint(settings.model)
    tokenizer = tokenizer_in(checkpoint.folder)
    # Read once: a large one takes half a second.
    num_rows = checkpoint.config.vocab_size
    vocabulary = (
        Vocabulary.read(checkpoint.folder)
        if tokenizer is None
        else Vocabulary.embedded(tokenizer, num_rows, checkpoint.name)
    )
    # A model that is made has ends without a file that says so.
    made = dict.fromkeys(checkpoint.config.eos_token_ids, ("the model",))
    ends = made | find_ends(checkpoint.folder, tokenizer)
    never = sorted(each for each in ends if each >= vocabulary.size)
    if never:
        message = (
            f"{checkpoint.name} ends with the token ids {never}, but it can say only those below {vocabulary.size}"
        )
        if len(never) == len(ends):
            raise ModelRefused(message, eos_token_ids=never, vocabulary_size=vocabulary.size)
        log.warning("ends that are never said", model=checkpoint.name, reason=message)
        ends = {token_id: places for token_id, places in ends.items() if token_id < vocabulary.size}
    if tokenizer is not None and (reason := tokenizer_doubt(checkpoint.folder)):
        log.warning("tokens may be wrong", model=checkpoint.name, reason=reason)
    try:
        runner = ModelRunner.load(
            checkpoint,
            device=settings.device,
            dtype=str(settings.dtype),
            kernels=settings.kernels.value,
            num_threads=settings.threads,
            kv_tokens=settings.kv_tokens,
            kv_memory_share=settings.memory_share,
            kv_dtype=settings.kv_dtype.value,
            context_len=settings.context_len,
            vocabulary_size=vocabulary.size,
        )
    except InvalidRequest as error:
        raise error.rename_fields(flag_of) from None
    grammars = None
    if tokenizer is not None:
        try:
            # Of the whole tokenizer: what the model has no row for is never said, whatever a grammar allows.
            size = Vocabulary.of(tokenizer.get_vocab(with_added_tokens=True).items()).size
            grammars = GrammarEngine(tokenizer.to_str(), size, ends.keys())
        except ValueError as error:
            log.warning("no grammars can be served", model=runner.identity.model_name, reason=str(error))
    log.info(FITTING, model=runner.identity.model_name, reason=runner.cache_reason, context_len=runner.context_len)
    log.info("model loaded", model=runner.identity.model_name, numerics_id=runner.numerics_id, threads=settings.threads)
    log.info("ends of answers", tokens={told(token_id, tokenizer): list(places) for token_id, places in ends.items()})
    return LoadedModel(runner, vocabulary, grammars, frozenset(ends), ModelDefaults.read(checkpoint.folder))


async def load_model_aside(settings: ModelServiceSettings) -> LoadedModel:
    """`load_model` without blocking the loop."""
    return await asyncio.to_thread(load_model, settings)


def describe(role: str, model: LoadedModel) -> ServiceFacts:
    """Facts that all services have in common; every call names another incarnation."""
    runner, identity = model.runner, model.runner.identity
    weights = runner.model.weights
    return ServiceFacts(
        role=role,
        instance_id=secrets.randbits(64),
        model_name=identity.model_name,
        model_hash=runner.identity.model_hash,
        numerics_id=runner.numerics_id,
        parameter_count=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        weight_dtype=identity.dtype,
        device=runner.model.device_name,
        thread_count=identity.num_threads,
        context_len=runner.context_len,
        vocabulary_size=runner.vocabulary_size,
        vocabulary_digests=model.vocabulary.digests,
        eos_token_ids=model.ends | {each for each in runner.config.eos_token_ids if each < runner.vocabulary_size},
        block_size=runner.pool.block_size,
        block_count=runner.pool.num_blocks,
        grammars=model.grammars,
        generation_defaults=model.recommended.defaults,
        row_costs=model.row_costs,
    )


async def serve_model(
    settings: ModelServiceSettings,
    model: LoadedModel,
    facts: ServiceFacts,
    worker: DeviceWorker[Any],
    sessions: SessionStore[Any],
    serving: Callable[[Callable[[ComputeTimes], None]], LinkServicer[Any, Any]],
) -> RunningModelService:
    """Serves on the settings' addresses; raises AddressTaken, and then ends the device thread.

    `serving` makes the service beside ModelService, given what takes note of the cost of answers.
    """
    metrics = ServiceMetrics(facts, sessions.counts, sessions.unread, model.runner.forward_counts, worker)
    servicer = serving(metrics.observe)
    upkeep = servicer.upkeep
    for collector in (LoopTasks(), LostLines(), upkeep):
        metrics.registry.register(collector)
    services = {**servicer.services, **model_service(facts, sessions, worker, metrics.observe_rollback)}
    async with AsyncExitStack() as undo:
        undo.push_async_callback(worker.close)
        exporting = None
        if settings.metrics_listen:
            exporting = serve_metrics(settings.metrics_listen, metrics.registry, upkeep)
            undo.push_async_callback(exporting.stop)
            # With port 0 nothing else says where.
            log.info("serving metrics", address=exporting.address)
        server = await channels.serve(settings.listen, services, tls=settings.tls(), clients=settings.clients)
        undo.pop_all()
    working: dict[str, Callable[[], Awaitable[None]]] = {
        "watchdog": partial(watch, lambda: worker.stalled_us, settings.stall_seconds, server.say_not_serving, exit_now),
        "health": partial(server.follow, lambda: not upkeep.failing),
    }
    tasks = tuple(asyncio.create_task(upkeep.keep(name, work), name=name) for name, work in working.items())
    return RunningModelService(
        server.address, server, worker, sessions.table, model.runner, facts, servicer, tasks, exporting
    )
