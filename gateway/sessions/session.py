"""A session of a service on this side, which outlives its openings, and how long to wait for answers.

A deadline is a multiple of the usual time, so that no machine needs a setting.
"""

import asyncio
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

from gateway.rounds.round import TokenLog
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import NO_PREFIX, LinkBook, PromptPrefix
from gateway.sessions.replicas import Replicas
from gateway.sessions.room import LOOK_S
from outrider.errors import OutriderError, PeerLost, TargetsEnded
from outrider.parameters import SessionSpec
from outrider.v1 import types_pb2

MAX_DRIFT_REPAIRS = 3  # of one session: a service that goes on drifting only miscounts
SMALL_CATCH_UP = 32  # committed tokens that a draft reads in passing
CATCH_UP_TOKEN_S = 0.005  # allowance for each further one
MISSED_MAX_S = 1.0  # misses raise the deadline to this at most; only answers raise it further
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
BACK_S = 1.0  # in which a service to which only the connection ended is there again


def give_up(reading: asyncio.Task[None]) -> None:
    """Ends a task of a session's, done or not; what it raised has no other reader where the session ends first."""
    if not reading.cancel() and not reading.cancelled():
        reading.exception()


class Opening(Protocol):
    """A session's part in one link, from an open to its close."""

    book: LinkBook

    def end(self, fence: types_pb2.Fence) -> None:
        """Ends the session there; the fence has its newest epoch."""


OpeningT = TypeVar("OpeningT", bound=Opening)


class RemoteSession(Generic[OpeningT]):
    """A session that outlives its openings; each begins an epoch. Leaving the context ends it on the service too."""

    def __init__(
        self,
        replicas: Replicas,
        spec: SessionSpec,
        token_log: TokenLog,
        session_id: bytes,
        prefix: PromptPrefix = NO_PREFIX,
    ) -> None:
        self._replicas = replicas
        self._spec = spec
        self._log = token_log
        self._session_id = session_id
        self._opening: OpeningT | None = None
        self._epoch = 0
        self._num_repairs = 0
        self._prefix = prefix

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exit: object) -> None:
        for peer in self._replicas.links:
            peer.breaker.left(self._session_id)
        if len(self._log) > self._spec.prompt_len:
            self._replicas.output.add(len(self._log) - self._spec.prompt_len)
        self._forget()

    def _forget(self) -> None:
        """Ends the opening; what the service has cached of it may be found by the next one."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.book.closed(self._session_id, self._log.tokens() if self._prefix.chain else ())
            opening.end(self._fence())

    def _fence(self, base_len: int | None = None) -> types_pb2.Fence:
        base_len = len(self._log) if base_len is None else base_len
        return types_pb2.Fence(session_id=self._session_id, epoch=self._epoch, base_len=base_len)


class PerLink:
    """What is learnt of each link by itself, from a copy of this pattern on: one that is slow loosens no other's."""

    _links: "WeakKeyDictionary[ServicePeer, Self]"

    def of(self, link: ServicePeer) -> Self:
        """What is learnt of one link."""
        if link not in self._links:
            self._links[link] = copy(self)
        return self._links[link]


@dataclass
class DraftDeadline(PerLink):
    """Deadline of a draft's answer: factor times the moving average of its answers, between min_s and max_s."""

    min_s: float = 0.25
    max_s: float = 5.0
    factor: float = 20.0
    _mean_s: float | None = None
    _links: "WeakKeyDictionary[ServicePeer, Self]" = field(default_factory=WeakKeyDictionary)

    def seconds(self, catch_up_count: int) -> float:
        """Time to wait for an answer for which the draft has to read catch_up_count tokens first."""
        usual_s = self.max_s if self._mean_s is None else self.factor * self._mean_s
        allowance_s = CATCH_UP_TOKEN_S * max(0, catch_up_count - SMALL_CATCH_UP)
        return min(max(usual_s, self.min_s), self.max_s) + allowance_s

    def observe(self, answer_s: float, catch_up_count: int) -> None:
        """Learns from the time of an answer."""
        if catch_up_count <= SMALL_CATCH_UP:
            self._mean_s = answer_s if self._mean_s is None else 0.9 * self._mean_s + 0.1 * answer_s

    def missed(self) -> None:
        """Learns from a deadline that passed, which says only that the draft is slower; it may even hang.

        So the deadline itself is no answer's time: fed back, it would raise the next one without end.
        """
        max_s = MISSED_MAX_S / self.factor
        self._mean_s = max_s if self._mean_s is None else max(self._mean_s, min(2 * self._mean_s, max_s))


