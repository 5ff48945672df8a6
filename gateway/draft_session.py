"""The gateway's end of a draft session: speculation's DraftSession over a stream of messages.

No fault of the draft leaves this file as an error: the round goes on without a proposal and says why. Whatever goes
wrong, the session starts over with all tokens and a new epoch, later for every fault in a row.
"""

import asyncio
from dataclasses import replace
from types import TracebackType
from typing import Self

import structlog

from gateway.deadline import DraftDeadline
from gateway.links import ModelInfo, ServiceLink
from gateway.replicas import Replicas
from gateway.rounds import NOTHING, FallbackReason, Proposal, TokenLog, Way
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
MAX_DRIFT_REPAIRS = 3  # of one session: a service that goes on drifting only miscounts

log = structlog.get_logger()


class RemoteDraftSession:
    """A session on the draft service; opens with the context when `warm`, else with the first proposal wanted."""

    def __init__(
        self,
        replicas: Replicas,
        deadline: DraftDeadline,
        spec: SessionSpec,
        token_log: TokenLog,
        session_id: bytes,
        warm: bool,
        drafter: str = "",
        expires_s: float | None = None,
    ) -> None:
        """`expires_s` is the end of the client's patience on the running loop's clock; None for no end."""
        self._replicas = replicas
        self._link = replicas.links[0]  # the one that has the session, or had it last
        self._deadline = deadline
        self._spec = spec
        self._log = token_log
        self._session_id = session_id
        self._warm = warm
        self._drafter = drafter
        self._expires_s = expires_s
        self._stream: MessageStream[pb.ProposeRequest, pb.ProposeResponse] | None = None
        self._epoch = 0
        self._instance_id = 0
        self._known_len = 0  # committed tokens that were sent
        self._cached_len = 0  # committed tokens that the draft has read, as it said last
        self._faults = 0.0  # in a row; an answer halves them, because every fault may cost reading all tokens again
        self._resume_len = 0
        self._resting_for = FallbackReason.DRAFT_ABSENT
        self._rollback: asyncio.Task[None] | None = None
        self._num_repairs = 0

    @property
    def obstacle(self) -> FallbackReason | None:
        """Why it is no use to ask now: nobody there, open breaker, a rollback under way, or a rest after faults."""
        if self._replicas.info is None:
            return FallbackReason.DRAFT_ABSENT
        if self._candidate() is None:
            late = isinstance(self._link.breaker.cause, TimeoutError)
            return FallbackReason.DRAFT_LATE if late else FallbackReason.DRAFT_LOST
        if self._rollback is not None and not self._rollback.done():
            return FallbackReason.DRAFT_LATE
        return self._resting_for if len(self._log) < self._resume_len else None

    @property
    def context_len(self) -> int | None:
        """Longest sequence that the draft can read; None while it is away."""
        info = self._info()
        return info.context_len if info else None

    @property
    def max_draft_count(self) -> int | None:
        """Most draft tokens in a proposal; None while the draft is away."""
        info = self._info()
        return info.max_draft_count if info else None

    async def __aenter__(self) -> Self:
        link = self._candidate()
        fits = link is not None and link.info is not None and len(self._log) <= link.info.context_len
        if self._warm and link is not None and fits and not link.breaker.is_open:
            try:
                await self._ask(0, self._deadline.most_s)
            except (TimeoutError, OutriderError) as error:
                await self._drop(error)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._replicas.links:
            link.breaker.left(self._session_id)
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
        clock_s = asyncio.get_running_loop().time
        catch_up_count, started_s = len(self._log) - self._cached_len, clock_s()
        timeout_s = self._deadline.seconds(catch_up_count)
        try:
            response = await self._exchange(draft_count, started_s + timeout_s)
            proposal = self._checked(response, draft_count, catch_up_count, clock_s() - started_s)
        except TimeoutError as error:
            self._deadline.missed()
            self._link.breaker.failed(self._session_id, error, timeout_s)
            return self._late(timeout_s)
        except OutriderError as error:
            return await self._drop(error)
        self._deadline.observe(clock_s() - started_s, catch_up_count)
        self._link.breaker.answered()
        self._faults /= 2
        return self._repaired(proposal, response.cached_len)

    async def _exchange(self, draft_count: int, until_s: float) -> pb.ProposeResponse:
        """One request and its answer; a draft that lacks tokens gets them all, once."""
        for _ in range(2):
            await self._ask(draft_count, until_s - asyncio.get_running_loop().time())
            response = await self._answer(until_s)
            if response.WhichOneof("answer") == "proposal":
                self._cached_len = response.cached_len
                return response
            await self._forget()
        raise ProtocolViolation(f"{self._link} lacks tokens of a session that has just been opened")

    async def _ask(self, draft_count: int, timeout_s: float) -> None:
        link = self._candidate() or self._link
        instance_id = link.present().instance_id
        if instance_id != self._instance_id:
            # Another replica or incarnation knows nothing of this session, and the stream to the old one is of no use.
            await self._forget()
        self._link, self._instance_id = link, instance_id
        link.breaker.enter(self._session_id)
        if self._stream is None:
            self._epoch += 1
            self._cached_len = 0
            left_s = None if self._expires_s is None else self._expires_s - asyncio.get_running_loop().time()
            self._stream = MessageStream(DraftServiceStub(link.channel).Propose(timeout=left_s), str(link))
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
            response = await self._stream.read(max(0.0, until_s - asyncio.get_running_loop().time()))
            fence = response.fence
            if (fence.epoch, fence.base_len) == (self._epoch, len(self._log)):
                return response
            if (fence.epoch, fence.base_len) > (self._epoch, len(self._log)):
                raise ProtocolViolation(f"{self._link} answered a message that was never sent")

    def _checked(
        self, response: pb.ProposeResponse, draft_count: int, catch_up_count: int, answer_s: float
    ) -> Proposal:
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
        num_bytes = self._stream.take_bytes() if self._stream is not None else 0
        way = Way(response.times.queue_us, int(1e6 * answer_s), num_bytes)
        return Proposal(token_ids, parents, None, response.times.compute_us, catch_up_count, way)

    def _repaired(self, proposal: Proposal, cached_len: int) -> Proposal:
        """After an answer a draft has cached all committed tokens; one that has not is made to compute them again."""
        if cached_len == len(self._log) or self._num_repairs >= MAX_DRIFT_REPAIRS:
            return proposal
        log.warning("cache drift", service=str(self._link), cached_len=cached_len, committed_len=len(self._log))
        self._num_repairs += 1
        self._begin_rollback(base_len=1)
        return replace(proposal, drift_repairs=1)

    def _late(self, timeout_s: float) -> Proposal:
        """Starts a rollback, which stops the draft's job, and lets the round go on at once."""
        log.warning("draft late", service=str(self._link), timeout_s=round(timeout_s, 3), base_len=len(self._log))
        self._begin_rollback(len(self._log))
        return self._fault(FallbackReason.DRAFT_LATE)

    def _begin_rollback(self, base_len: int) -> None:
        """Takes the draft's session back in the background; until that is done it is not asked for anything."""
        self._epoch += 1
        request = model_service_pb2.RollbackRequest(fence=self._fence(base_len))
        self._rollback = asyncio.create_task(self._roll_back(request), name="draft rollback")

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

    def _candidate(self) -> ServiceLink | None:
        """The draft that has the session, or the one that would get it; None while none may be asked."""
        stays = self._stream is not None and self._link.info is not None
        if stays and not self._link.breaker.blocks(self._session_id):
            return self._link
        return self._replicas.pick(self._session_id)

    def _info(self) -> ModelInfo | None:
        return self._link.info if self._stream is not None and self._link.info else self._replicas.info

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
