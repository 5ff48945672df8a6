"""A whole world in one loop: clients, the gateway, two targets and a draft. Decides nothing; see simulation.invariants.

Everything but clients, transport and device is the product's own code.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import grpc
from prometheus_client import CollectorRegistry
from simulation.await_points import AwaitPoints
from simulation.calls import CANCELLED, Call, ServerCall
from simulation.invariants import Broken, Client, Outcome, check_end, check_tokens, hold, is_hopeless
from simulation.loop import VirtualLoop, context_of, run
from simulation.models import PROMPTS, models
from simulation.services import Process
from simulation.transport import Channel, Network, Server
from simulation.weather import Fault, Kind, Weather
from structlog.processors import format_exc_info
from structlog.testing import capture_logs
from support.basics import check_empty

from gateway.generation.admission import Admission
from gateway.generation.audit import ShadowAudit
from gateway.generation.backend import Backend
from gateway.generation.frontend import Frontend
from gateway.generation.policies import Policies
from gateway.grpc.servicer import generation_service
from gateway.metrics import GatewayMetrics
from gateway.rounds.choice import Choice
from gateway.rounds.costs import SessionEstimates
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT
from gateway.sessions.peer import ServicePeer
from gateway.sessions.replicas import Replicas, Targets
from gateway.sessions.session import DraftDeadline, TargetTimeouts
from gateway.text.chat_template import ChatTemplate
from outrider.model_service.leases import IDLE_S
from outrider.parameters import Rule
from outrider.rpc.breaker import BREAKERS, CircuitBreaker
from outrider.rpc.errors import error_from
from outrider.rpc.messages.rules import RULES
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from target_service import states as target_states

GATEWAY = "gateway"
TARGETS = ("target-a", "target-b")
DRAFT = "draft"
PLACES = (*TARGETS, DRAFT)
DURATIONS_S = (0.01, 0.3, 3.0, 40.0)
LEASE_S = 60.0
WINDOW = 6  # so small that requests of a few tokens run into it
BUDGET_S = 30.0
LONGEST_S = 900.0
# A close that was lost, or an open that comes again after it, leaves a session that is idle, and only that shows it.
SETTLE_S = max(DURATIONS_S) + IDLE_S + 15.0
SOON_S = 5.0
NOTED_EVENTS = 30


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that happens is a function of this."""

    clients: tuple[Client, ...] = (Client(),)
    faults: tuple[Fault, ...] = ()
    storm: float = 0.0
    """Probability that a message to or from storm_places meets a random fault."""
    storm_places: tuple[str, ...] = PLACES
    seed: int = 0
    kv_tokens: int = 256
    """Size of each target's cache."""
    draft_kv_tokens: int = 256
    hosts: tuple[str, ...] = ()
    """Targets that have the draft's model in their own process too."""
    branches: int = 0
    """Branches that the gateway asks the draft for."""
    gateway_dies_s: float | None = None
    """Seconds after the first request at which the gateway is killed."""


