"""A simulation of a target, a draft, their gateway and many sessions, on a clock of its own; the policy is real.

A device takes whatever waits for it into its next step, as services do. A draft guesses on its own device, or in the
target's process, just before the forward that checks. Messages take time on their way and of the gateway's processor.
Where processes share processors, each is the slower the more of the others are at work.
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import Protocol

from bench.policy.texts import MAX_ROWS, Passages, TextKind
from gateway.rounds.choice import TRYING, Case
from gateway.rounds.planner import Drafting, DraftOutlook, RoundPlan, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import (
    LOOKUP,
    NOTHING,
    DrafterId,
    FallbackReason,
    GuessRequest,
    HopCost,
    Place,
    Proposal,
    Round,
    TokenLog,
    Verdict,
)
from gateway.rounds.tuning import TUNING, PolicyTuning
from outrider.estimates.acceptance import MAX_DRAFT_COUNT
from outrider.parameters import FinishReason
from outrider.token_tree import EMPTY, TokenTree
from target_service.gathering import Gathering

PROMPT_LEN = 8
LOOK_AGAIN_US = 100.0
MAX_LEN = 1 << 30
GATEWAY_SHARE = 0.5
"""Share of the processors that a gateway's one thread takes."""

CostModel = Callable[[int], float]
"""Microseconds of a forward over so many rows."""


class Planner(Protocol):
    """Plan of each round of a request: gateway.rounds.planner.RoundPlanner, or one that does as it was set."""

    def __enter__(self) -> object: ...
    def __exit__(self, *_exit: object) -> None: ...
    def looks_for(self, log: TokenLog) -> float: ...
    def plan(
        self,
        log: TokenLog,
        outstanding: int,
        draft: DraftOutlook,
        own: str = "",
        look: Sequence[float] = (),
        *,
        went_on: bool = False,
    ) -> RoundPlan: ...
    def complete(self, plan: RoundPlan, drafted: Proposal, found: Proposal) -> Proposal: ...
    def observe(self, committed: Round) -> None: ...


@dataclass(frozen=True, slots=True)
class Law:
    """Costs of a drafter: its steps by their sessions, and where it guesses."""

    drafter: DrafterId
    step_us: CostModel


@dataclass(frozen=True, slots=True)
class World:
    """All that is to be known, and a policy must find out."""

    name: str
    target_us: CostModel
    drafters: tuple[Law, ...]
    kinds: tuple[TextKind, ...] = (TextKind(),)
    message_us: float = 600.0
    """Way of a question and its answer together."""
    round_us: float = 0.0
    """Gateway's processor for a round that is asked, and half of that for a token that came unasked."""
    after_us: float = 0.0
    """Time of a target after a forward for each guess in it, which is in no time that it reports."""
    sharing: float = 0.0
    """How much slower each device is for another one that is at work; 0 for processors of their own."""
    drift: float = 0.0
    """Share by which rates of acceptance go up and down, within ten seconds."""
    noise: float = 0.03
    """Share by which a step takes more or less."""
    lengths: tuple[int, int] = (MAX_LEN, MAX_LEN)
    """Shortest and longest answers."""
    prompt_rows: int = 1
    phases: tuple[tuple[float, int], ...] = ((5.0, 1),)
    """Seconds, and sessions that are at work during them."""
    looks: bool = True
    """Whether a lookup may guess."""
    busy: tuple[float, float] = (0.0, 1.0)
    """Seconds for which other programs run beside it from the start, while services measure too, and how many times as
    long a step may take then."""
    branches: int = 0
    """Most branches of a session, for which a draft runs ahead."""
    session: "type[SimulatedSession] | None" = None
    """What sessions are, where they are not SimulatedSession."""

    @property
    def may_guess(self) -> tuple[DrafterId, ...]:
        """Drafters and lookups that may guess."""
        return (*(law.drafter for law in self.drafters), *((LOOKUP,) if self.looks else ()))


