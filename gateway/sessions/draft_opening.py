"""One opening of a session on a draft: what it is asked, and what of its answers is believed.

What a draft sends is believed in nothing. An answer is checked whole, and one that no draft may give is dropped whole
and counts against the service. Nothing is dropped for a token that a right draft could have guessed: that would bias
the rules that test with uniforms.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, NamedTuple

from gateway.rounds.round import NO_REQUEST, DrafterId, FallbackReason, GuessRequest, HopCost, Proposal, TokenLog
from gateway.sessions.link import Link, Mailbox, opening_of
from gateway.sessions.peer import ServicePeer
from outrider.errors import (
    CacheFull,
    DeviceFull,
    InvalidRequest,
    NoTokenLeft,
    NotReady,
    OutriderError,
    Overloaded,
    PeerLost,
    ProtocolViolation,
)
from outrider.parameters import SessionSpec
from outrider.rpc.errors import session_error, session_error_from
from outrider.rpc.messages.tree import branches_from, shape_message, tree_from
from outrider.token_tree import TokenTree, TreeShape
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import types_pb2

CLOCK_SLACK_US = 1_000_000  # by which the clocks of draft and gateway may differ while an answer is waited for

# What a draft that works may say about a session; everything else that it refuses it should have taken.
HONEST_REFUSALS = (CacheFull, DeviceFull, Overloaded, NoTokenLeft)
LOST = (PeerLost, NotReady)

OnBranches = Callable[[int, types_pb2.Branches, GuessRequest], None]
"""Takes branches for the verdict on a length, and what they were asked for with."""


class DrafterSeat(NamedTuple):
    """A drafter among those that guess for one request."""

    drafter: str = ""
    """Drafter that its service is asked for; empty leaves the choice to it."""
    name: str = ""
    """Name of the drafter in rounds."""
    lane: int = 0
    """Number of the drafter: no two of a request draw with the same noise."""


ALONE = DrafterSeat()
"""Seat of the only drafter of a request."""


class DraftOpening(Mailbox[pb.ProposeResponse]):
    """One opening of a session on one incarnation of a draft. `fence` on each call names the session and its epoch."""

    # Each request has one answer, and two may cross each other.
    max_unread: ClassVar[int] = 4

    def __init__(
        self, peer: ServicePeer, spec: SessionSpec, token_log: TokenLog, session_id: bytes, seat: DrafterSeat
    ) -> None:
        """Raises PeerLost when the draft is away."""
        super().__init__(peer.link(), str(peer), session_id)
        self.peer, self.book = peer, peer.book
        self.known_len = 0  # committed tokens that were sent
        self.cached_len = 0  # those that the draft has read, as it said last
        info = peer.present()
        # A draft that cannot read grammars guesses without, and is right less often.
        self._spec = spec if info.grammar_engine else replace(spec, grammar="")
        self._log = token_log
        self._seat = seat
        self._vocabulary_size = info.vocabulary_size
        self._makes_branches = info.makes_branches(seat.drafter, spec.acceptance.rule)
        self.on_branches: OnBranches | None = None
        self._asked, self._request = (0, 0), NO_REQUEST  # epoch and length of the last request, and what it asked for
        self._branches_due = 0

    def ask(self, fence: types_pb2.Fence, asked: GuessRequest) -> None:
        """Opens the session, or sends the tokens that the draft does not know."""
        self._asked, self._request, self._branches_due = (fence.epoch, fence.base_len), asked, 0
        if self.known_len == 0:
            session, parts = opening_of(self._spec, self._log)
            seat = self._seat
            opening = pb.DraftOpen(session=session, draft_count=asked.count, drafter=seat.drafter, lane=seat.lane)
            if asked.shape is not None:
                opening.shape.CopyFrom(shape_message(asked.shape))
            messages = [pb.ProposeRequest(fence=fence, part=part) for part in parts]
            self.send(*messages, pb.ProposeRequest(fence=fence, open=opening))
        else:
            message = pb.ProposeRequest(fence=fence)
            advance = message.advance
            advance.token_ids.extend(self._log.tokens(self.known_len))
            advance.draft_count = asked.count
            if asked.shape is not None:
                advance.shape.CopyFrom(shape_message(asked.shape))
            elif self.on_branches is not None and self._makes_branches:
                advance.branch_count = self._branches_due = asked.branch_count
                advance.went_on = asked.went_on
            self.send(message)
        self.known_len = fence.base_len

    def put(self, message: pb.ProposeResponse) -> None:
        """Takes an answer in; what comes too late, or what no round waits for, is dropped at once."""
        fence, asked = message.fence, self._asked
        is_asked = (fence.epoch, fence.base_len) == asked
        if fence.epoch == asked[0] and message.HasField("proposal"):
            # Whether or not a round waits for it, it has read what it was sent.
            self.book.answered(fence.session_id, fence.base_len, 0, 0)
        if message.HasField("branches"):
            self._num_bytes += message.ByteSize()
            if is_asked and self._branches_due:
                self._hand_on(message)
        elif self._request.went_on and message.HasField("proposal"):
            self._num_bytes += message.ByteSize()
            if is_asked and 0 <= message.cached_len <= fence.base_len:
                self.cached_len = message.cached_len
                self.peer.breaker.answered()
        elif (fence.epoch, fence.base_len) >= asked or (message.HasField("error") and fence.epoch == asked[0]):
            super().put(message)

    def _hand_on(self, message: pb.ProposeResponse) -> None:
        """Hands branches on, once for each request; those that no draft may send are a fault, which `answer` raises."""
        most, room = self._branches_due, self._spec.max_len - message.fence.base_len - 1
        self._branches_due = 0
        try:
            found = branches_from(message.branches, self._vocabulary_size, self._request.count, most)
            if any(each.accepted_count + 1 + len(each.token_ids) > room for each in found):
                raise InvalidRequest("branches.branches", "past the end", f"at most {room} tokens deep here")
            rule = self._spec.acceptance.rule
            if any(bool(each.distributions) != rule.needs_distributions for each in found):
                raise InvalidRequest("branches.branches.distributions", "unfit", f"those that the rule {rule} needs")
        except InvalidRequest as error:
            fault = ProtocolViolation(f"{self.peer} sent malformed branches: {error.message}")
            super().put(pb.ProposeResponse(fence=message.fence, error=session_error(fault)))
        else:
            if self.on_branches is not None:
                self.on_branches(message.fence.base_len, message.branches, self._request)

    async def answer(self, fence: types_pb2.Fence, until_s: float) -> pb.ProposeResponse:
        """The answer to the last request, by the loop's clock; answers to earlier ones are dropped.

        Raises TimeoutError, PeerLost, ProtocolViolation, and what the draft says.
        """
        asked = fence.epoch, fence.base_len
        while True:
            response = await self.read(until_s)
            answered = (response.fence.epoch, response.fence.base_len)
            if answered[0] == asked[0] and response.HasField("error"):
                raise session_error_from(response.error)
            if answered == asked:
                if not 0 <= response.cached_len <= fence.base_len:
                    count = f"{response.cached_len} of {fence.base_len} tokens"
                    raise ProtocolViolation(f"{self.peer} says that it has cached {count}")
                self.cached_len = response.cached_len
                return response
            if answered > asked:
                raise ProtocolViolation(f"{self.peer} answered a message that was never sent")

    def proposal(
        self,
        response: pb.ProposeResponse,
        draft_count: int,
        caught_up_count: int,
        wait_us: int,
        shape: TreeShape | None = None,
    ) -> Proposal:
        """The guesses of an answer that took wait_us; raises ProtocolViolation about what no draft may say."""
        rule = self._spec.acceptance.rule
        try:
            # Log-probabilities that were not asked for have no reader.
            wanted = self._spec.draft_logprobs
            tree = tree_from(response.proposal, self._vocabulary_size, draft_count, with_logprobs=wanted)
        except InvalidRequest as error:
            raise ProtocolViolation(f"{self.peer} sent a malformed proposal: {error.message}") from None
        # What the target would refuse, and so end a request that is not at fault. No token is looked at: what is
        # refused for its tokens biases the rules that test with uniforms.
        if tree and bool(tree.distributions) != rule.needs_distributions:
            fault = "with distributions" if tree.distributions else "without distributions"
            raise ProtocolViolation(f"{self.peer} sent a proposal {fault}, which does not fit the rule {rule}")
        fault = self._fault_of(tree, shape or TreeShape())
        if fault:
            raise ProtocolViolation(f"{self.peer} sent a proposal {fault}")
        times = response.times
        most_us = wait_us + CLOCK_SLACK_US
        if not (0 <= times.queue_us <= most_us and 0 <= times.compute_us <= most_us):
            spent = f"{times.queue_us} and {times.compute_us} us in an answer that took {wait_us} us"
            raise ProtocolViolation(f"{self.peer} says that it has waited and computed for {spent}")
        if times.forward_count < 0 or times.row_count < 0:
            raise ProtocolViolation(f"{self.peer} counts {times.forward_count} forwards of {times.row_count} rows")
        return Proposal(
            tree,
            compute_us=times.compute_us,
            forward_count=times.forward_count,
            row_count=times.row_count,
            caught_up_count=caught_up_count,
            hop=HopCost(times.queue_us, wait_us, self.take_bytes()),
            drafter=DrafterId(self._seat.name),
        )

    def _fault_of(self, tree: TokenTree, shape: TreeShape) -> str:
        """Fault of a tree's form, which was not asked for or does not fit the request; empty where there is none."""
        # The last token of a request is the target's alone.
        room, depth = max(self._spec.max_len - len(self._log) - 1, 0), max(tree.depths)
        most = min(room, shape.max_depth or room, len(shape.expansions) or room)
        if depth > most:
            return f"{depth} tokens deep where at most {most} fit"
        max_children = max(shape.expansions, default=shape.max_children)
        num_children = max(Counter(tree.parents).values(), default=0) if max_children else 0
        if num_children > max_children:
            return f"with {num_children} children of a row where at most {max_children} were asked for"
        values = (1.0, *tree.values)
        if tree.values and any(value > values[parent] for value, parent in zip(tree.values, tree.parents, strict=True)):
            return "with a row of more value than its parent"
        return ""

    def end(self, fence: types_pb2.Fence) -> None:
        # The log may have grown past the draft's context, where it takes no messages.
        fence.base_len = max(self.known_len, 1)
        self.close(pb.ProposeRequest(fence=fence, close=types_pb2.CloseSession()))


def blame(peer: ServicePeer, link: Link | None, session_id: bytes, error: OutriderError) -> FallbackReason:
    """Counts a session's error against the draft where it is its fault; returns what that is to the session."""
    if isinstance(error, HONEST_REFUSALS):
        peer.breaker.left(session_id)
        return FallbackReason.DRAFT_REFUSED
    peer.breaker.failed(session_id, error)
    if not isinstance(error, LOST):
        peer.faults += 1
        return FallbackReason.DRAFT_REFUSED
    if link is not None:
        peer.report_lost(link)
    return FallbackReason.DRAFT_LOST