class DicePolicy(SpeculationPolicy):
    """Lets K change from round to round without a reason, so that every transition is met. Learns nothing."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def observe(self, committed: object, session: object = None, *, unasked: bool, is_trial: bool = False) -> None:
        """What a round took by a real clock would make a run irreproducible."""

    def choose(self, limit: int, session: SessionEstimates | None = None, *, ready: bool = True) -> Choice:
        """Any K of any drafter, or a stretch of plain decoding."""
        draft_count = min(limit, self._dice.choice((0, 0, 1, 2, 4, 8)))
        if draft_count < 1:
            return Choice(0, self._dice.choice((0, 1, 4, 32)))
        drafter = self._dice.choice(sorted(session.drafters)) if session else ANY_DRAFT
        return Choice(draft_count, rounds=self._dice.choice((1, 1, 3)), drafter=drafter)


def simulate(scenario: Scenario) -> list[Outcome]:
    """Lets a scenario happen; raises Broken when an invariant does not hold, and Deadlock or Livelock."""
    models()
    loop = VirtualLoop(scenario.seed)
    random.seed(scenario.seed)
    with (
        capture_logs(processors=[format_exc_info]) as events,
        mock.patch.object(target_states, "UNACKNOWLEDGED_WINDOW", WINDOW),
    ):
        try:
            outcomes = run(World(loop, scenario).live(), loop)
            errors = [event for event in events if event["log_level"] in {"error", "critical"}]
            hold(not errors, f"errors were logged: {errors}")
            hold(not loop.faults, f"asyncio complained: {loop.faults}")
        except Exception as error:
            error.add_note("\n".join(str(event) for event in events[-NOTED_EVENTS:]))
            raise
    return outcomes


class World:
    """World of one run."""

    def __init__(self, loop: VirtualLoop, scenario: Scenario) -> None:
        self._loop = loop
        self._scenario = scenario
        dice = random.Random(scenario.seed)
        self._policy = DicePolicy(random.Random(dice.random()))
        self._weather = Weather(
            dice=random.Random(dice.random()),
            faults=scenario.faults,
            storm=scenario.storm,
            storm_places=scenario.storm_places,
            storm_kinds=tuple(Kind),
            durations_s=DURATIONS_S,
            strike=self._strike,
            now_s=loop.time,
        )
        self._network = Network(loop, self._weather)
        self._processes = {address: self._process(address, random.Random(dice.random())) for address in PLACES}
        self._outcomes = [Outcome() for _ in scenario.clients]
        self._client_of: dict[Call, int] = {}
        self._gateway_died = False

    def _process(self, address: str, dice: random.Random) -> Process:
        if address == DRAFT:
            weights, kv_tokens = models().draft, self._scenario.draft_kv_tokens
        else:
            weights, kv_tokens = models().target, self._scenario.kv_tokens
        role = "draft" if address == DRAFT else "target"
        hosted = models().draft if address in self._scenario.hosts else None
        return Process(self._loop, self._network, dice, role, address, weights, kv_tokens, LEASE_S, hosted=hosted)

    async def live(self) -> list[Outcome]:
        """Everything from the start of the processes to the end of the last lease."""
        for process in self._processes.values():
            await process.start()
        backend = await self._loop.create_task(self._start_gateway(), context=context_of(GATEWAY))
        await asyncio.sleep(1.0)
        baseline = self._gateway_tasks()
        self._weather.is_calm = False
        await self._serve_clients()
        for client, outcome in zip(self._scenario.clients, self._outcomes, strict=True):
            check_tokens(client, outcome)
            check_end(client, outcome, self._excuses(client, outcome), is_cut=self._gateway_died)
        await self._check_leases()
        await self._check_emptiness()
        if not self._gateway_died:
            tasks = self._gateway_tasks()
            hold(tasks == baseline, f"tasks of the gateway: {tasks - baseline} more, {baseline - tasks} less")
            await self._loop.create_task(_close(backend), context=context_of(GATEWAY))
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            hold(not left, f"tasks are left: {left}")
        return self._outcomes

    async def _start_gateway(self) -> Backend:
        def link(role: str, address: str) -> ServicePeer:
            made = ServicePeer(role, address, lambda info: None, Channel(self._network, address))  # type: ignore[arg-type]
            made.breaker = CircuitBreaker(*BREAKERS[role], clock_s=self._loop.time)
            return made

        target, drafts = Targets([link("target", each) for each in TARGETS]), {"": Replicas([link("draft", DRAFT)])}
        timeouts = TargetTimeouts(rebuild_budget_s=BUDGET_S)
        audit = ShadowAudit(0.0, CollectorRegistry())
        policies = Policies(lambda numerics_id: self._policy)
        backend = Backend(
            models().tokenizer,
            target,
            drafts,
            policies,
            DraftDeadline(),
            timeouts,
            audit,
            branches=self._scenario.branches,
        )
        server = Server(self._loop, GATEWAY, wrap=self._with_await_points)
        metrics = GatewayMetrics(CollectorRegistry())
        door = Frontend(backend, Admission(64, 64), metrics, ChatTemplate(), "model")
        for add in generation_service(door, 30.0).values():
            add(server)  # type: ignore[arg-type]
        await server.guarded()
        self._network.listen(GATEWAY, server)
        for each in (*target.peers, *drafts[""].peers):
            hold(await each.settled(60.0), f"{each} was not found")
        return backend

    async def _serve_clients(self) -> None:
        channel = Channel(self._network, GATEWAY)
        clients = [
            self._loop.create_task(self._client(index, client, channel))
            for index, client in enumerate(self._scenario.clients)
        ]
        if self._scenario.gateway_dies_s is not None:
            self._loop.call_later(self._scenario.gateway_dies_s, self._kill_gateway)
        _, pending = await asyncio.wait(clients, timeout=LONGEST_S)
        hold(not pending, f"requests without an end after {LONGEST_S:g} s")
        for task in clients:
            task.result()

    async def _client(self, index: int, client: Client, channel: Channel) -> None:
        await asyncio.sleep(client.starts_s)
        stub, outcome = GenerationServiceStub(channel), self._outcomes[index]  # type: ignore[arg-type]
        outcome.began_s = self._loop.time()
        call: Any = stub.Generate(_request(client), timeout=client.deadline_s)
        self._client_of[call] = index
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                outcome.take(message)
                await asyncio.sleep(client.dawdle_s)
            outcome.status = "OK"
        except grpc.aio.AioRpcError as error:
            outcome.status, outcome.details = error.code().name, error_from(error).message
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            outcome.status = "CANCELLED"
        outcome.ended_s = self._loop.time()

    def _with_await_points(self, call: ServerCall, handler: Awaitable[None]) -> Awaitable[None]:
        """The gateway's handler, interrupted at the await point at which its client leaves."""
        cancel_at = self._scenario.clients[self._client_of[call.call]].cancel_at

        def on_await(ordinal: int) -> None:
            if ordinal == cancel_at:
                self._loop.call_soon(call.call.end, CANCELLED, context=context_of(""))
                call.leave()

        return AwaitPoints(handler, on_await)

    def _strike(self, place: str, fault: Fault) -> None:
        self._processes[place].strike(fault)

    def _kill_gateway(self) -> None:
        """Nothing happens in the gateway any more, and its connections break."""
        self._gateway_died = True
        self._loop.freeze({GATEWAY})
        self._network.forget(GATEWAY)
        for channel in self._network.channels:
            channel.break_connection()

    def _excuses(self, client: Client, outcome: Outcome) -> set[str]:
        """Statuses with which this request may have ended."""
        since_s = outcome.ended_s - BUDGET_S
        is_hopeless_now = is_hopeless(self._weather.spells, TARGETS, since_s, outcome.ended_s)
        cuts_s = [cut_s for place in TARGETS for cut_s in self._processes[place].cuts_s]
        num_cuts = sum(outcome.began_s <= cut_s <= outcome.ended_s for cut_s in cuts_s)
        excuses = {
            "CANCELLED": client.cancel_at is not None,
            "DEADLINE_EXCEEDED": client.deadline_s is not None,
            "UNAVAILABLE": self._gateway_died or is_hopeless_now,
            # Two targets went while they read it, or seemed to.
            "FAILED_PRECONDITION": num_cuts > 1 and outcome.details.startswith("2 targets ended"),
        }
        return {status for status, is_excused in excuses.items() if is_excused}

    async def _check_leases(self) -> None:
        """In calm weather, and some time after the last request, services hold nothing but leases.

        They hold nothing at all, and that soon, when nothing has gone wrong.
        """
        self._weather.is_calm = True
        for process in self._processes.values():
            process.heal()
        await asyncio.sleep(SOON_S)
        if not self._weather.spells and not self._gateway_died:
            for address, process in self._processes.items():
                hold(len(process.table) == 0, f"{address} holds {process.table} though nothing went wrong")
        await asyncio.sleep(SETTLE_S)
        for address, process in self._processes.items():
            num_held, num_leased, num_active = await process.held()
            hold(num_held == num_leased, f"{address} holds {process.table}, of which not all are leased")
            hold(not num_active, f"the device of {address} is busy")
            num_links = 0 if self._gateway_died else 1
            hold(len(process.server.calls) == num_links, f"{address} serves {len(process.server.calls)} calls")

    async def _check_emptiness(self) -> None:
        """After the leases they hold nothing."""
        await asyncio.sleep(2 * LEASE_S)
        for address, process in self._processes.items():
            hold(len(process.table) == 0, f"{address} still holds {process.table}")
            try:
                check_empty(process.runner.pool)
                if process.hosted_runner is not None:
                    check_empty(process.hosted_runner.pool)
            except AssertionError as error:
                raise Broken(f"{address} has lost blocks: {process.runner.pool} {error}") from error

    def _gateway_tasks(self) -> "Counter[str]":
        return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in self._loop.tasks_of(GATEWAY))


def _request(client: Client) -> pb.GenerateRequest:
    asked = client.asked
    rule = RULES[Rule.MATCH if asked.temperature else client.greedy_rule]
    return pb.GenerateRequest(
        token_ids=types_pb2.TokenIds(token_ids=PROMPTS[asked.prompt]),
        max_tokens=asked.max_tokens,
        sampling=types_pb2.SamplingParameters(temperature=asked.temperature, frequency_penalty=asked.penalty),
        seed=asked.seed,
        speculation=pb.SpeculationSettings(draft_count=client.draft_count, rule=rule),
    )


async def _close(backend: Backend) -> None:
    await backend.target.close()
    for replicas in backend.drafts.values():
        await replicas.close()
