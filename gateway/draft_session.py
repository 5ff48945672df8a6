"""The gateway's end of a draft session: speculation's DraftSession over a stream of messages.

No fault of the draft leaves this file as an error: the round goes on without a proposal and says why. Whatever goes
wrong, the session starts over with all tokens and a new epoch, later for every fault in a row.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

import structlog

from gateway.deadline import DraftDeadline
from gateway.links import ServiceLink
from gateway.rounds import NOTHING, FallbackReason, Proposal, TokenLog
from gateway.streams import MessageStream
from outrider import wire
from outrider.errors import CacheFull, InvalidRequest, OutriderError, ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import model_service_pb2, types_pb2
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub

CLOSE_TIMEOUT_S = 2.0
ROLLBACK_TIMEOUT_S = 5.0
PAUSE_TOKENS = (8, 256)  # plain tokens after the second fault in a row, and the most after many

log = structlog.get_logger()


class RemoteDraftSession:
    """A session on the draft service; opens with the context when `warm`, else with the first proposal wanted."""

    def __init__(
        self,
        link: ServiceLink,
        deadline: DraftDeadline,
        spec: SessionSpec,
        token_log: TokenLog,
        session_id: bytes,
        warm: bool,
        drafter: str = "",
    ) -> None:
        self._link = link
        self._deadline = deadline
        self._spec = spec
        self._log = token_log
        self._session_id = session_id
        self._warm = warm
        self._drafter = drafter
        self._stream: MessageStream[pb.ProposeRequest, pb.ProposeResponse] | None = None
        self._epoch = 0
        self._instance_id = 0
        self._known_len = 0  # committed tokens that were sent
        self._cached_len = 0  # committed tokens that the draft has read, as it said last
        self._faults = 0.0  # in a row; an answer halves them, because every fault may cost reading all tokens again
        self._resume_len = 0
        self._resting_for = FallbackReason.DRAFT_ABSENT
        self._rollback: asyncio.Task[None] | None = None

    @property
    def obstacle(self) -> FallbackReason | None:
        """Why it is no use to ask now: nobody there, open breaker, a rollback under way, or a rest after faults."""
        if self._link.info is None:
            return FallbackReason.DRAFT_ABSENT
        breaker = self._link.breaker
        if breaker.blocks(self._session_id):
            late = isinstance(breaker.cause, TimeoutError)
            return FallbackReason.DRAFT_LATE if late else FallbackReason.DRAFT_LOST
        if self._rollback is not None and not self._rollback.done():
            return FallbackReason.DRAFT_LATE
        return self._resting_for if len(self._log) < self._resume_len else None

    @property
    def context_len(self) -> int | None:
        """Longest sequence that the draft can read; None while it is away."""
        return self._link.info.context_len if self._link.info else None

    @property
    def max_draft_count(self) -> int | None:
        """Most draft tokens in a proposal; None while the draft is away."""
        return self._link.info.max_draft_count if self._link.info else None

    async def __aenter__(self) -> Self:
        info, breaker = self._link.info, self._link.breaker
        if self._warm and info is not None and not breaker.is_open and len(self._log) <= info.context_len:
            try:
                await self._ask(0, self._deadline.most_s)
            except (TimeoutError, OutriderError) as error:
                await self._drop(error)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.breaker.left(self._session_id)
        if self._rollback is not None:
            self._rollback.cancel()
        if self._stream is not None:
            # The log may have grown past the draft's context, where it takes no messages.
            close = pb.ProposeRequest(fence=self._fence(self._known_len), close=types_pb2.CloseSession())
            self._link.finish(self._stream.close(close, CLOSE_TIMEOUT_S))

    async def propose(self, draft_count: int) -> Proposal:
        """Asks for guesses behind the log; an empty proposal says what went wrong."""
        if draft_count == 0:
            return NOTHING
        catch_up_count = len(self._log) - self._cached_len
        timeout_s = self._deadline.seconds(catch_up_count)
        started_s = time.monotonic()
        self._link.breaker.enter(self._session_id)
        try:
            proposal = await self._exchange(draft_count, catch_up_count, started_s + timeout_s)
        except TimeoutError as error:
            self._deadline.missed()
            self._link.breaker.failed(self._session_id, error, timeout_s)
            return self._late(timeout_s)
        except OutriderError as error:
            return await self._drop(error)
        self._deadline.observe(time.monotonic() - started_s, catch_up_count)
        self._link.breaker.answered()
        self._faults /= 2
        return proposal

    async def _exchange(self, draft_count: int, catch_up_count: int, until_s: float) -> Proposal:
        """One request and its answer; a draft that lacks tokens gets them all, once."""
        for _ in range(2):
            await self._ask(draft_count, until_s - time.monotonic())
            response = await self._answer(until_s)
            if response.WhichOneof("answer") == "proposal":
                self._cached_len = response.cached_len
                return self._checked(response, draft_count, catch_up_count)
            await self._forget()
        raise ProtocolViolation(f"{self._link} lacks tokens of a session that has just been opened")

    async def _ask(self, draft_count: int, timeout_s: float) -> None:
        instance_id = self._link.present().instance_id
        if instance_id != self._instance_id:
            # Another incarnation of the service knows nothing of this session, and its old stream is dead.
            await self._forget()
        self._instance_id = instance_id
        if self._stream is None:
            self._epoch += 1
            self._cached_len = 0
            self._stream = MessageStream(DraftServiceStub(self._link.channel).Propose(), str(self._link))
            session = wire.open_message(self._spec, self._log.tokens())
            opening = pb.DraftOpen(session=session, draft_count=draft_count, drafter=self._drafter)
            request = pb.ProposeRequest(open=opening)
        else:
            token_ids = self._log.tokens(self._known_len)
            request = pb.ProposeRequest(advance=pb.DraftAdvance(token_ids=token_ids, draft_count=draft_count))
        request.fence.CopyFrom(self._fence())
        self._known_len = len(self._log)
        await self._stream.write(request, timeout_s)

    async def _answer(self, until_s: float) -> pb.ProposeResponse:
        """The answer to the last request; answers to earlier ones are dropped."""
        if self._stream is None:
            raise ProtocolViolation("the draft session is not open")
        while True:
            response = await self._stream.read(max(0.0, until_s - time.monotonic()))
            fence = response.fence
            if (fence.epoch, fence.base_len) == (self._epoch, len(self._log)):
                return response
            if (fence.epoch, fence.base_len) > (self._epoch, len(self._log)):
                raise ProtocolViolation(f"{self._link} answered a message that was never sent")

    def _checked(self, response: pb.ProposeResponse, draft_count: int, catch_up_count: int) -> Proposal:
        """The proposal, or ProtocolViolation: what the target must never see is stopped here."""
        tree = response.proposal
        token_ids, parents = tuple(tree.token_ids), tuple(tree.parents)
        in_order = all(0 <= parent <= row for row, parent in enumerate(parents))
        if len(token_ids) > draft_count or len(parents) not in {0, len(token_ids)} or not in_order:
            raise ProtocolViolation(f"{self._link} sent a malformed proposal")
        if any(not 0 <= token_id < self._link.present().vocabulary_size for token_id in token_ids):
            raise ProtocolViolation(f"{self._link} proposed a token outside the vocabulary")
        if tree.distributions:
            raise ProtocolViolation(f"{self._link} sent distributions, which match does not use")
        return Proposal(token_ids, parents, None, response.times.compute_us, catch_up_count)

    def _late(self, timeout_s: float) -> Proposal:
        """Starts a rollback, which stops the draft's job, and lets the round go on at once."""
        log.warning("draft late", service=str(self._link), timeout_s=round(timeout_s, 3), base_len=len(self._log))
        self._epoch += 1
        request = model_service_pb2.RollbackRequest(fence=self._fence())
        self._rollback = asyncio.create_task(self._roll_back(request), name="draft rollback")
        return self._fault(FallbackReason.DRAFT_LATE)

    async def _roll_back(self, request: model_service_pb2.RollbackRequest) -> None:
        try:
            response = await self._link.rollback(request, ROLLBACK_TIMEOUT_S)
            self._known_len = min(self._known_len, response.fence.base_len)
            self._cached_len = response.cached_len
            if response.fence.base_len == 0:
                # The draft does not know the session: an open brings all tokens.
                await self._forget()
        except OutriderError as error:
            await self._drop(error)

    async def _drop(self, error: OutriderError | TimeoutError) -> Proposal:
        """Gives the session up after a fault; it is opened again when the draft may be asked again."""
        log.warning("draft session lost", service=str(self._link), reason=str(error) or "no answer")
        await self._forget()
        if isinstance(error, CacheFull | InvalidRequest | ProtocolViolation):
            self._link.breaker.left(self._session_id)
            return self._fault(FallbackReason.DRAFT_REFUSED)
        self._link.breaker.failed(self._session_id, error)
        self._link.report_lost()
        return self._fault(FallbackReason.DRAFT_LOST)

    async def _forget(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close(None, CLOSE_TIMEOUT_S)

    def _fault(self, reason: FallbackReason) -> Proposal:
        """Counts a fault; from the second in a row on, the draft rests for a growing number of tokens."""
        first, most = PAUSE_TOKENS
        pause = min(int(first * (2 ** min(self._faults, 8) - 1)), most)
        self._faults += 1
        self._resume_len, self._resting_for = len(self._log) + 1 + pause, reason
        return Proposal(fallback_reason=reason)

    def _fence(self, base_len: int | None = None) -> types_pb2.Fence:
        base_len = len(self._log) if base_len is None else base_len
        return types_pb2.Fence(session_id=self._session_id, epoch=self._epoch, base_len=base_len)


class AbsentDraftSession:
    """The session of a gateway that has no draft service."""

    obstacle = FallbackReason.DRAFT_ABSENT
    context_len = None
    max_draft_count = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def propose(self, draft_count: int) -> Proposal:
        """Has nothing to say."""
        return NOTHING
