"""DraftService: translates between messages and the draft's sessions. Decides nothing, and touches no device."""

from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from draft_service.drafters.task import DraftTask, choose_drafter
from draft_service.sessions import Answer, DraftSessions, Wanted
from outrider import tracing
from outrider.engine.worker import DeviceWorker
from outrider.errors import InvalidRequest, check_range, check_token_ids
from outrider.model_service.servicer import MAX_DRAFT_COUNT, ServiceFacts
from outrider.model_service.session_stream import Arrival, SessionServicer, unobserved
from outrider.rpc import channels, messages
from outrider.rpc.fencing import ComputeTimes, Fence
from outrider.rpc.messages import tree_message
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server


class DraftMessages:
    """What the messages of DraftService say; see outrider.model_service.session_stream.Messages."""

    def __init__(self, facts: ServiceFacts, sessions: DraftSessions) -> None:
        self._facts = facts
        self._sessions = sessions

    def job(self, action: str, request: pb.ProposeRequest, arrival: Arrival[Answer]) -> Callable[[], None]:
        """Opens a session or moves it forward; raises InvalidRequest and Unsupported."""
        fence, owner, reply = arrival.fence, arrival.owner, arrival.reply
        if action == "open":
            spec = messages.spec_from(request.open.session, fence.base_len, self._facts.vocabulary_size)
            wanted = _wanted("open.draft_count", request.open.draft_count, arrival.arrived_ns)
            rule, offers = spec.acceptance.rule, self._facts.drafters
            drafter = choose_drafter(request.open.drafter, rule, offers, "open.drafter")
            return partial(self._sessions.open, fence, spec, wanted, owner, reply, drafter)
        message = request.advance
        if len(message.token_ids) >= fence.base_len:
            count, limit = f"{len(message.token_ids)} tokens", f"fewer than {fence.base_len} tokens"
            raise InvalidRequest("advance.token_ids", count, limit)
        token_ids = check_token_ids("advance.token_ids", message.token_ids, self._facts.vocabulary_size)
        wanted = _wanted("advance.draft_count", message.draft_count, arrival.arrived_ns)
        return partial(self._sessions.advance, fence, token_ids, wanted, owner, reply)

    def response(self, answer: Answer) -> pb.ProposeResponse:
        """The message for an answer."""
        tree = answer.proposal
        proposal = None if tree is None else tree_message(tree, tree.logprobs)
        wanted = types_pb2.TokensWanted(known_len=answer.known_len) if proposal is None else None
        return pb.ProposeResponse(
            fence=messages.fence_message(answer.fence, self._facts.instance_id),
            proposal=proposal,
            tokens_wanted=wanted,
            cached_len=answer.cached_len,
            numerics_id=self._facts.numerics_id,
            times=messages.times_message(answer.times),
        )

    def pong(self, fence: Fence) -> pb.ProposeResponse:
        """The answer to a ping."""
        return pb.ProposeResponse(fence=messages.fence_message(fence, self._facts.instance_id), pong=types_pb2.Pong())


class DraftServicer(DraftServiceServicer):
    """Serves DraftService over the sessions of one model."""

    def __init__(
        self,
        facts: ServiceFacts,
        sessions: DraftSessions,
        worker: DeviceWorker[DraftTask],
        observe: Callable[[ComputeTimes], None],
    ) -> None:
        messages = DraftMessages(facts, sessions)
        self._streams = SessionServicer(messages, facts.context_len, sessions.table, worker, observe)

    async def Propose(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[pb.ProposeRequest],
        context: grpc.aio.ServicerContext[pb.ProposeRequest, pb.ProposeResponse],
    ) -> None:
        """Carries one session; see the protocol."""
        parent = tracing.parent_of(context.invocation_metadata())
        await self._streams.carry(request_iterator, context.write, context.time_remaining, parent)


def draft_service(
    facts: ServiceFacts,
    sessions: DraftSessions,
    worker: DeviceWorker[DraftTask],
    observe: Callable[[ComputeTimes], None] = unobserved,
) -> channels.Services:
    """The service for `outrider.rpc.channels.serve`; `observe` as in SessionServicer."""
    servicer = DraftServicer(facts, sessions, worker, observe)
    return channels.service(pb.DESCRIPTOR, "DraftService", partial(add_DraftServiceServicer_to_server, servicer))


def _wanted(field: str, draft_count: int, arrived_ns: int) -> Wanted:
    return Wanted(check_range(field, draft_count, 0, MAX_DRAFT_COUNT), arrived_ns)
