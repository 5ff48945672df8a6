"""The gateway's end of a draft session, whose faults cost no request anything.

A fault of the draft makes an empty proposal that says why, and never an error. Whatever goes wrong, the session starts
over with all tokens and a new epoch, later for every fault in a row. Answers are matched by (epoch, base_len), never by
order; what of them is believed is in gateway.sessions.draft_opening.
"""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Self

import structlog

from gateway.rounds.planner import DraftOutlook
from gateway.rounds.round import (
    NO_REQUEST,
    NOTHING,
    FallbackReason,
    GuessRequest,
    HopCost,
    Proposal,
    TokenLog,
)
from gateway.sessions.draft_move import DraftMove, DraftMoves
from gateway.sessions.draft_opening import ALONE, LOST, DrafterSeat, DraftOpening, OnBranches, blame
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import NO_PREFIX, PromptPrefix
from gateway.sessions.replicas import Replicas, wish_of
from gateway.sessions.session import MAX_DRIFT_REPAIRS, SMALL_CATCH_UP, DraftDeadline, RemoteSession
from outrider.errors import OutriderError, PeerLost, ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.process import telemetry
from outrider.process.telemetry import session_prefix
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import types_pb2

PAUSE_TOKENS = (8, 256)  # plain tokens after the second fault in a row, and the maximum after many
MAX_REASON_LEN = 400  # of a draft's own words in the log

log = structlog.get_logger()


