"""One opening of a target session: a stream on one target, within one epoch. Decides nothing about faults.

Answers are matched by (epoch, base_len), never by order: one to a later length that overtook is kept, and one that
cannot be about anything that was asked does not exist.
"""

import asyncio

import structlog

from gateway.links import ServiceLink
from gateway.rounds import Proposal, TokenLog, Verdict
from gateway.streams import MessageStream
from outrider import wire
from outrider.errors import ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.process import tracing
from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.target_service_pb2_grpc import TargetServiceStub
from outrider.wire_acceptance import logprobs_from
from outrider.wire_proposal import tree_message

CLOSE_TIMEOUT_S = 2.0

log = structlog.get_logger()


class TargetStream:
    """Messages of one session to and from one target."""

    def __init__(
        self,
        peer: ServiceLink,
        spec: SessionSpec,
        token_log: TokenLog,
        fence: types_pb2.Fence,
        timeout_s: float | None,
        write_timeout_s: float,
    ) -> None:
        """Begins the call, which ends after timeout_s unless that is None. Raises PeerLost when the target is away.

        `fence` names the session and its epoch on this stream; a message may take write_timeout_s to leave.
        """
        self.peer = peer
        self.is_opening = True
        """Whether the open has no answer yet."""
        self._spec = spec
        self._log = token_log
        self._session_id, self._epoch = fence.session_id, fence.epoch
        self._write_timeout_s = write_timeout_s
        self._window = peer.present().unacknowledged_window
        self._limit = 0  # committed length up to which the target may go on its own
        self._early: dict[int, pb.VerifyResponse] = {}
        self._messages: MessageStream[pb.VerifyRequest, pb.VerifyResponse] = MessageStream(
            TargetServiceStub(peer.channel).Verify(timeout=timeout_s, metadata=tracing.carrier()), str(peer)
        )

    @property
    def outstanding(self) -> int:
        """Tokens that the target may still commit unasked."""
        finished = self._log.finish_reason is not None
        return 0 if finished else max(0, min(self._limit, self._spec.max_len) - len(self._log))

    async def ask(self, proposal: Proposal, plain_budget: int) -> None:
        """Opens, steps, or lets the target go on alone, whichever the round needs. Raises TimeoutError."""
        budget = self._within_window(plain_budget)
        if self.is_opening or not self.outstanding:
            await self.ask_again(proposal, plain_budget)
        elif budget and 2 * self.outstanding <= budget:
            await self._send(pb.VerifyRequest(acknowledge=pb.Acknowledge(plain_budget=budget)), budget)

    async def ask_again(self, proposal: Proposal, plain_budget: int) -> None:
        """Opens, or asks for the verdict on the log's length, which a target that has given it gives once more."""
        budget = self._within_window(plain_budget)
        step = pb.TargetStep(proposal=tree_message(proposal), plain_budget=budget)
        if self.is_opening:
            session = wire.open_message(self._spec, self._log.tokens())
            await self._send(pb.VerifyRequest(open=pb.TargetOpen(session=session, step=step)), budget)
        else:
            await self._send(pb.VerifyRequest(step=step), budget)

    async def receive(self, timeout_s: float) -> pb.VerifyResponse:
        """The answer on the log's length. Raises TimeoutError, PeerLost, and what the target says."""
        loop = asyncio.get_running_loop()
        base_len, until_s = len(self._log), loop.time() + timeout_s
        while base_len not in self._early:
            response = await self._messages.read(max(0.0, until_s - loop.time()))
            fence = response.fence
            if fence.epoch == self._epoch and base_len <= fence.base_len < max(self._limit, base_len + 1):
                self._early[fence.base_len] = response
            elif (fence.epoch, fence.base_len) > (self._epoch, base_len):
                log.warning("answer to nothing", service=str(self.peer), base_len=fence.base_len, log_len=base_len)
        self.is_opening = False
        answer = self._early.pop(base_len)
        # What is left of repetitions must not pile up.
        self._early = {early: response for early, response in self._early.items() if early > base_len}
        return answer

    def take_bytes(self) -> int:
        """Bytes of the messages, both ways, since the last call."""
        return self._messages.take_bytes()

    async def drop(self) -> None:
        """Ends the call without a word; the target keeps the session on a lease."""
        await self._messages.close(None, CLOSE_TIMEOUT_S)

    def finish(self, fence: types_pb2.Fence) -> None:
        """Ends the session and the call, in the background; the fence has the session's newest epoch."""
        close = pb.VerifyRequest(fence=fence, close=types_pb2.CloseSession())
        self.peer.finish(self._messages.close(close, CLOSE_TIMEOUT_S))

    async def _send(self, request: pb.VerifyRequest, plain_budget: int) -> None:
        """Sends a message on the log's length, and notes how far it lets the target go."""
        request.fence.CopyFrom(self._fence())
        self._limit = len(self._log) + 1 + plain_budget
        await self._messages.write(request, self._write_timeout_s)

    def _within_window(self, plain_budget: int) -> int:
        return min(plain_budget, max(0, self._window - 1))

    def _fence(self) -> types_pb2.Fence:
        return types_pb2.Fence(session_id=self._session_id, epoch=self._epoch, base_len=len(self._log))


def read_verdict(response: pb.VerifyResponse, spec: SessionSpec) -> Verdict:
    """The verdict of an answer. Raises ProtocolViolation when it lacks log-probabilities that the session asked for."""
    verdict = response.verdict
    if spec.logprob_count is not None and not verdict.logprobs:
        raise ProtocolViolation("a verdict came without the log-probabilities that the session asked for")
    return Verdict(
        base_len=response.fence.base_len,
        accepted_rows=tuple(verdict.accepted_rows),
        next_token_id=verdict.next_token_id if verdict.HasField("next_token_id") else None,
        finish_reason=wire.finish_reason(verdict.finish_reason),
        evaluated_count=verdict.evaluated_count,
        compute_us=response.times.compute_us,
        numerics_id=response.numerics_id,
        logprobs=logprobs_from(verdict.logprobs),
        prompt_logprobs=logprobs_from(verdict.prompt_logprobs),
        prefix_len=verdict.prefix_len,
    )
