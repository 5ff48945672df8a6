"""The gateway's end of a draft session, whose faults cost no request anything.

A fault of the draft makes an empty proposal that says why, and never an error. Whatever goes wrong, the session starts
over with all tokens and a new epoch, later for every fault in a row. One opening is a stream within one epoch; its
answers are matched by (epoch, base_len), never by order.
"""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Self

import structlog

from gateway.rounds.planner import DraftOutlook
from gateway.rounds.round import NOTHING, FallbackReason, HopCost, Proposal, TokenLog
from gateway.sessions.link import Replicas, ServiceLink
from gateway.sessions.stream import MAX_DRIFT_REPAIRS, NEVER, Deadline, DraftDeadline, MessageStream, RemoteSession
from outrider.errors import InvalidRequest, NotReady, OutriderError, PeerLost, ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.process import telemetry
from outrider.process.telemetry import session_prefix
from outrider.rpc import messages
from outrider.rpc.messages import tree_from
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub

PAUSE_TOKENS = (8, 256)  # plain tokens after the second fault in a row, and the maximum after many

log = structlog.get_logger()


class DraftStream(MessageStream[pb.ProposeRequest, pb.ProposeResponse]):
    """Messages of one session to and from one incarnation of a draft. `fence` on each names the session and epoch."""

    def __init__(
        self, peer: ServiceLink, spec: SessionSpec, token_log: TokenLog, drafter: str, timeout_s: float | None
    ) -> None:
        """Begins the call, which ends after timeout_s unless that is None. Raises PeerLost when the draft is away."""
        info = peer.present()
        call = DraftServiceStub(peer.channel).Propose(timeout=timeout_s, metadata=telemetry.carrier())
        super().__init__(call, pb.ProposeRequest, peer, spec, token_log)
        self.instance_id = info.instance_id
        self.known_len = 0  # committed tokens that were sent
        self.cached_len = 0  # those that the draft has read, as it said last
        self._drafter = drafter
        self._vocabulary_size = info.vocabulary_size

    async def ask(self, fence: types_pb2.Fence, draft_count: int, timeout_s: float) -> None:
        """Opens the session, or tells the tokens that the draft does not know. Raises TimeoutError."""
        if self.known_len == 0:
            session = messages.open_message(self._spec, self._log.tokens())
            opening = pb.DraftOpen(session=session, draft_count=draft_count, drafter=self._drafter)
            request = pb.ProposeRequest(fence=fence, open=opening)
        else:
            advance = pb.DraftAdvance(token_ids=self._log.tokens(self.known_len), draft_count=draft_count)
            request = pb.ProposeRequest(fence=fence, advance=advance)
        self.known_len = len(self._log)
        await self.write(request, timeout_s)

    async def answer(self, fence: types_pb2.Fence, until_s: float) -> pb.ProposeResponse:
        """The answer to the last request, by the loop's clock; answers to earlier ones are dropped.

        Raises TimeoutError, PeerLost, ProtocolViolation, and what the draft says.
        """
        loop, asked = asyncio.get_running_loop(), (fence.epoch, fence.base_len)
        while True:
            response = await self.read(max(0.0, until_s - loop.time()))
            answered = (response.fence.epoch, response.fence.base_len)
            if answered == asked:
                self.cached_len = response.cached_len
                return response
            if answered > asked:
                raise ProtocolViolation(f"{self.peer} answered a message that was never sent")

    def proposal(self, response: pb.ProposeResponse, draft_count: int, caught_up_count: int, wait_us: int) -> Proposal:
        """The guesses of an answer; raises ProtocolViolation about what no draft may say."""
        rule, fault = self._spec.acceptance.rule, ""
        try:
            # Nobody reads log-probabilities that nobody asked for.
            wanted = self._spec.draft_logprobs
            tree = tree_from(response.proposal, self._vocabulary_size, draft_count, with_logprobs=wanted)
        except InvalidRequest as error:
            raise ProtocolViolation(f"{self.peer} sent a malformed proposal: {error.message}") from None
        # What the target would refuse, and so end a request that is not at fault. No token is looked at: what is
        # refused for its tokens biases the rules that test with uniforms.
        if tree and bool(tree.distributions) != rule.needs_distributions:
            fault = "with distributions" if tree.distributions else "without distributions"
        elif rule.needs_distributions and not tree.is_chain:
            fault = "as a tree that is no chain"
        if fault:
            raise ProtocolViolation(f"{self.peer} sent a proposal {fault}, which does not fit the rule {rule}")
        hop = HopCost(response.times.queue_us, wait_us, self.take_bytes())
        return Proposal(tree, compute_us=response.times.compute_us, caught_up_count=caught_up_count, hop=hop)

    def finish(self, fence: types_pb2.Fence) -> None:
        # The log may have grown past the draft's context, where it takes no messages.
        fence.base_len = max(self.known_len, 1)
        super().finish(fence)


