"""One opening of a draft session: a stream on one draft. Decides nothing about faults.

Answers are matched by (epoch, base_len), never by order. What the target must never see is stopped here.
"""

import asyncio

from gateway.links import ServiceLink
from gateway.rounds import Proposal, TokenLog, Way
from gateway.streams import MessageStream
from outrider import wire
from outrider.errors import InvalidRequest, ProtocolViolation
from outrider.parameters import Rule, SessionSpec
from outrider.process import tracing
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.wire_proposal import distributions_from, draft_logprobs_from, tree_from

CLOSE_TIMEOUT_S = 2.0


class DraftStream:
    """Messages of one session to and from one incarnation of a draft. `fence` on each names the session and epoch."""

    def __init__(
        self, peer: ServiceLink, spec: SessionSpec, token_log: TokenLog, drafter: str, timeout_s: float | None
    ) -> None:
        """Begins the call, which ends after timeout_s unless that is None. Raises PeerLost when the draft is away."""
        self.peer = peer
        self.instance_id = peer.present().instance_id
        self.known_len = 0
        """Committed tokens that were sent."""
        self.cached_len = 0
        """Committed tokens that the draft has read, as it said last."""
        self._spec = spec
        self._log = token_log
        self._drafter = drafter
        self._vocabulary_size = peer.present().vocabulary_size
        self._messages: MessageStream[pb.ProposeRequest, pb.ProposeResponse] = MessageStream(
            DraftServiceStub(peer.channel).Propose(timeout=timeout_s, metadata=tracing.carrier()), str(peer)
        )

    async def ask(self, fence: types_pb2.Fence, draft_count: int, timeout_s: float) -> None:
        """Opens the session, or tells the tokens that the draft does not know. Raises TimeoutError."""
        if self.known_len == 0:
            session = wire.open_message(self._spec, self._log.tokens())
            opening = pb.DraftOpen(session=session, draft_count=draft_count, drafter=self._drafter)
            request = pb.ProposeRequest(fence=fence, open=opening)
        else:
            advance = pb.DraftAdvance(token_ids=self._log.tokens(self.known_len), draft_count=draft_count)
            request = pb.ProposeRequest(fence=fence, advance=advance)
        self.known_len = len(self._log)
        await self._messages.write(request, timeout_s)

    async def answer(self, fence: types_pb2.Fence, until_s: float) -> pb.ProposeResponse:
        """The answer to the last request, by the loop's clock; answers to earlier ones are dropped.

        Raises TimeoutError, PeerLost, ProtocolViolation, and what the draft says.
        """
        loop, asked = asyncio.get_running_loop(), (fence.epoch, fence.base_len)
        while True:
            response = await self._messages.read(max(0.0, until_s - loop.time()))
            answered = (response.fence.epoch, response.fence.base_len)
            if answered == asked:
                self.cached_len = response.cached_len
                return response
            if answered > asked:
                raise ProtocolViolation(f"{self.peer} answered a message that was never sent")

    def proposal(self, response: pb.ProposeResponse, draft_count: int, caught_up_count: int, wait_us: int) -> Proposal:
        """The guesses of an answer; raises ProtocolViolation about what no draft may say."""
        tree, rule = response.proposal, self._spec.acceptance.rule
        try:
            token_ids, parents = tree_from(tree, self._vocabulary_size, draft_count)
            distributions = distributions_from(tree, self._vocabulary_size)
            # Nobody reads what nobody asked for.
            logprobs = draft_logprobs_from(tree) if self._spec.draft_logprobs else ()
        except InvalidRequest as error:
            raise ProtocolViolation(f"{self.peer} sent a malformed proposal: {error.message}") from None
        found = _misfit(parents, bool(distributions), rule)
        if found:
            raise ProtocolViolation(f"{self.peer} sent a proposal {found}, which does not fit the rule {rule}")
        way = Way(response.times.queue_us, wait_us, self._messages.take_bytes())
        return Proposal(
            token_ids,
            parents,
            compute_us=response.times.compute_us,
            caught_up_count=caught_up_count,
            way=way,
            distributions=distributions,
            logprobs=logprobs,
        )

    async def drop(self) -> None:
        """Ends the call without a word; the draft keeps the session on a lease."""
        await self._messages.close(None, CLOSE_TIMEOUT_S)

    def finish(self, fence: types_pb2.Fence) -> None:
        """Ends the session and the call, in the background."""
        # The log may have grown past the draft's context, where it takes no messages.
        fence.base_len = max(self.known_len, 1)
        close = pb.ProposeRequest(fence=fence, close=types_pb2.CloseSession())
        self.peer.finish(self._messages.close(close, CLOSE_TIMEOUT_S))


def _misfit(parents: tuple[int, ...], has_distributions: bool, rule: Rule) -> str:
    """What about a proposal the target would refuse under a rule, and end a request that is not at fault; or nothing.

    Looks at no token: what is refused for its tokens biases the rules that test with coins.
    """
    if parents and has_distributions != rule.needs_distributions:
        return "with distributions" if has_distributions else "without distributions"
    is_chain = parents == tuple(range(len(parents)))
    return "as a tree that is no chain" if rule.needs_distributions and not is_chain else ""