@dataclass(eq=False)
class Job:
    """Work that a processor does: microseconds that are left, and what happens at its end."""

    left_us: float
    weight: float
    end: Callable[[], None]
    version: int = 0


class Processors:
    """Processors that jobs share; each is slowed down by the others."""

    def __init__(self, simulation: "Simulation", sharing: float) -> None:
        self._simulation = simulation
        self._sharing = sharing
        self._jobs: dict[Job, None] = {}
        self._since_us = 0.0

    def begin(self, work_us: float, weight: float, end: Callable[[], None]) -> None:
        """Begins a job that takes so long alone."""
        if not self._sharing:
            self._simulation.after(work_us, end)
            return
        self._advance()
        self._jobs[Job(work_us, weight, end)] = None
        self._foretell()

    def _speed(self, job: Job) -> float:
        others = sum(each.weight for each in self._jobs) - job.weight
        return 1 / (1 + self._sharing * others)

    def _advance(self) -> None:
        passed_us, self._since_us = self._simulation.now_us - self._since_us, self._simulation.now_us
        for job in self._jobs:
            job.left_us -= passed_us * self._speed(job)

    def _foretell(self) -> None:
        for job in self._jobs:
            job.version += 1
            left_us = max(job.left_us, 0.0) / self._speed(job)
            self._simulation.after(left_us, partial(self._end, job, job.version))

    def _end(self, job: Job, version: int) -> None:
        if job.version != version or job not in self._jobs:
            return
        self._advance()
        del self._jobs[job]
        self._foretell()
        job.end()


@dataclass(eq=False)
class Device(ABC):
    """Takes all who wait into its next step."""

    simulation: "Simulation"
    waiting: dict["SimulatedSession", float] = field(default_factory=dict)
    """Sessions, and since when they wait."""
    is_busy: bool = False

    def put(self, session: "SimulatedSession") -> None:
        """A session waits for the next step."""
        self.waiting[session] = self.simulation.now_us
        self.simulation.after(0.0, self.begin)

    def begin(self) -> None:
        """Begins a step, unless there is one or nothing to do."""
        if self.is_busy or not self.waiting or self.is_early():
            return
        self.is_busy = True
        batch, self.waiting = self.waiting, {}
        began_us = self.simulation.now_us
        for session, since_us in batch.items():
            session.queue_us = began_us - since_us
        self.step(list(batch))

    def is_early(self) -> bool:
        """Whether a step waits for others."""
        return False

    @abstractmethod
    def step(self, batch: list["SimulatedSession"]) -> None:
        """Makes a step of these sessions, at whose end it is not busy any more."""

    def work(self, alone_us: float, end: Callable[[float], None]) -> None:
        """Takes the device so long, were it alone; `end` gets how long it took."""
        simulation = self.simulation
        noise, began_us = simulation.world.noise, simulation.now_us
        alone_us *= simulation.dice.uniform(1 - noise, 1 + noise)
        if began_us < 1e6 * simulation.world.busy[0]:
            alone_us *= simulation.dice.uniform(1.0, simulation.world.busy[1])
        simulation.processors.begin(alone_us, 1.0, lambda: end(simulation.now_us - began_us))


class DraftDevice(Device):
    """A draft service: one guess of each session a step."""

    def step(self, batch: list["SimulatedSession"]) -> None:
        [law] = [each for each in self.simulation.world.drafters if each.drafter.place is Place.REMOTE]
        rows = sum(session.levels[-session.left] for session in batch)
        jobs = [session.job for session in batch]
        self.work(law.step_us(rows), lambda took_us: self._end(batch, jobs, took_us, rows))

    def _end(self, batch: list["SimulatedSession"], jobs: list[int], took_us: float, rows: int) -> None:
        self.is_busy = False
        for session, job in zip(batch, jobs, strict=True):
            if session.job == job:
                session.drafted(took_us, rows)
        self.begin()


