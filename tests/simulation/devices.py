"""A simulation of two devices that many sessions share, on a clock of its own; the planners and the policy are real.

Each device takes whatever waits for it into its next step, as the services do. A round pays the way of its messages; a
stretch of plain tokens goes on without one.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from gateway.rounds.planner import DraftOutlook, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import HopCost, Place, Proposal, TokenLog, Verdict
from outrider.token_tree import TokenTree
from target_service.gathering import Gathering

PROMPT_LEN = 8
LOOK_AGAIN_US = 100
CostLaw = Callable[[int], float]
"""Microseconds of a forward over so many rows."""


@dataclass(eq=False)
class Device:
    """Takes sessions with their rows in steps; `done` gets each one when its step ends."""

    world: "Devices"
    cost_us: CostLaw
    waiting: dict["SimulatedSession", int] = field(default_factory=dict)
    since_us: dict["SimulatedSession", float] = field(default_factory=dict)
    is_busy: bool = False
    gathering: Gathering | None = None
    """Gathering of a target."""

    def put(self, session: "SimulatedSession", rows: int) -> None:
        """A session waits for the next step."""
        self.waiting[session] = rows
        self.since_us[session] = self.world.now_us
        if self.gathering is not None:
            self.gathering.came(session, self.world.now_us / 1e6)
        self.world.after(0.0, self.begin)

    def begin(self) -> None:
        """Begins a step, unless there is one or nothing to do."""
        if self.is_busy or not self.waiting:
            return
        if self.gathering is not None and self.gathering.is_worth_waiting(self.waiting, sum(self.waiting.values())):
            self.world.after(LOOK_AGAIN_US, self.begin)
            return
        self.is_busy = True
        batch, self.waiting = self.waiting, {}
        for session in batch:
            session.queue_us = self.world.now_us - self.since_us.get(session, self.world.now_us)
        rows = sum(batch.values())
        cost_us = self.cost_us(rows) * self.world.dice.uniform(0.97, 1.03)
        self.world.after(cost_us, lambda: self._end(batch, cost_us, rows))

    def _end(self, batch: dict["SimulatedSession", int], cost_us: float, rows: int) -> None:
        self.is_busy = False
        if self.gathering is not None:
            self.gathering.costs.add(rows, cost_us / 1e6)
        for session in batch:
            session.stepped(self, cost_us, rows)
            if self.gathering is not None:
                (self.gathering.stayed if session in self.waiting else self.gathering.left)(session)
        self.begin()


@dataclass(eq=False)
class SimulatedSession:
    """One request, without an end."""

    world: "Devices"
    planner: RoundPlanner
    log: TokenLog
    alpha: float
    limit: int = 0
    asked: int = 0
    left: int = 0
    draft_us: float = 0.0
    draft_rows: int = 0
    queue_us: float = 0.0
    at_target: bool = False
    ended: bool = False

    def next_round(self) -> None:
        """Plans a round, and sends what it needs."""
        if self.ended:
            self.planner.__exit__()
            return
        self.log.begin_round()
        outstanding = max(0, self.limit - len(self.log))
        plan = self.planner.plan(self.log, outstanding, DraftOutlook())
        self.asked = plan.asked(Place.REMOTE).count
        if self.asked:
            self.left, self.draft_us, self.draft_rows = self.asked, 0.0, 0
            self.world.after(self.world.message_us / 2, lambda: self.world.draft.put(self, 1))
            return
        if not outstanding or 2 * outstanding <= plan.plain_budget:
            self.limit = len(self.log) + 1 + plan.plain_budget
        if not self.at_target:
            self.at_target = True
            self.world.after(self.world.message_us / 2, lambda: self.world.target.put(self, 1))

    def stepped(self, device: Device, cost_us: float, rows: int) -> None:
        """A device has made a step of this session."""
        if device is self.world.draft:
            self.left -= 1
            self.draft_us += cost_us
            self.draft_rows += rows
            if self.left:
                device.waiting[self] = 1
            else:
                self.limit = len(self.log) + 1
                self.world.after(self.world.message_us / 2, lambda: self.world.target.put(self, self.asked + 1))
            return
        accepted = 0
        while accepted < self.asked and self.world.dice.random() < self.alpha:
            accepted += 1
        proposal = Proposal(
            TokenTree.chain((1,) * self.asked),
            compute_us=int(self.draft_us),
            forward_count=self.asked,
            row_count=self.draft_rows,
        )
        verdict = Verdict(
            len(self.log),
            tuple(range(1, accepted + 1)),
            1,
            None,
            min(accepted + 1, self.asked),
            compute_us=int(cost_us),
            forward_count=1,
            row_count=rows,
            session_count=len(self.world.sessions),
            hop=HopCost(queue_us=int(self.queue_us)),
        )
        committed = self.log.commit(proposal, verdict)
        self.world.committed(self, len(committed.token_ids))
        self.planner.observe(committed)
        # The target goes on by itself within the budget.
        self.at_target = not self.asked and len(self.log) < self.limit and not self.ended
        if self.at_target:
            self.world.target.put(self, 1)
        self.next_round()


class Devices:
    """Both devices and the sessions on them."""

    def __init__(
        self, target_us: CostLaw, draft_us: CostLaw, message_us: float = 600, alpha: float = 0.7, seed: int = 0
    ) -> None:
        self.dice = random.Random(seed)
        self.policy = SpeculationPolicy()
        self.target, self.draft = Device(self, target_us), Device(self, draft_us)
        self.target.gathering = Gathering(lambda: self.now_us / 1e6)
        self.message_us, self.alpha = message_us, alpha
        self.now_us = 0.0
        self.sessions: list[SimulatedSession] = []
        self.num_tokens = 0
        self.choices: list[tuple[float, int, int]] = []
        """For each commit its time, the K of its round, and how many sessions drafted then."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, delay_us: float, happen: Callable[[], None]) -> None:
        """Lets something happen later."""
        heapq.heappush(self._events, (self.now_us + delay_us, next(self._numbers), happen))

    def begin(self, num_sessions: int, draft_count: int | None = None) -> None:
        """Runs that many sessions from now on, with a fixed K or the policy's; others end with their rounds."""
        for session in self.sessions[num_sessions:]:
            session.ended = True
        del self.sessions[num_sessions:]
        while len(self.sessions) < num_sessions:
            log = TokenLog((1,) * PROMPT_LEN, lambda: int(self.now_us * 1000))
            planner = RoundPlanner(self.policy, draft_count, 1 << 30, 8)
            planner.__enter__()
            session = SimulatedSession(self, planner, log, self.alpha)
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

    def committed(self, session: SimulatedSession, num_tokens: int) -> None:
        """Counts the tokens of a round."""
        self.num_tokens += num_tokens
        drafting = sum(each.asked > 0 for each in self.sessions)
        self.choices.append((self.now_us, session.asked, drafting))
