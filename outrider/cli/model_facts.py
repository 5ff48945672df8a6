"""Facts that a service states about its model, as a table and as a line."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from rich.table import Table

from outrider.client.calls import failure, unreadable
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import Tls, TlsFiles
from outrider.v1 import model_service_pb2
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

INFO_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model, as its service states them."""

    role: str
    model: str
    parameters: int
    dtype: str
    device: str
    threads: int
    numerics_id: str
    context_len: int
    blocks: int
    block_size: int
    address: str
    free_blocks: int = 0
    sessions: int = 0
    drafters: tuple[str, ...] = ()
    """Drafters that guess in this process."""


async def model_facts(address: str, tls: Tls | None = None) -> ModelFacts:
    """Facts of a service's model. Raises OutriderError, PeerLost when there is no answer."""
    async with open_channel(address, TlsFiles.of(tls)) as channel:
        try:
            info = await ModelServiceStub(channel).GetModelInfo(
                model_service_pb2.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise await asyncio.to_thread(failure, error, address, None, tls=tls) from None
    if info is None:
        raise unreadable(address)
    return ModelFacts(
        role=model_service_pb2.ServiceRole.Name(info.role).removeprefix("SERVICE_ROLE_").lower(),
        model=info.model_name,
        parameters=info.parameter_count,
        dtype=info.weight_dtype,
        device=info.device,
        threads=info.thread_count,
        numerics_id=info.numerics_id,
        context_len=info.context_len,
        blocks=info.block_count,
        block_size=info.block_size,
        address=address,
        free_blocks=info.free_block_count,
        sessions=info.session_count,
        drafters=tuple(info.drafters),
    )


def model_table(facts: Sequence[ModelFacts], metrics: Mapping[str, str]) -> Table:
    """Table with a column for each model, so that it fits into a narrow terminal. `metrics` are addresses by role."""
    table = Table("role", *(fact.role for fact in facts))
    table.add_row("model", *(fact.model for fact in facts))
    table.add_row("parameters", *(f"{fact.parameters:,}" for fact in facts))
    table.add_row("dtype", *(fact.dtype for fact in facts))
    table.add_row("device", *(fact.device for fact in facts))
    table.add_row("threads", *(str(fact.threads) for fact in facts))
    table.add_row("numerics id", *(fact.numerics_id for fact in facts))
    table.add_row("context", *(f"{fact.context_len:,} tokens" for fact in facts))
    table.add_row("KV blocks", *(f"{fact.blocks:,} of {fact.block_size} tokens" for fact in facts))
    if any(fact.drafters for fact in facts):
        table.add_row("drafters", *(", ".join(fact.drafters) for fact in facts))
    table.add_row("address", *(fact.address for fact in facts))
    if metrics:
        table.add_row("metrics", *(metrics.get(fact.role, "") for fact in facts))
    return table


def model_line(fact: ModelFacts, metrics: str | None) -> str:
    """Facts of a model, those of the table, as one line."""
    parts = [
        f"The {fact.role}: {fact.model}",
        f"{fact.parameters:,} parameters in {fact.dtype}",
        f"{fact.device} with threads: {fact.threads}",
        f"numerics {fact.numerics_id}",
        f"context of {fact.context_len:,} tokens",
        f"{fact.blocks:,} KV blocks of {fact.block_size} tokens",
        *([f"drafters: {', '.join(fact.drafters)}"] if fact.drafters else []),
        f"answers on {fact.address}",
    ]
    return ", ".join([*parts, f"metrics on {metrics}"] if metrics else parts)