class TargetDevice(Device):
    """A target service: guesses of a drafter of its own, and a forward over all rows."""

    def __init__(self, simulation: "Simulation") -> None:
        super().__init__(simulation)
        self.gathering = Gathering(lambda: simulation.now_us / 1e6)

    def put(self, session: "SimulatedSession") -> None:
        self.gathering.came(session, self.simulation.now_us / 1e6)
        super().put(session)

    def is_early(self) -> bool:
        rows = sum(session.rows for session in self.waiting)
        is_early = self.gathering.is_worth_waiting(self.waiting, rows)
        if is_early:
            self.simulation.after(LOOK_AGAIN_US, self.begin)
        return is_early

    def step(self, batch: list["SimulatedSession"]) -> None:
        self.simulation.stepping.update(batch)
        hosted = {each for each in batch if each.hosted is not None and not each.tree and each.own.count}
        for session in hosted:
            session.own_us, session.own_rows = 0.0, 0
            # Chains end with the room for them, and so does how deep trees are.
            room = session.max_len - session.target_len - 1
            own = session.own
            session.guess(own if own.shape is not None else replace(own, count=min(own.count, room)))
        self._guess(batch, hosted, 0)

    def _guess(self, batch: list["SimulatedSession"], hosted: set["SimulatedSession"], depth: int) -> None:
        guessing = [each for each in hosted if len(each.levels) > depth]
        if not guessing:
            for session in hosted:
                session.tree = session.guessed
            rows = sum(each.rows for each in batch)
            alone_us = self.simulation.world.target_us(rows)
            self.work(alone_us, lambda took_us: self._end(batch, took_us, rows))
            return
        law = next(each for each in self.simulation.world.drafters if each.drafter == guessing[0].hosted)
        rows = sum(each.levels[depth] for each in guessing)

        def guessed(took_us: float) -> None:
            for session in guessing:
                session.own_us += took_us
                session.own_rows += rows
            self._guess(batch, hosted, depth + 1)

        self.work(law.step_us(rows), guessed)

    def _end(self, batch: list["SimulatedSession"], took_us: float, rows: int) -> None:
        if not any(each.is_prompt for each in batch):
            self.gathering.costs.add(rows, took_us / 1e6)
        prompt_rows = sum(each.rows for each in batch if each.is_prompt)
        num_guesses = sum(each.rows - 1 for each in batch if not each.is_prompt)
        for session in batch:
            session.verified(took_us, rows, prompt_rows)
            (self.gathering.stayed if session in self.waiting else self.gathering.left)(session)
        if num_guesses and self.simulation.world.after_us:
            self.simulation.after(num_guesses * self.simulation.world.after_us, self._free)
        else:
            self._free()

    def _free(self) -> None:
        self.is_busy = False
        self.begin()


@cache
def grown(first: tuple[float, ...], later: tuple[float, ...], count: int, max_depth: int) -> TokenTree:
    """The most valuable rows of all up to a depth, whose tokens are numbers of choices with these chances."""
    parents: list[int] = []
    token_ids: list[int] = []
    values: list[float] = []
    waiting = [(-min(chance, 0.98), 0, 1, rank) for rank, chance in enumerate(first, start=1)]
    heapq.heapify(waiting)
    while waiting and len(parents) < count:
        value, parent, depth, rank = heapq.heappop(waiting)
        parents.append(parent)
        token_ids.append(rank)
        values.append(-value)
        if depth < max_depth:
            for next_rank, chance in enumerate(later, start=1):
                heapq.heappush(waiting, (value * min(chance, 0.98), len(parents), depth + 1, next_rank))
    return TokenTree(tuple(token_ids), tuple(parents), values=tuple(values))


