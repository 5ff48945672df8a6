"""A running session's move to another draft, which reads the tokens while the one before goes on guessing.

Sessions look between two rounds, each at moments of its own, so that not all of them see the same idle draft at once.
They look at once where their draft says that it is about to end.
"""

import asyncio
import random

import structlog

from gateway.rounds.round import NO_REQUEST
from gateway.sessions.draft_opening import DraftOpening, blame
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import NO_PREFIX, LinkBook, MovedFor, PlaceWish, PromptPrefix, better, choose
from gateway.sessions.replicas import Replicas
from gateway.sessions.session import give_up
from outrider.errors import OutriderError, ProtocolViolation
from outrider.parameters import Rule, SessionSpec
from outrider.process.telemetry import session_prefix
from outrider.v1 import types_pb2

LOOK_S = 1.0  # between two looks of a session at most: a pool that has grown shares its sessions within twice that
REST_S = 5.0  # after a move, whatever came of it
MOVE_ROUNDS = 64.0  # in which a move must bring more than reading the tokens again costs


log = structlog.get_logger()


class DraftMove:
    """A session's second opening, on the draft to which it moves, and which is asked for no guesses yet."""

    def __init__(
        self, opening: DraftOpening, fence: types_pb2.Fence, reason: MovedFor, timeout_s: float, left: LinkBook
    ) -> None:
        """`fence` begins an epoch; reading may take so long. `left` is the book of the draft that has the session."""
        self.opening, self.fence, self.reason, self._left = opening, fence, reason, left
        opening.book.opened(fence.session_id, fence.base_len, NO_PREFIX)
        opening.ask(fence, NO_REQUEST)
        left.leaving.add(fence.session_id)
        self.reading = asyncio.create_task(self._read(timeout_s), name="draft move")

    def end(self) -> None:
        """Gives the opening up."""
        give_up(self.reading)
        self._left.leaving.discard(self.fence.session_id)
        self.opening.book.closed(self.fence.session_id)
        self.opening.end(self.fence)

    async def _read(self, timeout_s: float) -> None:
        response = await self.opening.answer(self.fence, asyncio.get_running_loop().time() + timeout_s)
        if response.WhichOneof("answer") != "proposal":
            raise ProtocolViolation(f"{self.opening.peer} lacks tokens of a session that has just been opened")


class DraftMoves:
    """Moves of one session, one at a time: when one is due, and what comes of it."""

    def __init__(self, replicas: Replicas, spec: SessionSpec, prefix: PromptPrefix) -> None:
        self._replicas = replicas
        self._spec = spec
        self._prefix = prefix
        self._clock_s = asyncio.get_running_loop().time
        self._stopping: ServicePeer | None = None  # that was looked at when it said so
        self._move: DraftMove | None = None
        self._next_s = 0.0
        self._put_off(LOOK_S)

    @property
    def is_under_way(self) -> bool:
        """Whether there is a move that has not arrived."""
        return self._move is not None

    @property
    def has_read(self) -> bool:
        """Whether there is one that can arrive in the next round."""
        return self._move is not None and self._move.reading.done()

    def begin(self, move: DraftMove) -> None:
        """Keeps a move until it arrives or ends."""
        self._move = move

    def end(self) -> None:
        """Gives up the move that is under way."""
        if self._move is not None:
            self._move.end()
            self._move = None

    def arrived(self) -> DraftMove | None:
        """The move, if its draft has read everything; after that the next one waits for some seconds."""
        move = self._move
        if move is None or not self.has_read:
            return None
        self._put_off(REST_S)
        session_id, peer = move.fence.session_id, move.opening.peer
        try:
            move.reading.result()
        except (OutriderError, TimeoutError) as error:
            log.info("draft move failed", service=str(peer), session=session_prefix(session_id), reason=str(error))
            self.end()
            if isinstance(error, OutriderError):
                blame(peer, move.opening.link, session_id, error)
            else:
                peer.breaker.failed(session_id, error)
            return None
        self._move = None
        self._replicas.moves[move.reason] += 1
        log.debug("draft moved", service=str(peer), session=session_prefix(session_id), reason=move.reason)
        return move

    def due(self, here: ServicePeer, length: int, *, is_guessing: bool) -> tuple[ServicePeer, MovedFor] | None:
        """The draft with which a session of so many tokens should go on in place of `here`; None where that may stay,
        or where it is not time to look.

        One that is not asked for guesses costs its draft nothing, and leaves it only for its end.
        """
        is_news = here.is_draining and here is not self._stopping
        if not is_news and self._clock_s() < self._next_s:
            return None
        self._stopping = here if here.is_draining else None
        self._put_off(LOOK_S)
        is_leaving = here.is_draining or here not in self._replicas.peers
        others = {peer.address: peer for peer in self._replicas.peers if self._takes(peer, here, length)}
        if not others or not (is_leaving or is_guessing):
            return None
        wish = PlaceWish(length, min(MOVE_ROUNDS, self._spec.max_len - length), self._prefix)
        alike = [peer.figures(wish) for peer in others.values() if self._is_like(peer, here)]
        if is_leaving:
            # Another model is better than none.
            placement = choose(alike or [peer.figures(wish) for peer in others.values()], wish)
            return None if placement is None else (others[placement.address], MovedFor.LEAVING)
        placement = better(here.figures(wish, is_there=True), alike, wish)
        return None if placement is None else (others[placement.address], MovedFor.LOAD)

    def _takes(self, peer: ServicePeer, here: ServicePeer, length: int) -> bool:
        is_open = peer is not here and not peer.is_draining and not peer.breaker.is_open
        return is_open and peer.info is not None and length < peer.info.context_len

    def _is_like(self, peer: ServicePeer, here: ServicePeer) -> bool:
        """Whether guesses are the same there, where a rule lets the answer depend on them, or else as often right."""
        there, now = peer.info, here.info
        if there is None or now is None or (there.model_hash, there.drafters) != (now.model_hash, now.drafters):
            return False
        return self._spec.acceptance.rule is Rule.MATCH or there.numerics_id == now.numerics_id

    def _put_off(self, seconds: float) -> None:
        self._next_s = self._clock_s() + seconds * random.uniform(0.5, 1.0)
