"""What a service says of its load, in frames of the links whose gateways read it.

It is for who chooses where a session goes. The figures are looked up when they are sent, on the event loop: a forward
costs nothing for them but what counts it. No request waits for them, and none depends on them.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from outrider.estimates.prefixes import NewsWriter, PrefixJournal
from outrider.estimates.timing import ServiceLoad
from outrider.model_service.outbox import Outbox
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.sessions import SessionStore
from outrider.rpc.messages.round import write_load, write_news
from outrider.v1.draft_service_pb2 import DraftServiceLinkRequest, DraftServiceLinkResponse
from outrider.v1.target_service_pb2 import TargetServiceLinkRequest, TargetServiceLinkResponse

# Between two loads on a link, and most between them on one without answers.
LEAST_S, HEARTBEAT_S = 0.05, 1.0


class LoadMeter:
    """The load of one service."""

    def __init__(self, facts: ServiceFacts, sessions: SessionStore[Any]) -> None:
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.drain_ends_s = math.inf
        """When the service ends what is left, once it drains."""
        self._facts = facts
        self._sessions = sessions
        self._counted_s = -math.inf
        self._unread: dict[Outbox, int] = {}

    def seen_by(self, owner: Outbox) -> ServiceLoad:
        """The load as it is now, for a link."""
        now_s = self.clock()
        if now_s >= self._counted_s + LEAST_S:
            # Once for all links: with many of them and many sessions it is the most of what a load costs.
            self._counted_s, self._unread = now_s, self._sessions.unread()
        counts, unread, forwards = self._sessions.counts(), self._unread, self._sessions.forward_counts
        step_s, step_rows = forwards.last
        is_draining = self._sessions.is_draining
        # The device goes on meanwhile, and figures that contradict each other would be a fault.
        free_blocks = min(counts.free_block_count, self._facts.block_count)
        return ServiceLoad(
            waiting_tokens=sum(unread.values()),
            own_waiting_tokens=unread.get(owner, 0),
            owner_count=len({*unread, owner}),
            free_blocks=free_blocks,
            cached_blocks=min(counts.cached_block_count, free_blocks),
            step_us=int(1e6 * step_s),
            step_rows=step_rows,
            # Before, not what a row of few costs: a service that looks so dear is sent nothing to read, ever.
            prefill_us_per_token=1e6 * forwards.reading_row_s,
            is_draining=is_draining,
            drain_left_ms=int(1e3 * max(0.0, self.drain_ends_s - now_s)) if is_draining else 0,
        )


class LinkLoad:
    """When a link says the load of its service, and of a target what changed in its cache; never before its gateway
    reads that.
    """

    def __init__(self, load: LoadMeter, outbox: Outbox, journal: PrefixJournal | None = None) -> None:
        """`journal` has what is cached, where gateways may hear of it."""
        self._load = load
        self._outbox = outbox
        self._journal = journal
        self._said_s = -math.inf
        self._news: NewsWriter | None = None
        self._heartbeat: asyncio.TimerHandle | None = None

    def hear(self, frame: DraftServiceLinkRequest | TargetServiceLinkRequest) -> None:
        """Takes note of what the gateway wants to read from now on."""
        if self._journal is not None and isinstance(frame, TargetServiceLinkRequest) and frame.wants_prefixes:
            self._news = NewsWriter(self._journal)
        if frame.reads_load and self._heartbeat is None:
            self._beat()

    def hurry(self) -> None:
        """Something has changed that must not wait for the next answer."""
        if self._heartbeat is not None:
            self._said_s = -math.inf
            self._outbox.nudge()

    def end(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def write(self, frame: DraftServiceLinkResponse | TargetServiceLinkResponse) -> None:
        """Puts the load into a frame, where it is wanted and due."""
        now_s = self._load.clock()
        if self._heartbeat is not None and now_s >= self._said_s + LEAST_S:
            self._said_s = now_s
            write_load(frame.load, self._load.seen_by(self._outbox))
            if self._news is not None:
                write_news(frame.load.prefixes, self._news.next())

    def _beat(self) -> None:
        # Another gateway's prompt changes the cache while nothing is answered here.
        look_s = HEARTBEAT_S if self._news is None else LEAST_S
        pause_s = LEAST_S if self._news is not None and self._news.is_due else HEARTBEAT_S
        left_s = self._said_s + pause_s - self._load.clock()
        if left_s <= 0:
            self._outbox.nudge()
            left_s = pause_s
        self._heartbeat = asyncio.get_running_loop().call_later(min(left_s, look_s), self._beat)
