"""A sequence of tokens and its session on a draft service: what is sent of it, and what of the answers is believed."""

import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafting.peer import DraftLink, DraftPeer
from outrider.errors import InvalidRequest, OutriderError, PeerLost, ProtocolViolation, error_classes
from outrider.rpc.fencing import SESSION_ID_LEN
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import types_pb2

MAX_ID = 2**31 - 1
PART_TOKENS = 4096  # tokens of an open that are sent at a time
FIRST_REST_S, LONGEST_REST_S = 0.5, 10.0  # after a draft has refused the sequence, and after many times in a row
GREEDY = types_pb2.SamplingParameters(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a draft guesses after a sequence, or the error for which there is nothing.

    Without both, nothing was wanted, no token fits, or the draft is still reading and was not waited for.
    """

    token_ids: tuple[int, ...] = ()
    error: OutriderError | None = None


class DraftSequence:
    """The committed tokens of a request, prompt included, and its session on a draft. Made by DraftClient.open.

    `extend` and `truncate` send nothing; the next DraftClient.guess does. They raise InvalidRequest.
    """

    def __init__(self, token_ids: Sequence[int], max_len: int) -> None:
        self.token_ids = array("i")
        self.max_len = max_len
        self.session_id = os.urandom(SESSION_ID_LEN)
        self.peer: DraftPeer | None = None
        self.link: DraftLink | None = None
        """The link that the session was opened on; None before, and after the draft has ended the session."""
        self.rests_until_s = 0.0
        self.is_awaited = False
        """Whether an exchange waits for the answer to what was asked last."""
        self.asked_count = 0
        self._pause_s = FIRST_REST_S
        self._epoch = 0
        self._known_len = 0  # tokens that were sent in this epoch, or before it and not taken back
        self._cached_len = 0  # those that the draft has read, as it said last
        self._asked_len = 0
        self._is_rewound = False
        self._answer: Guesses | None = None
        self.extend(token_ids)
        if not 1 <= len(self.token_ids) <= max_len:
            raise InvalidRequest("token_ids", f"{len(self.token_ids)} ids", f"1 to {max_len} ids, as many as max_len")

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the target has committed; ids in [0, 2^31)."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_ID:
            raise InvalidRequest("token_ids", [*token_ids[:8]], f"ids in [0, {MAX_ID}]")
        self.token_ids.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Takes the sequence back to its first tokens, `length` of them, in [1, len]."""
        if not 1 <= length <= len(self.token_ids):
            raise InvalidRequest("length", length, f"in [1, {len(self.token_ids)}]")
        del self.token_ids[length:]
        if self._known_len > length:
            self._known_len, self._is_rewound = length, True
            self._cached_len = min(self._cached_len, length)

    @property
    def unread_count(self) -> int:
        """Tokens that the draft has to read before it guesses, as far as is known."""
        return len(self.token_ids) - self._cached_len

    @property
    def answer(self) -> Guesses | None:
        """The answer about the tokens as they stand, if it has come."""
        return self._answer if self._asked_len == len(self.token_ids) and not self._is_rewound else None

    def requests(self, peer: DraftPeer, link: DraftLink, count: int) -> list[pb.ProposeRequest]:
        """Messages that open the session on a link or move it forward, and ask for `count` guesses; none where the same
        has been asked there already.
        """
        token_ids, length = self.token_ids, len(self.token_ids)
        is_new = self.link is not link
        is_again = not is_new and not self._is_rewound and self._asked_len == length
        if is_again and self.asked_count >= count and self._answer is None:
            return []
        if is_new:
            self.peer, self.link, self._known_len, self._cached_len = peer, link, 0, 0
        if is_new or self._is_rewound or is_again:
            # A length is asked for once in an epoch.
            self._epoch += 1
        self._is_rewound, self._answer, self._asked_len, self.asked_count = False, None, length, count
        fence = self._fence(length)
        start, self._known_len = self._known_len, length
        if not is_new:
            advance = pb.DraftAdvance(token_ids=token_ids[start:], draft_count=count)
            return [pb.ProposeRequest(fence=fence, advance=advance)]
        starts = range(0, length - PART_TOKENS, PART_TOKENS)
        parts = [types_pb2.OpenPart(start=start, token_ids=token_ids[start : start + PART_TOKENS]) for start in starts]
        part_len = PART_TOKENS * len(parts)
        session = types_pb2.OpenSession(
            token_ids=token_ids[part_len:],
            prompt_len=length,
            sampling=GREEDY,
            rule=types_pb2.ACCEPTANCE_RULE_MATCH,
            max_len=self.max_len,
            part_len=part_len,
        )
        opening = pb.DraftOpen(session=session, draft_count=count)
        messages = [pb.ProposeRequest(fence=fence, part=part) for part in parts]
        return [*messages, pb.ProposeRequest(fence=fence, open=opening)]

    def closing(self) -> pb.ProposeRequest:
        """The message that ends the session."""
        fence = self._fence(max(self._known_len, 1))
        return pb.ProposeRequest(fence=fence, close=types_pb2.CloseSession())

    def take(self, peer: DraftPeer, response: pb.ProposeResponse, vocabulary_size: int) -> bool:
        """Takes an answer in; returns whether it is the one to what was asked last. Raises ProtocolViolation."""
        fence = response.fence
        if fence.epoch != self._epoch:
            return False
        what = response.WhichOneof("answer")
        if what == "error":
            said = response.error
            kind = error_classes().get(said.reason, OutriderError)
            self.forget(kind.received([said.message[:400]], said.metadata))
            self.rests_until_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_REST_S)
            return True
        if what == "tokens_wanted":
            # The next request opens the session anew.
            self.forget(PeerLost(f"the draft at {peer.address} has lost the session"))
            return True
        if what != "proposal" or fence.base_len > self._asked_len or not 0 <= response.cached_len <= fence.base_len:
            raise ProtocolViolation(f"the draft at {peer.address} sent what no draft may send: {what}")
        self._cached_len = min(response.cached_len, self._known_len)
        if fence.base_len < self._asked_len:
            return False
        found = response.proposal
        is_chain = not found.distributions and [*found.parents] in ([], [*range(len(found.token_ids))])
        fits = len(found.token_ids) <= self.asked_count and all(0 <= each < vocabulary_size for each in found.token_ids)
        if not is_chain or not fits:
            raise ProtocolViolation(f"the draft at {peer.address} sent guesses that were not asked for")
        self._answer = Guesses(tuple(found.token_ids))
        self._pause_s = FIRST_REST_S
        return True

    def forget(self, error: OutriderError) -> None:
        """The session is gone, and the error is the answer to what was asked last."""
        self.link, self._answer, self._cached_len = None, Guesses(error=error), 0

    def _fence(self, base_len: int) -> types_pb2.Fence:
        return types_pb2.Fence(session_id=self.session_id, epoch=self._epoch, base_len=base_len)
