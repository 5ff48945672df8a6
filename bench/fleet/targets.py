"""Simulated targets: prompts by turns of their gateways, steps that cost by their rows, and a cache of blocks.

As a target service does: what a gateway sent first is read first, gateways have equal shares of a step, and prompts
make a step half as long again at most while answers are made. What ended stays in the cache until room is needed.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from bench.fleet.clock import LateWay, VirtualClock
from bench.policy.devices import CostModel
from gateway.sessions.placement import PromptPrefix
from outrider.estimates.prefixes import BLOCK_TOKENS, PrefixNews
from outrider.estimates.timing import ServiceLoad

MAX_ROWS, LEAST_ROWS = 512, 16
SLOWDOWN = 1.5  # of a step, by prompts
LEAST_S, HEARTBEAT_S = 0.05, 1.0  # between two loads that a gateway hears
READING_ROWS, READING_MOVES = 64, 0.25


@dataclass(slots=True, eq=False)
class TargetJob:
    """A session at a target."""

    session_id: bytes
    prompt: PromptPrefix
    whole: PromptPrefix
    length: int
    end: int
    link: "TargetLink"
    unread: int = 0
    found: int = 0
    """Blocks that were in the cache."""
    held: list[int] = field(default_factory=list)
    own: int = 0
    """Blocks that have no name yet."""
    is_read: bool = False
    is_over: bool = False
    compute_s: float = 0.0


class Listener(Protocol):
    """A gateway, as a target sees it."""

    def heard(self, link: "TargetLink", load: ServiceLoad, session_count: int, news: PrefixNews | None) -> None: ...
    def answered(self, link: "TargetLink", session_id: bytes, found: int, compute_us: int) -> None: ...
    def ended(self, link: "TargetLink", session_id: bytes) -> None: ...
    def refused(self, link: "TargetLink", session_id: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class TargetLink:
    """A gateway's link to a target; `up` leads there."""

    gateway: Listener
    target: "SimulatedTarget"
    up: LateWay
    down: LateWay
    waiting: deque[TargetJob] = field(default_factory=deque)
    said_s: float = -1.0
    num_news: int = 0
    num_changes: int = 0
    """Changes of the cache that were said."""

    def news(self) -> PrefixNews:
        """What changed in the cache since it was said last."""
        changes = self.target.cache.changes
        last = dict(changes[self.num_changes :])
        came = [name for name, is_there in last.items() if is_there]
        news = PrefixNews(self.num_news, came, [name for name in last if not last[name]])
        self.num_news, self.num_changes = self.num_news + 1, len(changes)
        return news


