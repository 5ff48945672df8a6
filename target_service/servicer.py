"""TargetService: translates between messages and the target's sessions. Decides nothing, and touches no device."""

import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from outrider import wire
from outrider.engine.tree import TokenTree
from outrider.engine.worker import DeviceWorker
from outrider.errors import PromptTooLong
from outrider.fencing import Fence
from outrider.model_servicer import MAX_DRAFT_COUNT, ServiceFacts
from outrider.session_stream import SessionStream
from outrider.v1 import target_service_pb2 as pb
from outrider.v1.target_service_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from target_service.sessions import Answer, Step, TargetSessions
from target_service.verifier import VerifyTask

MAX_PLAIN_BUDGET = 4096

Stream = SessionStream[pb.VerifyRequest, Answer]


class TargetServicer(TargetServiceServicer):
    """Serves TargetService over the sessions of one model."""

    def __init__(self, facts: ServiceFacts, sessions: TargetSessions, worker: DeviceWorker[VerifyTask]) -> None:
        self._facts = facts
        self._sessions = sessions
        self._worker = worker

    async def Verify(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[pb.VerifyRequest],
        context: grpc.aio.ServicerContext[pb.VerifyRequest, pb.VerifyResponse],
    ) -> None:
        """Carries one session; see the protocol."""
        stream = Stream(self._worker, self._sessions.table)

        async def write(answer: Answer) -> None:
            await context.write(self._response(answer))

        await stream.carry(request_iterator, write, partial(self._handle, stream))

    async def _handle(self, stream: Stream, request: pb.VerifyRequest) -> bool:
        """Takes one request; False after a close, which ends the stream."""
        arrived_ns = time.perf_counter_ns()
        fence = wire.fence_from(request.fence, self._facts.context_len)
        action = request.WhichOneof("action")
        stream.admit(fence, action, is_open=action == "open")
        if action == "close":
            await self._worker.call(partial(self._sessions.table.close, fence, stream))
            return False
        await self._worker.call(self._job(stream, fence, request, arrived_ns))
        return True

    def _job(
        self,
        stream: Stream,
        fence: Fence,
        request: pb.VerifyRequest,
        arrived_ns: int,
    ) -> Callable[[], None]:
        """What the device thread does for a request; raises InvalidRequest."""
        sessions, reply = self._sessions, stream.outbox.put
        if request.HasField("open"):
            session = request.open.session
            spec = wire.spec_from(session, fence.base_len, self._facts.vocabulary_size)
            wire.check_range("session.max_len", spec.max_len, 1, self._facts.context_len)
            self._check_size(spec.max_len)
            step = self._step(request.open.step, arrived_ns)
            return partial(sessions.open, fence, spec, step, stream, reply)
        if request.HasField("step"):
            return partial(sessions.step, fence, self._step(request.step, arrived_ns), stream, reply)
        budget = wire.check_range("acknowledge.plain_budget", request.acknowledge.plain_budget, 0, MAX_PLAIN_BUDGET)
        return partial(sessions.acknowledge, fence, budget, stream, arrived_ns)

    def _check_size(self, max_len: int) -> None:
        """A request that fills the cache on its own could never end; raises PromptTooLong."""
        kv_tokens = self._facts.block_size * self._facts.block_count
        if max_len > kv_tokens:
            message = f"a request of up to {max_len} tokens does not fit into the key-value cache of {kv_tokens} tokens"
            raise PromptTooLong(message, max_len=max_len, kv_tokens=kv_tokens)

    def _step(self, message: pb.TargetStep, arrived_ns: int) -> Step:
        token_ids, parents = wire.tree_from(message.proposal, self._facts.vocabulary_size, MAX_DRAFT_COUNT)
        budget = wire.check_range("step.plain_budget", message.plain_budget, 0, MAX_PLAIN_BUDGET)
        return Step(TokenTree(token_ids, parents), budget, arrived_ns)

    def _response(self, answer: Answer) -> pb.VerifyResponse:
        response = pb.VerifyResponse(
            fence=wire.fence_message(answer.fence, self._facts.instance_id),
            cached_len=answer.cached_len,
            numerics_id=self._facts.numerics_id,
            times=wire.times_message(answer.times),
        )
        if answer.verdict is None:
            response.tokens_wanted.known_len = answer.known_len
        else:
            verdict = answer.verdict
            response.verdict.CopyFrom(
                pb.Verdict(
                    accepted_rows=verdict.accepted_rows,
                    next_token_id=verdict.next_token_id,
                    finish_reason=wire.finish_reason_message(verdict.finish_reason),
                    evaluated_count=verdict.evaluated_count,
                )
            )
        return response


def target_service(
    facts: ServiceFacts, sessions: TargetSessions, worker: DeviceWorker[VerifyTask]
) -> dict[str, Callable[[grpc.aio.Server], None]]:
    """The service for `outrider.rpc.serve`: its full name, and what adds it to a server."""
    servicer = TargetServicer(facts, sessions, worker)
    name = pb.DESCRIPTOR.services_by_name["TargetService"].full_name
    return {name: lambda server: add_TargetServiceServicer_to_server(servicer, server)}
