"""TargetService: translates between messages and the target's sessions. Decides nothing, and touches no device."""

from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from outrider import tracing
from outrider.engine.worker import DeviceWorker
from outrider.errors import InvalidRequest, PromptTooLong, check_range
from outrider.model_service.servicer import MAX_DRAFT_COUNT, ServiceFacts
from outrider.model_service.session_stream import Arrival, SessionServicer, unobserved
from outrider.parameters import SessionSpec
from outrider.rpc import channels, messages
from outrider.rpc.fencing import ComputeTimes, Fence
from outrider.rpc.messages import distributions_from, logprob_message, logprob_size, tree_from
from outrider.token_tree import TokenTree
from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.target_service_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from target_service.acceptance import Verdict
from target_service.sessions import Answer, Step, TargetSessions
from target_service.verifier import VerifyTask

MAX_PLAIN_BUDGET = 4096
# Of a verdict without the prompt's log-probabilities: those of its own tokens, at most 33, and far less for the rest.
OTHER_VERDICT_BYTES = 64 << 10


class TargetMessages:
    """What the messages of TargetService say; see outrider.model_service.session_stream.Messages."""

    def __init__(self, facts: ServiceFacts, sessions: TargetSessions) -> None:
        self._facts = facts
        self._sessions = sessions

    def job(self, action: str, request: pb.VerifyRequest, arrival: Arrival[Answer]) -> Callable[[], None]:
        """Opens a session, verifies a proposal or acknowledges; raises InvalidRequest, Unsupported, PromptTooLong."""
        fence, owner, reply = arrival.fence, arrival.owner, arrival.reply
        if action == "open":
            spec = messages.spec_from(request.open.session, fence.base_len, self._facts.vocabulary_size)
            check_range("session.max_len", spec.max_len, 1, self._facts.context_len)
            self._check_size(spec.max_len)
            self._check_prompt(spec)
            step = self._step(request.open.step, arrival.arrived_ns)
            return partial(self._sessions.open, fence, spec, step, owner, reply)
        if action == "step":
            step = self._step(request.step, arrival.arrived_ns)
            return partial(self._sessions.step, fence, step, owner, reply)
        budget = check_range("acknowledge.plain_budget", request.acknowledge.plain_budget, 0, MAX_PLAIN_BUDGET)
        return partial(self._sessions.acknowledge, fence, budget, owner, arrival.arrived_ns)

    def response(self, answer: Answer) -> pb.VerifyResponse:
        """The message for an answer."""
        wanted = types_pb2.TokensWanted(known_len=answer.known_len) if answer.verdict is None else None
        return pb.VerifyResponse(
            fence=messages.fence_message(answer.fence, self._facts.instance_id),
            verdict=None if answer.verdict is None else _verdict_message(answer.verdict),
            tokens_wanted=wanted,
            cached_len=answer.cached_len,
            numerics_id=self._facts.numerics_id,
            times=messages.times_message(answer.times),
        )

    def pong(self, fence: Fence) -> pb.VerifyResponse:
        """The answer to a ping."""
        return pb.VerifyResponse(fence=messages.fence_message(fence, self._facts.instance_id), pong=types_pb2.Pong())

    def _check_size(self, max_len: int) -> None:
        """A request that fills the cache on its own could never end; raises PromptTooLong."""
        kv_tokens = self._facts.block_size * self._facts.block_count
        if max_len > kv_tokens:
            message = f"a request of up to {max_len} tokens does not fit into the key-value cache of {kv_tokens} tokens"
            raise PromptTooLong(message, max_len=max_len, kv_tokens=kv_tokens)

    def _check_prompt(self, spec: SessionSpec) -> None:
        """The log-probabilities of a prompt travel in one message; raises InvalidRequest about one too long for it."""
        if spec.prompt_logprobs:
            room = channels.MAX_MESSAGE_BYTES - OTHER_VERDICT_BYTES
            maximum = room // logprob_size(spec.logprob_count or 0, self._facts.vocabulary_size) + 1
            if spec.prompt_len > maximum:
                limit = f"at most {maximum} under prompt_logprobs with logprob_count {spec.logprob_count}"
                raise InvalidRequest("session.prompt_len", spec.prompt_len, limit)

    def _step(self, message: pb.TargetStep, arrived_ns: int) -> Step:
        token_ids, parents = tree_from(message.proposal, self._facts.vocabulary_size, MAX_DRAFT_COUNT)
        budget = check_range("step.plain_budget", message.plain_budget, 0, MAX_PLAIN_BUDGET)
        distributions = distributions_from(message.proposal, self._facts.vocabulary_size)
        return Step(TokenTree(token_ids, parents, distributions), budget, arrived_ns)


class TargetServicer(TargetServiceServicer):
    """Serves TargetService over the sessions of one model."""

    def __init__(
        self,
        facts: ServiceFacts,
        sessions: TargetSessions,
        worker: DeviceWorker[VerifyTask],
        observe: Callable[[ComputeTimes], None],
    ) -> None:
        messages = TargetMessages(facts, sessions)
        self._streams = SessionServicer(messages, facts.context_len, sessions.table, worker, observe)

    async def Verify(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[pb.VerifyRequest],
        context: grpc.aio.ServicerContext[pb.VerifyRequest, pb.VerifyResponse],
    ) -> None:
        """Carries one session; see the protocol."""
        parent = tracing.parent_of(context.invocation_metadata())
        await self._streams.carry(request_iterator, context.write, context.time_remaining, parent)


def target_service(
    facts: ServiceFacts,
    sessions: TargetSessions,
    worker: DeviceWorker[VerifyTask],
    observe: Callable[[ComputeTimes], None] = unobserved,
) -> channels.Services:
    """The service for `outrider.rpc.channels.serve`; `observe` as in SessionServicer."""
    servicer = TargetServicer(facts, sessions, worker, observe)
    return channels.service(pb.DESCRIPTOR, "TargetService", partial(add_TargetServiceServicer_to_server, servicer))


def _verdict_message(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(
        accepted_rows=verdict.accepted_rows,
        next_token_id=verdict.next_token_id,
        finish_reason=messages.finish_reason_message(verdict.finish_reason),
        evaluated_count=verdict.evaluated_count,
        logprobs=map(logprob_message, verdict.logprobs),
        prompt_logprobs=map(logprob_message, verdict.prompt_logprobs),
        prefix_len=verdict.prefix_len,
    )