class RemoteDraftSession(RemoteSession[DraftOpening]):
    """A session on a draft service; opens with the context when `warm`, else with the first proposal wanted."""

    def __init__(
        self,
        replicas: Replicas,
        draft_deadline: DraftDeadline,
        spec: SessionSpec,
        token_log: TokenLog,
        session_id: bytes,
        warm: bool,
        seat: DrafterSeat = ALONE,
        prefix: PromptPrefix = NO_PREFIX,
    ) -> None:
        super().__init__(replicas, spec, token_log, session_id, prefix)
        self._draft_deadline = draft_deadline
        self._warm = warm
        self._seat = seat
        self._last = replicas.peers[0]  # the draft that was asked last
        self._faults = 0.0  # in a row; an answer halves them, because every fault may cost reading all tokens again
        self._resume_len = 0
        self._resting_for = FallbackReason.DRAFT_ABSENT
        self._rollback: asyncio.Task[None] | None = None
        # Of all drafts together, so that none ever sees one again.
        self._epochs = count(1)
        self._moves = DraftMoves(replicas, spec, prefix)
        self.on_branches: OnBranches | None = None
        """Takes branches for the verdict on the log's length; without it none are asked for."""

    @property
    def outlook(self) -> DraftOutlook:
        """Outlook of the draft now: why not to ask it, if there is a reason, and its limits."""
        info = (self._opening.peer.info if self._opening is not None else None) or self._replicas.info
        if info is None:
            return DraftOutlook(FallbackReason.DRAFT_ABSENT)
        obstacle = None
        open_ones = (peer for peer in self._replicas.peers if not peer.is_draining)
        if self._kept() is None and not any(map(self._may_ask, open_ones)):
            cause = self._last.breaker.cause or PeerLost
            is_lost = issubclass(cause, LOST)
            obstacle = FallbackReason.DRAFT_LOST if is_lost else FallbackReason.DRAFT_REFUSED
            if cause is TimeoutError:
                obstacle = FallbackReason.DRAFT_LATE
        elif self._is_rolling_back:
            obstacle = FallbackReason.DRAFT_LATE
        elif len(self._log) < self._resume_len:
            obstacle = self._resting_for
        return DraftOutlook(obstacle, info.context_len, info.max_draft_count)

    @property
    def _is_rolling_back(self) -> bool:
        return self._rollback is not None and not self._rollback.done()

    def can_guess(self, draft_count: int) -> bool:
        """Whether it is of use to ask for so many guesses now."""
        outlook = self.outlook
        fits = outlook.context_len is None or len(self._log) + draft_count <= outlook.context_len
        return outlook.obstacle is None and fits

    async def __aenter__(self) -> Self:
        peer = self._candidate()
        if self._warm and peer is not None and peer.info is not None and not peer.breaker.is_open:
            try:
                if len(self._log) <= peer.info.context_len:
                    self._ask(peer, NO_REQUEST)
            except OutriderError as error:
                self._drop(error)
        return self

    async def __aexit__(self, *exit_: object) -> None:
        if self._rollback is not None:
            self._rollback.cancel()
        self._moves.end()
        await super().__aexit__(*exit_)

    async def propose(self, asked: GuessRequest) -> Proposal:
        """Asks for guesses after the log; an empty proposal says what went wrong.

        Where the target has gone on by itself, the draft is not waited for, and there is no proposal. A draft that is
        not waited for any longer, because this is cancelled, counts as late.
        """
        self.change_place(is_guessing=asked.count > 0, is_ahead=asked.went_on)
        if asked.went_on:
            # Where another draft has read everything, no branches are asked for, so that a round comes which begins
            # without one: those under way are guesses of the draft that is left.
            return NOTHING if self._moves.has_read else self._tell(asked)
        if asked.count == 0:
            return NOTHING
        clock_s = asyncio.get_running_loop().time
        log_len = len(self._log)
        catch_up_count = log_len - (self._opening.cached_len if self._opening is not None else 0)
        peer = self._candidate()
        deadline = self._draft_deadline.of(peer or self._last)
        timeout_s, started_s = deadline.seconds(catch_up_count), clock_s()
        try:
            opening, response = await self._exchange(peer, asked, started_s + timeout_s)
            wait_us = int(1e6 * (clock_s() - started_s))
            proposal = opening.proposal(response, asked.count, catch_up_count, wait_us, asked.shape)
        except asyncio.CancelledError:
            self._fault(FallbackReason.DRAFT_LATE)
            raise
        except TimeoutError as error:
            deadline.missed()
            self._last.breaker.failed(self._session_id, error, timeout_s)
            self._log_event("draft late", timeout_s=round(timeout_s, 3), base_len=log_len)
            # This stops the draft's job, and the round goes on at once.
            self._begin_rollback(log_len, started_s)
            return self._fault(FallbackReason.DRAFT_LATE)
        except OutriderError as error:
            return self._drop(error)
        deadline.observe(wait_us / 1e6, catch_up_count)
        if catch_up_count <= SMALL_CATCH_UP:
            # How long it waits there depends on how many are there, as all of it does.
            taken_us = response.times.queue_us + response.times.compute_us
            opening.book.answer_us.add(opening.link.session_count, taken_us)
        opening.peer.breaker.answered()
        self._faults /= 2
        if response.cached_len == log_len or self._num_repairs >= MAX_DRIFT_REPAIRS:
            return proposal
        # After an answer a draft has cached all committed tokens; this one is made to compute them again.
        self._log_event("cache drift", cached_len=response.cached_len, committed_len=log_len)
        self._num_repairs += 1
        self._begin_rollback(base_len=1, asked_s=started_s)
        return replace(proposal, drift_repairs=1)

    def _tell(self, asked: GuessRequest) -> Proposal:
        """Sends the draft how the log goes on, if it may be asked, for branches that no round waits for.

        There is no proposal; its cost are the bytes since the one before.
        """
        peer = self._candidate()
        if peer is None or self._opening is None:
            return NOTHING
        try:
            opening = self._ask(peer, asked)
        except OutriderError as error:
            return self._drop(error)
        return Proposal(hop=HopCost(num_bytes=opening.take_bytes()))

    async def _exchange(
        self, peer: ServicePeer | None, asked: GuessRequest, until_s: float
    ) -> tuple[DraftOpening, pb.ProposeResponse]:
        """Makes one request of a candidate and takes its answer; a draft that lacks tokens gets them all, once."""
        for _ in range(2):
            if peer is None:
                raise PeerLost(f"{self._replicas} cannot be asked")
            opening = self._ask(peer, asked)
            response = await opening.answer(self._fence(), until_s)
            if response.WhichOneof("answer") == "proposal":
                return opening, response
            self._forget()
            peer = self._candidate()
        raise ProtocolViolation(f"{opening.peer} lacks tokens of a session that has just been opened")

    def _ask(self, peer: ServicePeer, asked: GuessRequest) -> DraftOpening:
        """Sends a request, on a new opening if there is none or the old one was on another stream."""
        self._last = peer
        link = peer.link()
        if self._opening is not None and self._opening.link is not link:
            self._forget()
        peer.breaker.enter(self._session_id)
        if self._opening is None:
            self._moves.end()
            self._opening = self._opened_on(peer)
            self._epoch = next(self._epochs)
            self._opening.book.opened(self._session_id, len(self._log), NO_PREFIX)
        self._opening.ask(self._fence(), asked)
        return self._opening

    def _opened_on(self, peer: ServicePeer) -> DraftOpening:
        opening = DraftOpening(peer, self._spec, self._log, self._session_id, self._seat)
        opening.on_branches = self.on_branches
        return opening

    def change_place(self, *, is_guessing: bool, is_ahead: bool = False) -> None:
        """Goes on with the draft to which the session moves, once that has read it; begins a move where one is due.

        Where the target is ahead of the round, the session stays until it is not.
        """
        opening, moves = self._opening, self._moves
        if moves.is_under_way:
            move = None if is_ahead or self._is_rolling_back else moves.arrived()
            if move is not None:
                self._forget()
                self._opening, self._epoch, self._last = move.opening, move.fence.epoch, move.opening.peer
        elif opening is not None:
            place = moves.due(opening.peer, len(self._log), is_guessing=is_guessing)
            if place is not None:
                peer, reason = place
                fence = self._fence()
                fence.epoch = next(self._epochs)
                timeout_s = self._draft_deadline.of(peer).seconds(fence.base_len)
                moves.begin(DraftMove(self._opened_on(peer), fence, reason, timeout_s, opening.book))

    def _begin_rollback(self, base_len: int, asked_s: float) -> None:
        """Takes the draft's session back in the background; until that is done it is not asked for anything."""
        self._epoch = next(self._epochs)
        rolling_back = self._roll_back(self._last, self._fence(base_len), asked_s)
        self._rollback = asyncio.create_task(rolling_back, name="draft rollback")

    async def _roll_back(self, peer: ServicePeer, fence: types_pb2.Fence, asked_s: float) -> None:
        try:
            response = await peer.rollback(fence, self._opening.cached_len if self._opening is not None else 0)
        except OutriderError as error:
            self._drop(error)
            return
        except Exception:
            # No other task waits for this one; what the draft has now is unknown.
            log.exception("rollback failed", service=str(peer))
            self._forget()
            return
        if self._opening is not None:
            self._opening.link.suspect(asked_s)
            # Length 0 says that the draft does not know the session: the next request opens it with all tokens.
            self._opening.known_len = min(self._opening.known_len, response.fence.base_len)
            self._opening.cached_len = response.cached_len
            if response.fence.base_len == 0:
                self._forget()

    def _drop(self, error: OutriderError) -> Proposal:
        """Gives the session up after a fault; returns the empty proposal that says why."""
        self._log_event("draft session lost", reason=str(error)[:MAX_REASON_LEN])
        link = self._opening.link if self._opening is not None else None
        self._forget()
        return self._fault(blame(self._last, link, self._session_id, error))

    def _candidate(self) -> ServicePeer | None:
        """The draft that has the session, or the one that would get it; None while none may be asked."""
        peer = self._kept()
        if peer not in self._replicas.peers and self._opening is not None and self._opening.link.end is not None:
            # It gets no new sessions, and this one would be opened there again.
            peer = None
        if peer is not None:
            return peer
        failed = self._last if self._faults >= 1 else None
        wish = wish_of(self._spec, len(self._log), self._replicas.output, self._prefix)
        return self._replicas.pick(self._session_id, None, failed, wish)

    def _kept(self) -> ServicePeer | None:
        """The draft that has the session, if it may be asked now."""
        peer = self._opening.peer if self._opening is not None else None
        return peer if peer is not None and self._may_ask(peer) else None

    def _may_ask(self, peer: ServicePeer) -> bool:
        return peer.info is not None and not peer.breaker.blocks(self._session_id)

    def _fault(self, reason: FallbackReason) -> Proposal:
        """The empty proposal of a fault, which is counted: from the second in a row on the draft rests, ever longer."""
        first, maximum = PAUSE_TOKENS
        pause = min(int(first * (2 ** min(self._faults, 8) - 1)), maximum)
        self._faults += 1
        self._resume_len, self._resting_for = len(self._log) + 1 + pause, reason
        return Proposal(fallback_reason=reason)

    def _log_event(self, event: str, **values: str | float) -> None:
        log.warning(event, service=str(self._last), session=session_prefix(self._session_id), **values)
        telemetry.event(event, service=self._last.address)


class AbsentDraftSession(nullcontext[None]):
    """The session of a gateway that has no draft service."""

    outlook = DraftOutlook(FallbackReason.DRAFT_ABSENT)

    async def propose(self, _asked: GuessRequest) -> Proposal:
        return NOTHING