@dataclass
class RoundDeadline(PerLink):
    """Time until the target is looked at: factor times the moving average of its answers, within bounds.

    Passing it costs one question and no request, so it may be short. `max_s` bounds what a slow start would teach.
    """

    min_s: float = 2.0
    max_s: float = 30.0
    factor: float = 20.0
    _mean_s: float = 0.0
    _links: "WeakKeyDictionary[ServicePeer, Self]" = field(default_factory=WeakKeyDictionary)

    def seconds(self) -> float:
        """Time to wait for a verdict before the target is looked at."""
        return min(max(self.factor * self._mean_s, self.min_s), self.max_s)

    def observe(self, answer_s: float) -> None:
        """Learns from the time of an answer."""
        self._mean_s += 0.1 * (min(answer_s, self.max_s) - self._mean_s)


@dataclass(frozen=True, slots=True)
class TargetTimeouts:
    """With a target: until it is looked at; seconds for which its device may finish nothing, it may be away, and it may
    work without an answer before the session is opened again.
    """

    deadline: RoundDeadline = field(default_factory=RoundDeadline)
    stall_s: float = 30.0
    rebuild_budget_s: float = 30.0
    answer_s: float = 60.0


class RetryBudget:
    """The time within one round in which a request has no target. Begins with the first fault."""

    def __init__(self, budget_s: float, now_s: float) -> None:
        self.until_s = now_s + budget_s
        self._budget_s = budget_s
        self._num_faults = 0

    def pause_s(self, fault: OutriderError, now_s: float) -> float:
        """Seconds to wait before the next attempt; raises PeerLost when the budget is used up.

        The first fault begins its time, because the round before it may have taken long.
        """
        self._num_faults += 1
        if self._num_faults == 1:
            self.until_s = now_s + self._budget_s
            return 0.0
        if now_s >= self.until_s:
            message = f"{fault.message}, and no target took the request over within {self._budget_s:g} seconds"
            raise PeerLost(message) from fault
        return float(min(FIRST_PAUSE_S * 2 ** (self._num_faults - 2), LONGEST_PAUSE_S, self.until_s - now_s))


class EndedTargets:
    """Targets that ended while they read a session, since it was read last: it may be the reason.

    From the first one on no two such sessions are read at the same time, so that one ends no place of another.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        """`turn` is held by the session that is being read."""
        self._turn = turn
        self._has_turn = False
        self._ended: list[tuple[ServicePeer, int]] = []  # with the incarnation that it was

    def clear(self) -> None:
        """The session has been read, or is over."""
        self._ended = []
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    def note(self, peer: ServicePeer, instance_id: int) -> None:
        """A target ended, or the connection to it."""
        self._ended.append((peer, instance_id))

    async def judge(self, until_s: float) -> None:
        """Waits for the session's turn to be read again, by the loop's clock at most until then.

        Raises TargetsEnded where two have ended. Of one that is there again as it was only the connection did; what is
        not there after a while counts as ended.
        """
        clock_s = asyncio.get_running_loop().time
        back_s = clock_s() + BACK_S
        while len(self._ended) > 1 and any(peer.info is None for peer, _ in self._ended):
            if clock_s() >= back_s:
                break
            await asyncio.sleep(LOOK_S)
        self._ended = [(peer, was) for peer, was in self._ended if peer.info is None or peer.info.instance_id != was]
        if len(self._ended) > 1:
            addresses = ", ".join(dict.fromkeys(peer.address for peer, _ in self._ended))
            message = f"{len(self._ended)} targets ended while they read the request, and no other gets it: {addresses}"
            raise TargetsEnded(message, addresses=addresses)
        if self._ended and not self._has_turn:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    self._has_turn = await self._turn.acquire()