class SimulatedSession:
    """One request: what the gateway and the target know of it."""

    def __init__(self, simulation: "Simulation", planner: Planner, kind: TextKind, length: int, jitter: float) -> None:
        self.simulation, self.planner, self.kind = simulation, planner, kind
        self.log = TokenLog((1,) * PROMPT_LEN, lambda: int(simulation.now_us * 1000))
        self.max_len = min(PROMPT_LEN + length, MAX_LEN)
        self.jitter = jitter
        self.inbox: deque[Verdict] = deque()
        self.awaits = False
        self.ended = False
        self.plan = RoundPlan()
        self.proposal = Proposal()
        self.passages = Passages(kind, simulation.dice)
        self.look: tuple[float, ...] = ()
        """Values of the rows that a lookup has found."""
        self.ease = 1.0
        """Factor of a drafter's errors in this round."""
        # At the drafter: its guesses, and rows of its steps.
        self.guessed = EMPTY
        self.levels: tuple[int, ...] = ()
        self.left = 0
        self.job = 0
        """Number of what the drafter was asked for last, where it may be asked before it has made that."""
        self.draft_us, self.draft_rows = 0.0, 0
        # At the target.
        self.goes_on: set[int] = set()
        """Lengths of verdicts after which it went on by itself."""
        self.target_len = PROMPT_LEN
        self.limit = self.target_limit = PROMPT_LEN
        self.tree = EMPTY
        self.chance: Callable[[int, int], float] = lambda depth, rank: 0.0
        self.own = GuessRequest()
        self.is_guessing = False
        self.own_us, self.own_rows = 0.0, 0
        self.queue_us = 0.0
        self.is_prompt = True
        hosted = [each.drafter for each in simulation.world.drafters if each.drafter.place is Place.HOSTED]
        self.hosted = hosted[0] if hosted else None

    @property
    def rows(self) -> int:
        """Rows of its next forward."""
        return self.simulation.world.prompt_rows if self.is_prompt else 1 + len(self.tree)

    @property
    def outstanding(self) -> int:
        """Tokens that the target may still commit unasked, as the gateway knows."""
        left = min(self.limit, self.max_len) - len(self.log)
        return max(left, 0) or int(bool(self.inbox))

    def rates(self, drafter: DrafterId, depth: int, factor: float = 1.0) -> tuple[float, ...]:
        """Chances of each choice of a drafter, counted from depth 1, if those before it are right."""
        world, kind = self.simulation.world, self.kind
        number = [each.drafter.place for each in world.drafters].index(drafter.place)
        rate = min(kind.rates[number] * factor * (kind.first if depth == 1 else 1.0), 0.995)
        rate = min(max(1 - self.ease * (1 - rate), 0.0), 0.995)
        return (rate, *(share * (1 - rate) for share in kind.others))

    def chance_of(self, drafter: DrafterId) -> Callable[[int, int], float]:
        """Chance of a drafter's guess by its depth and rank."""
        return lambda depth, rank: self.rates(drafter, depth, self.jitter * self.simulation.tide)[rank]

    def guess(self, asked: GuessRequest) -> None:
        """Begins what a drafter makes of a request."""
        if asked.shape is None:
            self.guessed, self.levels = TokenTree.chain((1,) * asked.count), (1,) * asked.count
            return
        first, later = (tuple(self.kind.belief * each for each in self.rates(asked.drafter, depth)) for depth in (1, 2))
        self.guessed = tree = grown(first, later, asked.count, asked.shape.max_depth or MAX_DRAFT_COUNT)
        self.levels = tuple(tree.depths.count(depth) for depth in range(max(tree.depths)))

    def next_round(self) -> None:
        """Plans a round, and sends what it needs."""
        if self.ended or len(self.log) >= self.max_len:
            self.planner.__exit__(None, None, None)
            self.ended = True
            self.simulation.left(self)
            return
        self.log.begin_round()
        least = self.planner.looks_for(self.log)
        is_looked_for = self.simulation.world.looks and len(self.log) > PROMPT_LEN
        found = self.passages.find(self.max_len - len(self.log) - 1) if is_looked_for else ()
        self.look = tuple(value for value in found if value > least)
        own = self.hosted.name if self.hosted is not None else ""
        outstanding = self.outstanding
        self.plan = self.planner.plan(self.log, outstanding, self.simulation.outlook, own, self.look)
        asked, looked = self.plan.asked(Place.REMOTE), self.plan.asked(Place.LOOKUP)
        if asked.count:
            self.guess(asked)
            self._ask_draft()
            return
        self.proposal = Proposal()
        if looked.count:
            tree = TokenTree.chain((1,) * looked.count)
            self.proposal = Proposal(replace(tree, values=self.look[: looked.count]), drafter=LOOKUP)
        self._ask(outstanding)

    def _ask_draft(self) -> None:
        """Begins what the drafter was asked for, unless it is asked for something else before that is there."""
        self.left, self.draft_us, self.draft_rows = len(self.levels), 0.0, 0
        job = self.job
        self._send(lambda: self.simulation.draft.put(self) if job == self.job else None)

    def drafted(self, took_us: float, num_rows: int) -> None:
        """The draft has made a guess."""
        self.draft_us += took_us
        self.draft_rows += num_rows
        self.left -= 1
        if self.left:
            self.simulation.draft.waiting[self] = self.simulation.now_us
            return
        self._answer(self.plan.asked(Place.REMOTE), len(self.levels))

    def _answer(self, asked: GuessRequest, num_forwards: int) -> None:
        """The draft's guesses are made."""
        drafted = Proposal(
            self.guessed,
            compute_us=int(self.draft_us),
            forward_count=num_forwards,
            row_count=self.draft_rows,
            drafter=asked.drafter,
        )
        self.proposal = self.planner.complete(self.plan, drafted, NOTHING)
        self.simulation.after(self.simulation.world.message_us / 2, lambda: self._ask(self.outstanding))

    def _ask(self, outstanding: int) -> None:
        """Sends a proposal, or lets the target go on, where there is anything to send."""
        base_len, proposal, own = len(self.log), self.proposal, self.plan.asked(Place.HOSTED)
        budget = self.plan.plain_budget
        goes_further = bool(own.count) != self.is_guessing or (2 * outstanding <= budget and self.limit < self.max_len)
        if proposal.tree or not outstanding or (budget and goes_further):
            self.is_guessing = own.count > 0
            look_chance, by_drafter = self.passages.chance, self.chance_of(proposal.drafter)
            is_looked = proposal.drafter == LOOKUP or not proposal.tree
            chance = (lambda depth, rank: look_chance) if is_looked else by_drafter
            limit = base_len + 1 + budget
            self.limit = limit
            self._send(lambda: self._arrived(base_len, proposal.tree, chance, limit, own))
        self._await()

    def _await(self) -> None:
        """The gateway waits for a verdict, which may be there."""
        self.awaits = True
        if self.inbox:
            self.simulation.after(0.0, self._receive)

    def _send(self, arrive: Callable[[], None]) -> None:
        self.simulation.gateway_work(
            self.simulation.world.round_us / 2,
            lambda: self.simulation.after(self.simulation.world.message_us / 2, arrive),
        )

    def _arrived(
        self, base_len: int, tree: TokenTree, chance: Callable[[int, int], float], limit: int, own: GuessRequest
    ) -> None:
        """A message is at the target."""
        target = self.simulation.target
        self.own = own
        if base_len == self.target_len and (self not in self.simulation.stepping):
            self.target_limit, self.tree, self.chance = limit, tree, chance
            if self not in target.waiting:
                target.put(self)
            return
        # It had gone on: guesses about the past end that, and a longer stretch goes on.
        self.target_limit = limit if not tree else min(self.target_limit, base_len + 1)
        is_idle = self not in target.waiting and self not in self.simulation.stepping
        if not tree and is_idle and self.target_len < min(limit, self.max_len):
            target.put(self)

    def _accepted(self, chance: Callable[[int, int], float], room: int) -> list[int]:
        """Rows of the tree that turn out to be right."""
        rows, dice = [0], self.simulation.dice
        while len(rows) <= room and (children := self.tree.children(rows[-1])):
            luck = dice.random()
            for child in children:
                # A token is the number of its choice.
                luck -= chance(len(rows), self.tree.token_ids[child - 1] - 1)
                if luck < 0:
                    rows.append(child)
                    break
            else:
                break
        return rows[1:]

    def verified(self, took_us: float, rows: int, prompt_rows: int) -> None:
        """The target has made a step, and says what it decides."""
        simulation, own = self.simulation, self.own_proposal()
        simulation.stepping.discard(self)
        chance = self.chance if own is None else self.chance_of(own.drafter)
        room = self.max_len - self.target_len - 1
        accepted = self._accepted(chance, room)
        is_last = self.target_len + len(accepted) + 1 >= self.max_len
        verdict = Verdict(
            self.target_len,
            tuple(accepted),
            1,
            FinishReason.LENGTH if is_last else None,
            min(len(accepted) + 1, max(self.tree.depths), room),
            compute_us=int(took_us),
            forward_count=1,
            row_count=rows,
            prompt_row_count=prompt_rows,
            session_count=len(simulation.sessions),
            hop=HopCost(queue_us=int(self.queue_us)),
            own=own,
        )
        self.target_len += len(accepted) + 1
        simulation.num_tokens += len(accepted) + 1
        self.tree, self.own_us, self.is_prompt = EMPTY, 0.0, False
        if self.kind.spread:
            self.ease = 1 + simulation.dice.choice((-1, 1)) * self.kind.spread
        if not is_last and self.target_len < min(self.target_limit, self.max_len) and not self.ended:
            simulation.target.put(self)
        simulation.after(simulation.world.message_us / 2, lambda: self._came(verdict))

    def own_proposal(self) -> Proposal | None:
        """What the target has not been sent with this step's message; None where that is nothing."""
        if not self.own_us or self.hosted is None or not self.tree:
            return None
        return Proposal(
            self.tree,
            compute_us=int(self.own_us),
            forward_count=len(self.levels),
            row_count=self.own_rows,
            drafter=self.hosted,
        )

    def _came(self, verdict: Verdict) -> None:
        """A verdict is at the gateway."""
        work_us = self.simulation.world.round_us / 2

        def read() -> None:
            self.inbox.append(verdict)
            if self.awaits:
                self._receive()

        self.simulation.gateway_work(work_us, read)

    def _receive(self) -> None:
        if not self.awaits or not self.inbox:
            return
        self.awaits = False
        self.take(self.inbox.popleft())

    def take(self, verdict: Verdict) -> None:
        """The gateway reads a verdict."""
        committed = self.log.commit(self.proposal, verdict)
        self.passages.follow(committed)
        self.simulation.committed(self, committed)
        self.planner.observe(committed)
        self.next_round()


