"""ModelService: who a service is, and Rollback; the same for draft and target.

Rollback is decided by the service's sessions, on the device thread, between two steps of the running job.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import grpc

from outrider.engine.device_thread import DeviceWorker
from outrider.engine.runner import ModelRunner
from outrider.errors import Overloaded
from outrider.grammar import ENGINE, GrammarEngine
from outrider.model_service.sessions import RolledBack, SessionStore
from outrider.parameters import GenerationDefaults, Rule
from outrider.process import telemetry
from outrider.process.telemetry import session_prefix
from outrider.rpc import channels
from outrider.rpc.fencing import PROTOCOL_VERSION, check_fence
from outrider.rpc.messages.round import fence_from, fence_message
from outrider.rpc.messages.rules import RULES
from outrider.rpc.tls import client_name
from outrider.v1 import model_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.model_service_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server

MAX_DRAFT_COUNT = 64
MAX_WAITING_JOBS = 4096

ROLES = {"draft": pb.SERVICE_ROLE_DRAFT, "target": pb.SERVICE_ROLE_TARGET}


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """Facts that never change while a service runs, named as in GetModelInfoResponse; role: "draft" or "target"."""

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
    hosted: Mapping[str, ModelRunner] = field(default_factory=dict)
    """Runners of those drafters that have a model of their own in this process."""
    tree_drafters: frozenset[str] = frozenset()
    """Drafters that make trees where a shape is asked for."""
    branch_drafters: frozenset[str] = frozenset()
    """Drafters that make branches."""
    grammars: GrammarEngine | None = None
    """Compiler of the sessions' grammars; None where there is no tokenizer."""
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    row_costs: Mapping[int, int] = field(default_factory=dict)
    """Microseconds of the model's forwards by their rows."""
    hosted_costs: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Microseconds of forwards of hosted models, and of a head's steps, by name and rows."""

    def offer(self, drafter: str) -> pb.DrafterOffer:
        """Facts about a drafter as it stands now."""
        rules = [RULES[rule] for rule in Rule if rule in self.drafters[drafter]]
        costs = row_cost_messages(self.hosted_costs.get(drafter, {}))
        offer = pb.DrafterOffer(name=drafter, rules=rules, makes_trees=drafter in self.tree_drafters, row_costs=costs)
        offer.makes_branches = drafter in self.branch_drafters
        runner = self.hosted.get(drafter)
        if runner is not None:
            offer.model_name, offer.model_hash = runner.identity.model_name, runner.identity.model_hash
            offer.weight_bytes = sum(weight.nbytes for weight in runner.model.weights)
            offer.block_count, offer.free_block_count = runner.pool.num_blocks, runner.pool.num_free
        return offer


def row_cost_messages(costs: Mapping[int, int]) -> list[types_pb2.RowCost]:
    """Costs by rows as a message says them."""
    return [types_pb2.RowCost(row_count=rows, compute_us=us) for rows, us in sorted(costs.items())]


class ModelServicer(ModelServiceServicer):
    """Serves ModelService for the sessions of one service."""

    def __init__(
        self,
        facts: ServiceFacts,
        sessions: SessionStore[Any],
        device: DeviceWorker[Any],
        observe_rollback: Callable[[float], None],
    ) -> None:
        """`observe_rollback` gets the seconds that a rollback took on the device thread, there."""
        self._facts = facts
        self._observe_rollback = observe_rollback
        self._sessions = sessions
        self._device = device

    async def GetModelInfo(  # noqa: N802 - the name is the protocol's
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        """Describes the service, without waiting for the device: a long forward must not look like an absence."""
        facts = self._facts
        described = {each.name: getattr(facts, each.name) for each in fields(facts)} | asdict(self._sessions.counts())
        described |= {"role": ROLES[facts.role], "eos_token_ids": sorted(facts.eos_token_ids)}
        described |= {"drafters": list(facts.drafters)}
        described["grammar_engine"] = ENGINE if facts.grammars is not None else ""
        described["generation_defaults"] = pb.GenerationDefaults(**facts.generation_defaults.stated)
        described["row_costs"] = row_cost_messages(facts.row_costs)
        for name in ("hosted", "tree_drafters", "branch_drafters", "grammars", "hosted_costs"):
            del described[name]
        return pb.GetModelInfoResponse(
            **described,
            protocol_version=PROTOCOL_VERSION,
            max_draft_count=MAX_DRAFT_COUNT,
            stalled_us=self._device.stalled_us,
            drafter_offers=[facts.offer(name) for name in facts.drafters],
        )

    async def Rollback(  # noqa: N802 - the name is the protocol's
        self, request: pb.RollbackRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RollbackResponse:
        """Takes a session back to a length; raises Overloaded when much waits for the device, and SessionRefused."""
        client = client_name(context)
        fence = check_fence(fence_from(request.fence), self._facts.context_len)

        def rollback() -> RolledBack:
            started_s = time.perf_counter()
            rolled = self._sessions.rollback(fence, client)
            self._observe_rollback(time.perf_counter() - started_s)
            return rolled

        parent = telemetry.parent_of(context.invocation_metadata())
        with telemetry.span("Rollback", parent=parent, session=session_prefix(fence.session_id)):
            num_waiting = self._device.num_waiting
            if num_waiting >= MAX_WAITING_JOBS:
                # Unlike a message, a call has no stream to bound it.
                raise Overloaded(f"{num_waiting} jobs wait for the device already", limit=MAX_WAITING_JOBS)
            rolled = await self._device.call(rollback)
        return pb.RollbackResponse(
            fence=fence_message(rolled.fence),
            cached_len=rolled.cached_len,
            job_stopped=rolled.job_stopped,
        )


def model_service(
    facts: ServiceFacts,
    sessions: SessionStore[Any],
    device: DeviceWorker[Any],
    observe_rollback: Callable[[float], None] = lambda seconds: None,
) -> channels.Services:
    """The service for `outrider.rpc.channels.serve`; `observe_rollback` as in ModelServicer."""
    servicer = ModelServicer(facts, sessions, device, observe_rollback)
    return channels.service(pb.DESCRIPTOR, "ModelService", partial(add_ModelServiceServicer_to_server, servicer))