class RemoteDraftSession(RemoteSession[DraftStream]):
    """A session on a draft service; opens with the context when `warm`, else with the first proposal wanted."""

    def __init__(
        self,
        replicas: Replicas,
        draft_deadline: DraftDeadline,
        spec: SessionSpec,
        token_log: TokenLog,
        session_id: bytes,
        warm: bool,
        drafter: str = "",
        deadline: Deadline = NEVER,
    ) -> None:
        super().__init__(replicas, spec, token_log, session_id, deadline)
        self._draft_deadline = draft_deadline
        self._warm = warm
        self._drafter = drafter
        self._last = replicas.links[0]  # the draft that was asked last
        self._faults = 0.0  # in a row; an answer halves them, because every fault may cost reading all tokens again
        self._resume_len = 0
        self._resting_for = FallbackReason.DRAFT_ABSENT
        self._rollback: asyncio.Task[None] | None = None

    @property
    def outlook(self) -> DraftOutlook:
        """What to expect of the draft now: why not to ask it, if there is a reason, and its limits."""
        info = (self._stream.peer.info if self._stream is not None else None) or self._replicas.info
        if info is None:
            return DraftOutlook(FallbackReason.DRAFT_ABSENT)
        obstacle = None
        if self._candidate() is None:
            late = isinstance(self._last.breaker.cause, TimeoutError)
            obstacle = FallbackReason.DRAFT_LATE if late else FallbackReason.DRAFT_LOST
        elif self._rollback is not None and not self._rollback.done():
            obstacle = FallbackReason.DRAFT_LATE
        elif len(self._log) < self._resume_len:
            obstacle = self._resting_for
        return DraftOutlook(obstacle, info.context_len, info.max_draft_count)

    async def __aenter__(self) -> Self:
        peer = self._candidate()
        if self._warm and peer is not None and peer.info is not None and not peer.breaker.is_open:
            try:
                if len(self._log) <= peer.info.context_len:
                    await self._ask(peer, 0, self._draft_deadline.max_s)
            except (TimeoutError, OutriderError) as error:
                await self._drop(error)
        return self

    async def __aexit__(self, *exit_: object) -> None:
        if self._rollback is not None:
            self._rollback.cancel()
        await super().__aexit__(*exit_)

    async def propose(self, draft_count: int) -> Proposal:
        """Asks for guesses behind the log; an empty proposal says what went wrong."""
        if draft_count == 0:
            return NOTHING
        clock_s = asyncio.get_running_loop().time
        catch_up_count = len(self._log) - (self._stream.cached_len if self._stream is not None else 0)
        timeout_s, started_s = self._draft_deadline.seconds(catch_up_count), clock_s()
        try:
            stream, response = await self._exchange(draft_count, started_s + timeout_s)
            wait_us = int(1e6 * (clock_s() - started_s))
            proposal = stream.proposal(response, draft_count, catch_up_count, wait_us)
        except TimeoutError as error:
            self._draft_deadline.missed()
            self._last.breaker.failed(self._session_id, error, timeout_s)
            self._log_event("draft late", timeout_s=round(timeout_s, 3), base_len=len(self._log))
            # This stops the draft's job, and the round goes on at once.
            self._begin_rollback(len(self._log))
            return self._fault(FallbackReason.DRAFT_LATE)
        except OutriderError as error:
            return await self._drop(error)
        self._draft_deadline.observe(wait_us / 1e6, catch_up_count)
        stream.peer.breaker.answered()
        self._faults /= 2
        if response.cached_len == len(self._log) or self._num_repairs >= MAX_DRIFT_REPAIRS:
            return proposal
        # After an answer a draft has cached all committed tokens; this one is made to compute them again.
        self._log_event("cache drift", cached_len=response.cached_len, committed_len=len(self._log))
        self._num_repairs += 1
        self._begin_rollback(base_len=1)
        return replace(proposal, drift_repairs=1)

    async def _exchange(self, draft_count: int, until_s: float) -> tuple[DraftStream, pb.ProposeResponse]:
        """One request and its answer; a draft that lacks tokens gets them all, once."""
        for _ in range(2):
            peer = self._candidate()
            if peer is None:
                raise PeerLost(f"{self._replicas} cannot be asked")
            stream = await self._ask(peer, draft_count, until_s - asyncio.get_running_loop().time())
            response = await stream.answer(self._fence(), until_s)
            if response.WhichOneof("answer") == "proposal":
                return stream, response
            await self._forget()
        raise ProtocolViolation(f"{peer} lacks tokens of a session that has just been opened")

    async def _ask(self, peer: ServiceLink, draft_count: int, timeout_s: float) -> DraftStream:
        """Sends a request, on a new stream if there is none or the old one leads to another incarnation."""
        self._last = peer
        stream = self._stream
        if stream is not None and (stream.peer, stream.instance_id) != (peer, peer.present().instance_id):
            await self._forget()
        peer.breaker.enter(self._session_id)
        if self._stream is None:
            self._stream = DraftStream(peer, self._spec, self._log, self._drafter, self._deadline.left_s())
            self._epoch += 1
        await self._stream.ask(self._fence(), draft_count, timeout_s)
        return self._stream

    def _begin_rollback(self, base_len: int) -> None:
        """Takes the draft's session back in the background; until that is done it is not asked for anything."""
        self._epoch += 1
        self._rollback = asyncio.create_task(self._roll_back(self._last, self._fence(base_len)), name="draft rollback")

    async def _roll_back(self, peer: ServiceLink, fence: types_pb2.Fence) -> None:
        try:
            response = await peer.rollback(fence, self._stream.cached_len if self._stream is not None else 0)
        except OutriderError as error:
            await self._drop(error)
            return
        if self._stream is not None:
            # Length 0 says that the draft does not know the session: the next request opens it with all tokens.
            self._stream.known_len = min(self._stream.known_len, response.fence.base_len)
            self._stream.cached_len = response.cached_len
            if response.fence.base_len == 0:
                await self._forget()

    async def _drop(self, error: OutriderError | TimeoutError) -> Proposal:
        """Gives the session up after a fault; returns the empty proposal that says why."""
        self._log_event("draft session lost", reason=str(error) or "no answer")
        await self._forget()
        if not isinstance(error, PeerLost | NotReady | TimeoutError) or self._deadline.has_come:
            self._last.breaker.left(self._session_id)
            return self._fault(FallbackReason.DRAFT_REFUSED)
        self._last.breaker.failed(self._session_id, error)
        self._last.report_lost()
        return self._fault(FallbackReason.DRAFT_LOST)

    def _candidate(self) -> ServiceLink | None:
        """The draft that has the session, or the one that would get it; None while none may be asked."""
        peer = self._stream.peer if self._stream is not None else None
        if peer is not None and peer.info is not None and not peer.breaker.blocks(self._session_id):
            return peer
        return self._replicas.pick(self._session_id)

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

    async def propose(self, _draft_count: int) -> Proposal:
        return NOTHING
