"""One opening of a session on a target: its messages there, and how far the target may go on unasked.

Answers are matched by (epoch, base_len), never by order: one to a later length that overtook is kept, and one that
cannot be about anything that was asked does not exist.
"""

import structlog

from gateway.rounds.round import NO_REQUEST, DrafterId, GuessRequest, Place, Proposal, TokenLog
from gateway.sessions.link import Mailbox, opening_of
from gateway.sessions.peer import ServicePeer
from gateway.sessions.wait import Wait
from outrider.errors import InvalidRequest, ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.rpc.errors import session_error_from
from outrider.rpc.messages.tree import shape_message, tree_from, write_tree
from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import types_pb2

log = structlog.get_logger()


class TargetOpening(Mailbox[pb.VerifyResponse]):
    """One opening of a session on a target, with how far the target may go on unasked."""

    def __init__(
        self,
        peer: ServicePeer,
        spec: SessionSpec,
        token_log: TokenLog,
        fence: types_pb2.Fence,
        drafter: str = "",
        wait: Wait | None = None,
    ) -> None:
        """`fence` names the session and its epoch here; `drafter` guesses in the target's process, where it has that.
        `wait` hears how much of the prompt is read.

        Raises PeerLost when the target is away.
        """
        super().__init__(peer.link(), str(peer), fence.session_id)
        self.peer, self.book = peer, peer.book
        self.is_opening = True  # the open has no answer yet
        self._spec = spec
        self._log = token_log
        self._wait = wait
        self._session_id, self._epoch = fence.session_id, fence.epoch
        info = peer.present()
        self._max_budget = max(0, info.unacknowledged_window - 1)
        self._max_own_count = info.max_draft_count
        self.drafter = drafter if drafter in info.drafters else ""
        # A replica whose drafter of that name makes none is asked for chains.
        self._makes_trees = drafter in info.tree_drafters
        self.vocabulary_size = info.vocabulary_size
        self._limit = 0  # committed length up to which the target may go on its own
        self._largest_limit = 0  # that it was ever given: what is taken back, it may have used before it knew
        self._is_guessing = False  # its own drafter guesses for each verdict
        self._early: dict[int, pb.VerifyResponse] = {}
        self._ahead_len = 0  # length of the verdict after which branches may follow
        self._ahead = NO_REQUEST  # with what they were asked for

    def run_ahead(self, base_len: int, branches: types_pb2.Branches, asked: GuessRequest) -> None:
        """Hands branches on, with which the target may give the verdict after the one on a length."""
        self._ahead_len, self._ahead = base_len, asked
        # How far it takes the target has not been read; but it is one verdict, and no guess lies beyond the usual.
        self._largest_limit = max(self._largest_limit, base_len + self._max_own_count + 2)
        message = pb.VerifyRequest(branches=branches)
        message.branches.plain_on_miss = asked.plain_on_miss
        fence = message.fence
        fence.session_id, fence.epoch, fence.base_len = self._session_id, self._epoch, base_len
        self.send(message)

    def is_ahead(self, response: pb.VerifyResponse) -> bool:
        """Whether branches were handed on for what comes after a verdict."""
        return response.fence.base_len == self._ahead_len

    def goes_on(self, response: pb.VerifyResponse) -> bool:
        """Whether the target is at the verdict after this one by itself, or will be when these branches reach it."""
        return response.verdict.goes_on or self._ahead.plain_on_miss

    def allow(self, length: int) -> None:
        """Counts on the target to commit up to a length by itself."""
        self._limit = max(self._limit, length)
        self._largest_limit = max(self._largest_limit, length)

    @property
    def outstanding(self) -> int:
        """Tokens that the target may still commit unasked."""
        if self._log.finish_reason is not None:
            return 0
        left = min(self._limit, self._spec.max_len) - len(self._log)
        # A verdict that is here already decides the next token, whatever is proposed.
        return left if left > 0 else int(self._is_decided())

    def _is_decided(self) -> bool:
        """Whether the verdict on the log's length is here, of which all are taken in that have come.

        A message on such a length would be answered with every verdict that was given since, once more.
        """
        while self._unread and self._unread[0].HasField("verdict"):
            self._take(self._next_unread(), len(self._log))
        return len(self._log) in self._early

    def send_next(self, proposal: Proposal, plain_budget: int, own: GuessRequest) -> None:
        """Opens, steps, extends a stretch of unasked tokens, ends it for a proposal, or sends nothing within one.

        Another number of guesses waits for the next extension; that there are none any more, or some, does not.
        """
        budget, outstanding = min(plain_budget, self._max_budget), 0 if self.is_opening else self.outstanding
        if outstanding and proposal.tree.token_ids and not self._is_decided():
            # Guesses that are worth more than the rest of a stretch end it.
            message = self._next_message(0)
            message.acknowledge.SetInParent()
            self.send(message)
            self.send_step(proposal, plain_budget, own)
        elif not outstanding:
            self.send_step(proposal, plain_budget, own)
        elif budget and (
            bool(self._own_count(own)) != self._is_guessing
            or (2 * outstanding <= budget and self._limit < self._spec.max_len)
        ):
            message = self._next_message(budget)
            message.acknowledge.plain_budget = budget
            self._ask_own(message.acknowledge, own)
            self.send(message)

    def send_step(self, proposal: Proposal, plain_budget: int, own: GuessRequest) -> None:
        """Opens, or asks for the verdict on the log's length, which a target that has given it gives once more."""
        budget = min(plain_budget, self._max_budget)
        message = self._next_message(budget)
        step, parts = message.open.step if self.is_opening else message.step, list[types_pb2.OpenPart]()
        step.plain_budget = budget
        self._ask_own(step, own)
        write_tree(step.proposal, proposal.tree)
        if self.is_opening:
            message.open.drafter = self.drafter
            message.open.tells_reading = self._wait is not None
            session, parts = opening_of(self._spec, self._log)
            message.open.session.CopyFrom(session)
        self.send(*(pb.VerifyRequest(fence=message.fence, part=part) for part in parts), message)

    async def receive(self, until_s: float) -> pb.VerifyResponse:
        """The answer on the length that the log has now, by the loop's clock, however it grows meanwhile.

        Raises TimeoutError, PeerLost, what the target says.
        """
        base_len = len(self._log)
        while base_len not in self._early:
            self._take(await self.read(until_s), base_len)
        self.is_opening = False
        answer = self._early.pop(base_len)
        # What is left of repetitions must not pile up.
        if self._early:
            self._early = {early: response for early, response in self._early.items() if early > base_len}
        return answer

    def _take(self, response: pb.VerifyResponse, base_len: int) -> None:
        """Keeps an answer to a length or a later one, and drops what is old; raises what the target says."""
        fence = response.fence
        if fence.epoch == self._epoch and response.HasField("error"):
            raise session_error_from(response.error)
        if response.HasField("reading"):
            if self._wait is not None and (fence.epoch, fence.base_len) == (self._epoch, base_len):
                self._wait.read(min(response.reading.read_len, self._spec.prompt_len))
        elif fence.epoch == self._epoch and base_len <= fence.base_len < max(self._largest_limit, base_len + 1):
            self._early[fence.base_len] = response
        elif (fence.epoch, fence.base_len) > (self._epoch, base_len):
            log.warning("answer to nothing", service=str(self.peer), base_len=fence.base_len, log_len=base_len)

    def own_proposal(self, response: pb.VerifyResponse) -> Proposal | None:
        """Proposal that the target has made to itself; raises ProtocolViolation about what no drafter may say."""
        if not response.verdict.proposal.token_ids:
            return None
        try:
            # Log-probabilities that were not asked for have no reader.
            wanted = self._spec.draft_logprobs
            tree = tree_from(response.verdict.proposal, self.vocabulary_size, self._max_own_count, with_logprobs=wanted)
        except InvalidRequest as error:
            raise ProtocolViolation(f"{self.peer} named a malformed proposal of its own: {error.message}") from None
        times, is_ahead = response.draft_times, response.verdict.is_of_branch
        return Proposal(
            tree,
            compute_us=times.compute_us,
            forward_count=times.forward_count,
            row_count=times.row_count,
            caught_up_count=response.caught_up_count,
            drafter=self._ahead.drafter if is_ahead else DrafterId(self.drafter, Place.HOSTED),
            is_ahead=is_ahead,
        )

    def end(self, fence: types_pb2.Fence) -> None:
        self.close(pb.VerifyRequest(fence=fence, close=types_pb2.CloseSession()))

    def _own_count(self, own: GuessRequest) -> int:
        """Number of guesses that the target's drafter makes of a request."""
        return min(own.count, self._max_own_count) if self.drafter else 0

    def _ask_own(self, message: pb.TargetStep | pb.Acknowledge, own: GuessRequest) -> None:
        message.own_draft_count = self._own_count(own)
        self._is_guessing = message.own_draft_count > 0
        if own.shape is not None and self._is_guessing and self._makes_trees:
            message.own_shape.CopyFrom(shape_message(own.shape))

    def _next_message(self, plain_budget: int) -> pb.VerifyRequest:
        """A message on the log's length, to be filled in place; notes how far it lets the target go."""
        message, base_len = pb.VerifyRequest(), len(self._log)
        self._limit = base_len + 1 + plain_budget
        self._largest_limit = max(self._largest_limit, self._limit)
        fence = message.fence
        fence.session_id, fence.epoch, fence.base_len = self._session_id, self._epoch, base_len
        return message