class Simulation:
    """Devices, a gateway and the sessions on them."""

    def __init__(
        self,
        world: World,
        seed: int = 0,
        new_planner: Callable[[], Planner] | None = None,
        *,
        knows_costs: bool = True,
        tuning: PolicyTuning = TUNING,
        policy: type[SpeculationPolicy] = SpeculationPolicy,
    ) -> None:
        """`new_planner` plans for a session; without it the policy does, which knows at first what services measure."""
        self.world = world
        self.dice = random.Random(f"{world.name} {seed}")
        self.policy = policy(tuning=tuning)
        self.session_us: Counter[Case] = Counter()
        """Microseconds of rounds by the case of their choice."""
        self.gaps_us: list[int] = []
        """Times between two messages with tokens, as the reader of a stream sees them."""
        self.measured = (
            self._measured(world.target_us),
            {law.drafter: self._measured(law.step_us) for law in world.drafters},
        )
        """What services have measured before they serve: the target, and steps of drafters."""
        if knows_costs:
            self.policy.costs.begin(*self.measured)
        self.processors = Processors(self, world.sharing)
        self.target, self.draft = TargetDevice(self), DraftDevice(self)
        self.stepping: set[SimulatedSession] = set()
        self.now_us = 0.0
        self.sessions: list[SimulatedSession] = []
        self.num_wanted = 0
        self._num_begun, self._seed = 0, seed
        self.num_tokens = 0
        self.rounds: list[tuple[float, SimulatedSession, Round]] = []
        """All rounds, where they are kept."""
        self.keeps_rounds = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._gateway: deque[tuple[float, Callable[[], None]]] = deque()
        self._gateway_busy = False
        self._new_planner = new_planner or (
            lambda: RoundPlanner(self.policy, None, MAX_LEN, MAX_ROWS, Drafting(world.may_guess), world.branches)
        )
        has_draft = any(each.drafter.place is Place.REMOTE for each in world.drafters)
        self.outlook = DraftOutlook(None if has_draft else FallbackReason.DRAFT_ABSENT)

    def _measured(self, law: CostModel) -> dict[int, float]:
        """What a service has measured of its model before it serves."""
        busy, most = self.dice.uniform(0.9, 1.1), self.world.busy[1]
        costs = {1 << power: law(1 << power) * busy * self.dice.uniform(0.95, 1.05) for power in range(8)}
        # The same luck as ever where nothing else runs.
        return {rows: cost * self.dice.uniform(1.0, most) for rows, cost in costs.items()} if most > 1 else costs

    @property
    def tide(self) -> float:
        """Factor of all rates of acceptance now."""
        return 1 + self.world.drift * math.sin(2 * math.pi * self.now_us / 10e6)

    def after(self, delay_us: float, happen: Callable[[], None]) -> None:
        """Lets something happen later."""
        heapq.heappush(self._events, (self.now_us + delay_us, next(self._numbers), happen))

    def gateway_work(self, work_us: float, end: Callable[[], None]) -> None:
        """Takes the gateway's one thread so long, after what it has to do before."""
        if not work_us:
            end()
            return
        self._gateway.append((work_us, end))
        if not self._gateway_busy:
            self._gateway_next()

    def _gateway_next(self) -> None:
        if not self._gateway:
            self._gateway_busy = False
            return
        self._gateway_busy = True
        work_us, end = self._gateway.popleft()

        def done() -> None:
            end()
            self._gateway_next()

        self.processors.begin(work_us, GATEWAY_SHARE, done)

    def load(self, num_sessions: int) -> None:
        """Sets how many sessions are at work from now on; others end with their rounds."""
        self.num_wanted = num_sessions
        for session in self.sessions[num_sessions:]:
            session.ended = True
        while len(self.sessions) < num_sessions:
            self._begin()

    def left(self, session: SimulatedSession) -> None:
        """A session has ended; another one takes its place."""
        if session in self.sessions:
            self.sessions.remove(session)
        if len(self.sessions) < self.num_wanted:
            self._begin()

    def _begin(self) -> None:
        kinds = self.world.kinds
        # The same sessions come in the same order, whatever is chosen for them.
        self._num_begun += 1
        dice = random.Random(f"{self.world.name} {self._seed} {self._num_begun}")
        [kind] = dice.choices(kinds, [each.share for each in kinds])
        planner = self._new_planner()
        planner.__enter__()
        length, jitter = dice.randint(*self.world.lengths), dice.uniform(0.92, 1.05)
        session = (self.world.session or SimulatedSession)(self, planner, kind, length, jitter)
        self.sessions.append(session)
        self.after(self.dice.uniform(0, 5_000), session.next_round)

    def run(self, seconds: float) -> float:
        """Lets time pass; returns the tokens of a second."""
        end_us, before = self.now_us + 1e6 * seconds, self.num_tokens
        while self._events and self._events[0][0] <= end_us:
            self.now_us, _, happen = heapq.heappop(self._events)
            happen()
        self.now_us = end_us
        return (self.num_tokens - before) / seconds

    def committed(self, session: SimulatedSession, committed: Round) -> None:
        """Adds a round to gaps, time and rounds of the simulation."""
        if not committed.is_first:
            self.gaps_us.append(committed.gap_us)
        if isinstance(session.planner, RoundPlanner):
            case = session.planner.choice.case
            is_plain = case in TRYING and not committed.proposal.tree
            # A choice whose drafter is not there is none.
            self.session_us[Case.UNKNOWN if is_plain else case] += committed.round_us
        if self.keeps_rounds:
            self.rounds.append((self.now_us, session, committed))
