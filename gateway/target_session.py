"""The gateway's end of a target session: speculation's TargetSession over a stream of messages.

Every answer has a deadline of the application's own, because a frozen service still answers the transport's pings.
Losing the target is an error of the request; only a target that asks for tokens is sent them again, a few times.
"""

from types import TracebackType
from typing import Self

from gateway.links import ServiceLink
from gateway.rounds import Proposal, TokenLog, Verdict
from gateway.streams import MessageStream
from outrider import wire
from outrider.errors import PeerLost, ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.target_service_pb2_grpc import TargetServiceStub

CLOSE_TIMEOUT_S = 2.0
PROMPT_TOKEN_S = 0.1  # allowance for reading a token of a prompt that is not cached
MAX_REOPENS = 3


class RemoteTargetSession:
    """A session on the target service; opens with the first verify and closes with the context."""

    def __init__(
        self, link: ServiceLink, spec: SessionSpec, log: TokenLog, session_id: bytes, answer_timeout_s: float
    ) -> None:
        self._link = link
        self._spec = spec
        self._log = log
        self._session_id = session_id
        self._answer_timeout_s = answer_timeout_s
        self._window = link.present().unacknowledged_window
        self._stream: MessageStream[pb.VerifyRequest, pb.VerifyResponse] | None = None
        self._epoch = 0
        self._limit = 0  # committed length up to which the target may go on its own

    @property
    def outstanding(self) -> int:
        """Tokens that the target may still commit unasked."""
        finished = self._log.finish_reason is not None
        return 0 if finished else max(0, min(self._limit, self._spec.max_len) - len(self._log))

    async def __aenter__(self) -> Self:
        """Raises PeerLost at once while the target hangs, as other requests have found out."""
        breaker = self._link.breaker
        if breaker.blocks(self._session_id):
            raise PeerLost(f"{self._link} does not answer requests", address=self._link.address)
        breaker.enter(self._session_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.breaker.left(self._session_id)
        if self._stream is not None:
            close = pb.VerifyRequest(fence=self._fence(), close=types_pb2.CloseSession())
            self._link.finish(self._stream.close(close, CLOSE_TIMEOUT_S))

    async def verify(self, proposal: Proposal, plain_budget: int) -> Verdict:
        """Returns the verdict on the log's length; raises PeerLost, CacheFull, ProtocolViolation."""
        plain_budget = min(plain_budget, max(0, self._window - 1))
        for _ in range(MAX_REOPENS + 1):
            opening = self._stream is None
            await self._ask(proposal, plain_budget)
            response = await self._answer(len(self._log) * PROMPT_TOKEN_S if opening else 0.0)
            if response.WhichOneof("answer") == "verdict":
                self._link.breaker.answered()
                return _verdict(response)
            await self._forget()
        raise PeerLost(f"{self._link} lost the session {MAX_REOPENS + 1} times in one round")

    async def _ask(self, proposal: Proposal, plain_budget: int) -> None:
        """Opens, steps, or lets the target go on alone, whichever the round needs."""
        if self._stream is not None and self.outstanding:
            if plain_budget and 2 * self.outstanding <= plain_budget:
                await self._send(pb.VerifyRequest(acknowledge=pb.Acknowledge(plain_budget=plain_budget)), plain_budget)
            return
        step = pb.TargetStep(proposal=wire.tree_message(proposal), plain_budget=plain_budget)
        if self._stream is not None:
            await self._send(pb.VerifyRequest(step=step), plain_budget)
            return
        self._epoch += 1
        self._stream = MessageStream(TargetServiceStub(self._link.channel).Verify(), str(self._link))
        session = wire.open_message(self._spec, self._log.tokens())
        await self._send(pb.VerifyRequest(open=pb.TargetOpen(session=session, step=step)), plain_budget)

    async def _send(self, request: pb.VerifyRequest, plain_budget: int) -> None:
        """Sends a message on the log's length, and notes how far it lets the target go."""
        request.fence.CopyFrom(self._fence())
        self._limit = len(self._log) + 1 + plain_budget
        if self._stream is not None:
            try:
                await self._stream.write(request, self._answer_timeout_s)
            except TimeoutError:
                raise self._hangs(f"took no message for {self._answer_timeout_s:g} seconds") from None

    async def _forget(self) -> None:
        """Ends the stream of a session that the target no longer knows; the next round opens it again."""
        if self._stream is not None:
            await self._stream.close(None, CLOSE_TIMEOUT_S)
        self._stream, self._limit = None, 0

    async def _answer(self, allowance_s: float) -> pb.VerifyResponse:
        """The answer on the log's length; what is older, or repeated, is dropped."""
        if self._stream is None:
            raise ProtocolViolation("the target session is not open")
        timeout_s = self._answer_timeout_s + allowance_s
        while True:
            try:
                response = await self._stream.read(timeout_s)
            except TimeoutError:
                raise self._hangs(f"gave no answer for {timeout_s:g} seconds") from None
            fence = response.fence
            if (fence.epoch, fence.base_len) == (self._epoch, len(self._log)):
                return response
            if fence.epoch > self._epoch or (fence.epoch == self._epoch and fence.base_len > len(self._log)):
                raise ProtocolViolation(
                    f"{self._link} answered epoch {fence.epoch}, length {fence.base_len}, but the session is at "
                    f"epoch {self._epoch}, length {len(self._log)}"
                )

    def _hangs(self, what: str) -> PeerLost:
        """The error for this request; the breaker spares the next ones from waiting as long."""
        error = PeerLost(f"{self._link} {what}")
        self._link.breaker.failed(self._session_id, error)
        return error

    def _fence(self) -> types_pb2.Fence:
        return types_pb2.Fence(session_id=self._session_id, epoch=self._epoch, base_len=len(self._log))


def _verdict(response: pb.VerifyResponse) -> Verdict:
    verdict = response.verdict
    return Verdict(
        base_len=response.fence.base_len,
        accepted_rows=tuple(verdict.accepted_rows),
        next_token_id=verdict.next_token_id if verdict.HasField("next_token_id") else None,
        finish_reason=wire.finish_reason(verdict.finish_reason),
        evaluated_count=verdict.evaluated_count,
        compute_us=response.times.compute_us,
        numerics_id=response.numerics_id,
    )
