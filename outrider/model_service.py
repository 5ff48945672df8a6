"""Puts a service with a model together: what draft and target have in common. Knows neither's messages.

Loading happens off the loop; from then on only the device thread touches the model.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import grpc
import structlog
import torch

from outrider import rpc
from outrider.engine.runner import ModelRunner
from outrider.engine.weights import resolve
from outrider.engine.worker import DeviceWorker
from outrider.model_service_flags import ModelServiceSettings
from outrider.model_servicer import ServiceFacts
from outrider.sessions import SessionTable
from outrider.vocabulary import Vocabulary

log = structlog.get_logger()

Services = Mapping[str, Callable[[grpc.aio.Server], None]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and the digests of its tokenizer."""

    runner: ModelRunner
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class RunningModelService:
    """A service that answers on `address`. The parts are there for tests and observers."""

    address: str
    server: rpc.RunningServer
    worker: DeviceWorker[Any]
    table: SessionTable[Any]
    runner: ModelRunner
    facts: ServiceFacts

    async def stop(self, grace_s: float = rpc.DRAIN_S) -> None:
        """Takes no new sessions, gives running ones grace_s to end, frees what is left, and ends the device thread."""
        await self.server.stop(grace_s)
        await self.worker.call(self.table.clear)
        await self.worker.close()


def load_model(settings: ModelServiceSettings) -> LoadedModel:
    """Loads what the settings name; takes seconds, and raises ModelRefused and InvalidRequest."""
    folder = resolve(settings.model)
    vocabulary = Vocabulary.read(folder)
    runner = ModelRunner.load(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        num_threads=settings.threads,
        kv_tokens=settings.kv_tokens,
        vocabulary_size=vocabulary.size,
    )
    log.info("model loaded", model=runner.identity.model_name, numerics_id=runner.numerics_id, threads=settings.threads)
    return LoadedModel(runner, vocabulary)


async def load_model_aside(settings: ModelServiceSettings) -> LoadedModel:
    """`load_model` without blocking the loop."""
    return await asyncio.to_thread(load_model, settings)


def describe(
    role: str, model: LoadedModel, *, unacknowledged_window: int = 0, drafters: tuple[str, ...] = ()
) -> ServiceFacts:
    """The facts of a service; every call names another incarnation."""
    runner, identity = model.runner, model.runner.identity
    weights = _weights(runner.model)
    return ServiceFacts(
        role=role,
        instance_id=secrets.randbits(64),
        model_name=identity.model_name,
        model_hash=runner.model_hash,
        numerics_id=runner.numerics_id,
        parameter_count=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        weight_dtype=identity.dtype,
        device=str(runner.device),
        thread_count=identity.num_threads,
        context_len=runner.context_len,
        vocabulary_size=runner.vocabulary_size,
        vocabulary_digests=model.vocabulary.digests,
        eos_token_ids=runner.eos_token_ids,
        block_size=runner.pool.block_size,
        block_count=runner.pool.num_blocks,
        unacknowledged_window=unacknowledged_window,
        drafters=drafters,
    )


def device_setup(settings: ModelServiceSettings) -> Callable[[], None]:
    """What a device thread does first: torch keeps its number of threads for each thread that calls it."""
    return partial(torch.set_num_threads, settings.threads)


async def serve_model(
    settings: ModelServiceSettings,
    model: LoadedModel,
    facts: ServiceFacts,
    worker: DeviceWorker[Any],
    table: SessionTable[Any],
    services: Services,
) -> RunningModelService:
    """Serves on the settings' address; raises AddressTaken, and then ends the device thread."""
    try:
        server = await rpc.serve(settings.listen, services)
    except BaseException:
        await worker.close()
        raise
    return RunningModelService(server.address, server, worker, table, model.runner, facts)


def _weights(part: object) -> list[torch.Tensor]:
    """The weights of a model, tied ones once; the rotary tables are none."""
    model: dict[str, object] = {name: value for name, value in vars(part).items() if name not in {"cos", "sin"}}
    return list({id(tensor): tensor for value in model.values() for tensor in _tensors(value)}.values())


def _tensors(part: object) -> list[torch.Tensor]:
    """The tensors in a value, in the fields of a dataclass and in the items of a list."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, list):
        return [tensor for item in part for tensor in _tensors(item)]
    if is_dataclass(part):
        return [tensor for each in fields(part) for tensor in _tensors(getattr(part, each.name))]
    return []
