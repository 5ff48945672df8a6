"""DraftService: translates between messages and the draft's sessions. Decides nothing, and touches no device."""

import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from draft_service.drafters.model_drafter import DraftTask
from draft_service.sessions import Answer, DraftSessions, Wanted
from outrider import wire
from outrider.engine.worker import DeviceWorker
from outrider.errors import InvalidRequest
from outrider.fencing import Fence
from outrider.model_servicer import MAX_DRAFT_COUNT, ServiceFacts
from outrider.session_stream import SessionStream
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server

Stream = SessionStream[pb.ProposeRequest, Answer]


class DraftServicer(DraftServiceServicer):
    """Serves DraftService over the sessions of one model."""

    def __init__(self, facts: ServiceFacts, sessions: DraftSessions, worker: DeviceWorker[DraftTask]) -> None:
        self._facts = facts
        self._sessions = sessions
        self._worker = worker

    async def Propose(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[pb.ProposeRequest],
        context: grpc.aio.ServicerContext[pb.ProposeRequest, pb.ProposeResponse],
    ) -> None:
        """Carries one session; see the protocol."""
        stream = Stream(self._worker, self._sessions.table)

        async def write(answer: Answer) -> None:
            await context.write(self._response(answer))

        await stream.carry(request_iterator, write, partial(self._handle, stream))

    async def _handle(self, stream: Stream, request: pb.ProposeRequest) -> bool:
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

    def _job(self, stream: Stream, fence: Fence, request: pb.ProposeRequest, arrived_ns: int) -> Callable[[], None]:
        """What the device thread does for a request; raises InvalidRequest."""
        sessions, reply = self._sessions, stream.outbox.put
        if request.HasField("open"):
            spec = wire.spec_from(request.open.session, fence.base_len, self._facts.vocabulary_size)
            wanted = _wanted("open.draft_count", request.open.draft_count, arrived_ns)
            self._check_drafter(request.open.drafter)
            return partial(sessions.open, fence, spec, wanted, stream, reply)
        message = request.advance
        token_ids = wire.check_token_ids("advance.token_ids", message.token_ids, self._facts.vocabulary_size)
        if len(token_ids) >= fence.base_len:
            raise InvalidRequest("advance.token_ids", f"{len(token_ids)} tokens", f"fewer than {fence.base_len} tokens")
        wanted = _wanted("advance.draft_count", message.draft_count, arrived_ns)
        return partial(sessions.advance, fence, token_ids, wanted, stream, reply)

    def _check_drafter(self, name: str) -> None:
        """An empty name leaves the choice to this service, which offers one drafter."""
        if name and name not in self._facts.drafters:
            raise InvalidRequest("open.drafter", name, f"one of {', '.join(self._facts.drafters)}, or empty")

    def _response(self, answer: Answer) -> pb.ProposeResponse:
        response = pb.ProposeResponse(
            fence=wire.fence_message(answer.fence, self._facts.instance_id),
            cached_len=answer.cached_len,
            numerics_id=self._facts.numerics_id,
            times=wire.times_message(answer.times),
        )
        if answer.proposal is None:
            response.tokens_wanted.known_len = answer.known_len
        else:
            response.proposal.CopyFrom(wire.tree_message(answer.proposal))
        return response


def draft_service(
    facts: ServiceFacts, sessions: DraftSessions, worker: DeviceWorker[DraftTask]
) -> dict[str, Callable[[grpc.aio.Server], None]]:
    """The service for `outrider.rpc.serve`: its full name, and what adds it to a server."""
    servicer = DraftServicer(facts, sessions, worker)
    name = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
    return {name: lambda server: add_DraftServiceServicer_to_server(servicer, server)}


def _wanted(field: str, draft_count: int, arrived_ns: int) -> Wanted:
    return Wanted(wire.check_range(field, draft_count, 0, MAX_DRAFT_COUNT), arrived_ns)