class BlockCache:
    """Blocks of a target by their names: held by sessions, or kept until they are needed, the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders: Counter[int] = Counter()
        self.unheld: OrderedDict[int, None] = OrderedDict()
        self.num_own = 0
        self.changes: list[tuple[int, bool]] = []
        """Names that came and that went, in order."""

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self.holders) - self.num_own

    def __contains__(self, name: int) -> bool:
        return name in self.holders or name in self.unheld

    def hit_blocks(self, names: Sequence[int]) -> int:
        """How many of the first of these are there."""
        return next((at for at, each in enumerate(names) if each not in self), len(names))

    def hold(self, names: Sequence[int]) -> None:
        for each in names:
            if each not in self:
                self.changes.append((each, True))
            self.unheld.pop(each, None)
            self.holders[each] += 1

    def release(self, names: Sequence[int]) -> None:
        # The last block first: without the first one no other is of use.
        for each in reversed(names):
            self.holders[each] -= 1
            if not self.holders[each]:
                del self.holders[each]
                self.unheld[each] = None

    def take(self, count: int) -> None:
        """Takes blocks without a name."""
        self.num_own += count
        while len(self.unheld) > self.num_free:
            self.changes.append((self.unheld.popitem(last=False)[0], False))


class SimulatedTarget:
    """One incarnation of a target."""

    def __init__(self, address: str, clock: VirtualClock, cost_us: CostModel, num_blocks: int, *, pushes: bool) -> None:
        """It pushes what its cache has, or leaves that to be guessed."""
        self.address = address
        self.cache = BlockCache(num_blocks)
        self.links: list[TargetLink] = []
        self.jobs: dict[bytes, TargetJob] = {}
        self.is_draining = self.is_lost = self.is_busy = False
        self.busy_s = 0.0
        self.hit_tokens = self.asked_tokens = self.made_tokens = self.read_tokens = 0
        self._clock = clock
        self._cost_us = cost_us
        self._pushes = pushes
        self._num_steps = 0
        self._running: list[tuple[int, int, TargetJob]] = []
        self._reading_us = self._step_us = 0.0
        self._step_rows = self._turn = self._number = 0

    @property
    def num_waiting(self) -> int:
        """Sessions whose prompts are not read yet."""
        return sum(len(link.waiting) for link in self.links)

    def open(self, job: TargetJob) -> None:
        """A session comes; one that it has already is a fault of who sent it."""
        if self.is_lost:
            return
        if self.is_draining:
            job.link.down.send(lambda: job.link.gateway.refused(job.link, job.session_id))
            return
        if job.session_id in self.jobs:
            raise AssertionError(f"{self.address} has the session already")
        self.jobs[job.session_id] = job
        job.unread = job.length
        self._find(job)
        job.link.waiting.append(job)
        self._begin()

    def close(self, session_id: bytes) -> None:
        """The session's gateway wants no more of it."""
        job = self.jobs.pop(session_id, None)
        if job is None:
            return
        job.is_over = True
        if not job.is_read:
            job.link.waiting.remove(job)
            self.cache.num_own -= job.own
            self.cache.release(job.held)
        else:
            self._free(job, job.prompt)
            self._running = [each for each in self._running if each[2] is not job]
            heapify(self._running)
        self._begin()

    def drain(self) -> None:
        self.is_draining = True
        for link in self.links:
            self._say(link)

    def lose(self) -> None:
        """The process is gone, and what is on its way with it."""
        self.is_lost = True
        for link in self.links:
            link.up.is_cut = link.down.is_cut = True
        self.jobs.clear()

    def beat(self) -> None:
        """Says its load to those who have not heard of it for a while, or not of its cache, for ever."""
        for link in self.links:
            is_new = self._pushes and link.num_changes < len(self.cache.changes)
            if self._clock.now_s >= link.said_s + (LEAST_S if is_new else HEARTBEAT_S):
                self._say(link)
        if not self.is_lost:
            self._clock.after(LEAST_S, self.beat)

    def _find(self, job: TargetJob) -> None:
        names = job.prompt.names[: (job.length - 1) // BLOCK_TOKENS]
        job.found = self.cache.hit_blocks(names)
        job.held = list(names[: job.found])
        self.cache.hold(job.held)
        job.unread = job.length - BLOCK_TOKENS * job.found

    def _begin(self) -> None:
        if self.is_busy or self.is_lost:
            return
        running = len(self._running)
        pieces = self._pieces(running)
        if not running and not pieces:
            return
        rows = running + sum(count for _, count in pieces)
        step_us = self._cost_us(rows)
        if rows - running >= max(READING_ROWS, rows / 2):
            moves = READING_MOVES if self._reading_us else 1.0
            self._reading_us += moves * (step_us / rows - self._reading_us)
        self.is_busy, self._step_us, self._step_rows = True, step_us, rows
        self._clock.after(step_us / 1e6, lambda: self._end(pieces, step_us / 1e6))

    def _pieces(self, running: int) -> list[tuple[TargetJob, int]]:
        """Rows of prompts in the next step: equal shares of the gateways, and what one does not need is the others'."""
        links = [link for link in self.links if link.waiting]
        if not links:
            return []
        left = MAX_ROWS
        if running:
            allowed_us = SLOWDOWN * self._cost_us(running)
            while left > LEAST_ROWS and self._cost_us(running + left) > allowed_us:
                left -= LEAST_ROWS
        self._turn += 1
        links = [links[(self._turn + number) % len(links)] for number in range(len(links))]
        granted: Counter[TargetJob] = Counter()
        for share in (left // len(links), left):
            for link in links:
                part = min(share, left)
                for job in link.waiting:
                    if not part or not (job in granted or job.own or self._reserve(job)):
                        break
                    count = min(part, job.unread - granted[job])
                    granted[job] += count
                    part, left = part - count, left - count
        return [(job, count) for job, count in granted.items() if count]

    def _reserve(self, job: TargetJob) -> bool:
        """Takes the blocks of all of a session; False while there are too few."""
        if not job.found:
            self._find(job)
        needed = -(-job.end // BLOCK_TOKENS) - job.found
        if needed > self.cache.num_free:
            others = (each for link in self.links for each in link.waiting if each is not job and not each.own)
            if any(each.own or each.is_read for each in self.jobs.values()):
                return False
            # No other goes on, so those who wait give up what they have found.
            for each in others:
                self.cache.release(each.held)
                each.held, each.found, each.unread = [], 0, each.length
            if needed > self.cache.num_free:
                return False
        job.own = needed
        self.cache.take(needed)
        return True

    def _end(self, pieces: Sequence[tuple[TargetJob, int]], step_s: float) -> None:
        if self.is_lost:
            return
        self.is_busy = False
        self.busy_s += step_s
        self._num_steps += 1
        self.made_tokens += len(self._running)
        for job, count in pieces:
            job.compute_s += step_s
            job.unread -= count
            self.read_tokens += count
            if not job.unread and not job.is_over:
                self._read(job)
        while self._running and self._running[0][0] <= self._num_steps:
            job = heappop(self._running)[2]
            if not job.is_over:
                del self.jobs[job.session_id]
                self._free(job, job.whole)
                self._send_end(job)
        for link in self.links:
            if self._clock.now_s >= link.said_s + LEAST_S and any(job.link is link for job in self.jobs.values()):
                self._say(link)
        self._begin()

    def _read(self, job: TargetJob) -> None:
        """A prompt has been read, and its first token is made."""
        job.link.waiting.remove(job)
        job.is_read = True
        self._publish(job, job.prompt)
        self.hit_tokens += BLOCK_TOKENS * job.found
        self.asked_tokens += job.length
        self._number += 1
        heappush(self._running, (self._num_steps + job.end - job.length - 1, self._number, job))
        found, compute_us = BLOCK_TOKENS * job.found, int(1e6 * job.compute_s)
        job.link.down.send(lambda: job.link.gateway.answered(job.link, job.session_id, found, compute_us))

    def _send_end(self, job: TargetJob) -> None:
        job.link.down.send(lambda: job.link.gateway.ended(job.link, job.session_id))

    def _publish(self, job: TargetJob, text: PromptPrefix) -> None:
        # One that another session has named meanwhile takes the place of its own copy.
        names = text.names[len(job.held) :]
        self.cache.num_own -= len(names)
        job.own -= len(names)
        self.cache.hold(names)
        job.held += names

    def _free(self, job: TargetJob, text: PromptPrefix) -> None:
        self._publish(job, text)
        self.cache.num_own -= job.own
        self.cache.release(job.held)

    def _say(self, link: TargetLink) -> None:
        """Hands a link the load as it is now."""
        unread = {id(each): sum(job.unread for job in each.waiting) for each in self.links if each.waiting}
        free = self.cache.num_free
        load = ServiceLoad(
            waiting_tokens=sum(unread.values()),
            own_waiting_tokens=unread.get(id(link), 0),
            owner_count=len({*unread, id(link)}),
            free_blocks=free,
            cached_blocks=len(self.cache.unheld),
            step_us=int(self._step_us),
            step_rows=self._step_rows,
            prefill_us_per_token=self._reading_us,
            is_draining=self.is_draining,
        )
        link.said_s, count, news = self._clock.now_s, len(self.jobs), link.news() if self._pushes else None
        link.down.send(lambda: link.gateway.heard(link, load, count, news))
