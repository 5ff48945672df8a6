"""A running session's move to another target of the same numerics, because the one that it has is about to end.

The other target reads the tokens while the one before goes on serving. Then, between two rounds, the session is opened
there once more, with the next epoch: a target that has a session keeps what it has read of it, so that only the tokens
of the rounds since are left to be read. A session that loses its target meanwhile goes on in the same way, with as
much as is read by then.
"""

import asyncio
import math
import random
from collections.abc import Callable

import structlog

from gateway.rounds.round import NO_REQUEST, NOTHING, TokenLog
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import LinkFigures, MovedFor, PlaceWish, PromptPrefix
from gateway.sessions.replicas import Need, Replicas, wish_of
from gateway.sessions.session import give_up
from gateway.sessions.target_opening import TargetOpening
from outrider.errors import OutriderError, PeerLost
from outrider.parameters import SessionSpec
from outrider.process.telemetry import session_prefix
from outrider.v1 import types_pb2

LOOK_S = 1.0  # between two looks of a session that has found no place, or is nearly done
REST_S = 5.0  # after a move that has failed

log = structlog.get_logger()


class TargetMoves:
    """Moves of one session, one at a time: when one is due, and what comes of it."""

    def __init__(
        self, replicas: Replicas, spec: SessionSpec, token_log: TokenLog, session_id: bytes, prefix: PromptPrefix
    ) -> None:
        self._replicas = replicas
        self._spec = spec
        self._log = token_log
        self._session_id = session_id
        self._prefix = prefix
        self._next_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._opening: TargetOpening | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether there is a move that has not arrived."""
        return self._reading is not None

    @property
    def peer(self) -> ServicePeer | None:
        """The target that reads for the move, or has read; None while there is none, and where that has failed."""
        reading, opening = self._reading, self._opening
        has_failed = reading is not None and reading.done() and reading.exception() is not None
        return opening.peer if opening is not None and not has_failed else None

    def due(self, here: ServicePeer, need: Need) -> bool:
        """Whether it is time to leave `here`, which drains, for another place that meets the need.

        A session that should be done before any other place has read its tokens stays.
        """
        now_s = asyncio.get_running_loop().time()
        if not here.is_draining or not need.numerics_id or now_s < self._next_s:
            return False
        self._put_off(LOOK_S)
        wish = self._wish(need)
        others = [each for each in self._replicas.peers if self._replicas.takes(each, self._session_id, need)]
        left_us = 1e3 * here.said.drain_left_ms if here.said is not None else 0.0
        return bool(others) and _rest_us(here.figures(wish), wish) >= min(
            left_us, *(_reading_us(each.figures(wish), wish) for each in others)
        )

    def begin(self, need: Need, opened_on: Callable[[ServicePeer], TargetOpening], timeout_s: float) -> None:
        """Begins a move, whose place is chosen when its turn comes; `opened_on` makes an opening of the next epoch.

        Reading may take so long.
        """
        self._reading = asyncio.create_task(self._read(need, opened_on, timeout_s), name="target move")

    def arrived(self, need: Need, fence: types_pb2.Fence) -> ServicePeer | None:
        """The target of the move, if it has read everything and still takes the session. One that failed is given up,
        with the session's newest fence.
        """
        reading, opening = self._reading, self._opening
        if reading is None or not reading.done():
            return None
        try:
            reading.result()
            if opening is None or opening.link.end is not None:
                raise PeerLost("no place is open")
            if not self._replicas.takes(opening.peer, self._session_id, need):
                raise PeerLost(f"{opening.peer} takes no sessions any more")
        except (OutriderError, TimeoutError) as error:
            reason = str(error)
        else:
            self._replicas.moves[MovedFor.LEAVING] += 1
            return opening.peer
        service = str(opening.peer) if opening is not None else ""
        log.info("target move failed", service=service, session=session_prefix(self._session_id), reason=reason)
        self._put_off(REST_S)
        self.end(fence)
        return None

    def end(self, fence: types_pb2.Fence, successor: TargetOpening | None = None) -> bool:
        """Ends the move that is under way, with the session's newest fence; returns whether the session's next opening,
        which has just been made, takes over what was read.
        """
        reading, opening = self._reading, self._opening
        self._reading = self._opening = None
        if reading is not None:
            give_up(reading)
        if opening is None:
            return False
        # Where the successor has the place on the link, the target hears nothing.
        opening.end(fence)
        if successor is not None and successor.link is opening.link:
            length = len(self._log)
            opening.book.answered(self._session_id, length, length, 0)
            return True
        opening.book.closed(self._session_id)
        return False

    async def _read(self, need: Need, opened_on: Callable[[ServicePeer], TargetOpening], timeout_s: float) -> None:
        peer = await self._replicas.place_to_move(self._session_id, need, self._wish(need))
        if peer is None or self._log.finish_reason is not None:
            return
        length = len(self._log)
        self._opening = opening = opened_on(peer)
        opening.book.opened(self._session_id, length, self._prefix)
        opening.send_step(NOTHING, 0, NO_REQUEST)
        response = await opening.receive(asyncio.get_running_loop().time() + timeout_s)
        if not response.HasField("verdict"):
            raise PeerLost(f"{peer} lacks tokens of a session that has just been opened")
        found_len = response.verdict.prefix_len
        expected = opening.book.answered(self._session_id, length, found_len, response.times.compute_us)
        if expected is not None:
            self._replicas.prefix_hits.add(expected, found_len)

    def _wish(self, need: Need) -> PlaceWish:
        return wish_of(self._spec, len(self._log), self._replicas.output, self._prefix, need.numerics_id)

    def _put_off(self, seconds: float) -> None:
        self._next_s = asyncio.get_running_loop().time() + seconds * random.uniform(0.5, 1.0)


def _rest_us(here: LinkFigures, wish: PlaceWish) -> float:
    """Microseconds that a session is expected to go on, endless where nothing is known of that."""
    return math.inf if here.step_us is None else wish.output / here.round_tokens * here.step_us


def _reading_us(there: LinkFigures, wish: PlaceWish) -> float:
    """Microseconds until a place has read a session."""
    return (there.prompt_token_us or 0.0) * (max(wish.length - there.hit_len, 0) + there.own_waiting_tokens)
