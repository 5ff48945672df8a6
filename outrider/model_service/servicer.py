"""ModelService: who a service is, and Rollback; the same for draft and target. Decides nothing.

Rollback is decided by the service's sessions, on the device thread, between two steps of the running job.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from outrider import tracing
from outrider.errors import Overloaded
from outrider.logs import session_prefix
from outrider.parameters import Rule
from outrider.rpc import channels, messages
from outrider.rpc.fencing import Fence
from outrider.rpc.messages import RULES
from outrider.v1 import model_service_pb2 as pb
from outrider.v1.model_service_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server

PROTOCOL_VERSION = 1
MAX_DRAFT_COUNT = 32
MAX_WAITING_JOBS = 4096

ROLES = {"draft": pb.SERVICE_ROLE_DRAFT, "target": pb.SERVICE_ROLE_TARGET}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What does not change while a service runs; see GetModelInfoResponse. `role` is "draft" or "target"."""

    role: str
    instance_id: int
    model_name: str
    model_hash: str
    numerics_id: str
    parameter_count: int
    weight_bytes: int
    weight_dtype: str
    device: str
    thread_count: int
    context_len: int
    vocabulary_size: int
    vocabulary_digests: tuple[int, ...]
    eos_token_ids: frozenset[int]
    block_size: int
    block_count: int
    unacknowledged_window: int = 0
    drafters: Mapping[str, frozenset[Rule]] = field(default_factory=dict)
    """The rules that each can serve, by name."""


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """What changes; the fields of GetModelInfoResponse that tell the state of the sessions and their cache."""

    free_blocks: int
    sessions: int
    leased_sessions: int
    stopped_jobs: int
    preemptions: int
    evicted_sessions: int
    expired_leases: int
    cached_blocks: int
    """Of the free blocks those that keep a prefix."""
    prefix_query_tokens: int
    prefix_hit_tokens: int


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A session after a Rollback: its epoch and committed length now."""

    fence: Fence
    cached_len: int
    job_stopped: bool


class Sessions(Protocol):
    """The sessions of a service."""

    def rollback(self, fence: Fence) -> RolledBack:
        """Truncates a session and begins a new epoch; on the device thread."""
        ...

    def counts(self) -> ServiceCounts:
        """Numbers for an observer, from any thread; a forward old at most."""
        ...


class Device(Protocol):
    """The device thread."""

    @property
    def stalled_us(self) -> int:
        """Microseconds for which it has had work and finished no piece of it."""
        ...

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for it."""
        ...

    def call(self, fn: Callable[[], T]) -> Awaitable[T]:
        """Runs `fn` between two forwards."""
        ...


class ModelServicer(ModelServiceServicer):
    """Serves ModelService for the sessions of one service."""

    def __init__(
        self, facts: ServiceFacts, sessions: Sessions, device: Device, observe_rollback: Callable[[float], None]
    ) -> None:
        """`observe_rollback` is told the seconds that a rollback took on the device thread, there."""
        self._facts = facts
        self._observe_rollback = observe_rollback
        self._sessions = sessions
        self._device = device

    async def GetModelInfo(  # noqa: N802 - the name is the protocol's
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        """Describes the service, without waiting for the device: a long forward must not look like an absence."""
        facts, counts = self._facts, self._sessions.counts()
        return pb.GetModelInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            role=ROLES[facts.role],
            instance_id=facts.instance_id,
            model_name=facts.model_name,
            model_hash=facts.model_hash,
            numerics_id=facts.numerics_id,
            parameter_count=facts.parameter_count,
            weight_dtype=facts.weight_dtype,
            device=facts.device,
            thread_count=facts.thread_count,
            context_len=facts.context_len,
            vocabulary_size=facts.vocabulary_size,
            vocabulary_digests=facts.vocabulary_digests,
            eos_token_ids=sorted(facts.eos_token_ids),
            max_draft_count=MAX_DRAFT_COUNT,
            unacknowledged_window=facts.unacknowledged_window,
            block_size=facts.block_size,
            block_count=facts.block_count,
            free_block_count=counts.free_blocks,
            session_count=counts.sessions,
            leased_session_count=counts.leased_sessions,
            stopped_job_count=counts.stopped_jobs,
            weight_bytes=facts.weight_bytes,
            drafters=list(facts.drafters),
            drafter_offers=_offers(facts.drafters),
            stalled_us=self._device.stalled_us,
            preemption_count=counts.preemptions,
            evicted_session_count=counts.evicted_sessions,
            expired_lease_count=counts.expired_leases,
            cached_block_count=counts.cached_blocks,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
        )

    async def Rollback(  # noqa: N802 - the name is the protocol's
        self, request: pb.RollbackRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RollbackResponse:
        """Takes a session back to a length."""
        fence = messages.fence_from(request.fence, self._facts.context_len)
        parent = tracing.parent_of(context.invocation_metadata())
        with tracing.span("Rollback", parent=parent, session=session_prefix(fence.session_id)):
            rolled = await self._roll_back(fence)
        return pb.RollbackResponse(
            fence=messages.fence_message(rolled.fence, self._facts.instance_id),
            cached_len=rolled.cached_len,
            job_stopped=rolled.job_stopped,
        )

    async def _roll_back(self, fence: Fence) -> RolledBack:
        """Raises Overloaded when much waits for the device: unlike a message, a call has no stream to bound it."""
        num_waiting = self._device.num_waiting
        if num_waiting >= MAX_WAITING_JOBS:
            raise Overloaded(f"{num_waiting} jobs wait for the device already", limit=MAX_WAITING_JOBS)
        return await self._device.call(partial(self._timed, fence))

    def _timed(self, fence: Fence) -> RolledBack:
        started_s = time.perf_counter()
        rolled = self._sessions.rollback(fence)
        self._observe_rollback(time.perf_counter() - started_s)
        return rolled


def _offers(drafters: Mapping[str, frozenset[Rule]]) -> list[pb.DrafterOffer]:
    return [
        pb.DrafterOffer(name=name, rules=[RULES[rule] for rule in Rule if rule in rules])
        for name, rules in drafters.items()
    ]


def unobserved(seconds: float) -> None:
    """Takes no note of it."""


def model_service(
    facts: ServiceFacts, sessions: Sessions, device: Device, observe_rollback: Callable[[float], None] = unobserved
) -> channels.Services:
    """The service for `outrider.rpc.channels.serve`; `observe_rollback` as in ModelServicer."""
    servicer = ModelServicer(facts, sessions, device, observe_rollback)
    return channels.service(pb.DESCRIPTOR, "ModelService", partial(add_ModelServiceServicer_to_server, servicer))
