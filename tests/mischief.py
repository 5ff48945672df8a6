"""The ways in which a service of the tiny model can answer wrongly, and what they make of a right answer."""

from enum import Enum, auto

from markov import NUM_TOKENS

from outrider.errors import CacheFull, InvalidRequest, PeerLost
from outrider.v1 import draft_service_pb2 as draft_pb


class Mischief(Enum):
    """One way to answer a request wrongly."""

    LATE = auto()  # not before a rollback
    FROZEN = auto()  # never, and rollbacks are not answered either
    LOST = auto()  # the service says that it is lost
    BROKEN = auto()  # the stream breaks, without a word of the service's own
    FULL = auto()  # no cache blocks
    UNWANTED = auto()  # the drafter that the open names is not offered
    FORGET = auto()  # the session is unknown
    TOO_MANY = auto()
    OUTSIDE = auto()  # token ids past the vocabulary
    BAD_PARENTS = auto()
    FUTURE = auto()  # an answer to a message that was never sent
    STALE_FIRST = auto()  # an answer of an older epoch before the right one
    TWICE = auto()  # the right answer two times


GARBAGE = (Mischief.TOO_MANY, Mischief.OUTSIDE, Mischief.BAD_PARENTS, Mischief.FUTURE)


def refuse(mischief: Mischief | None) -> None:
    """Ends the stream with an error that the service states, for the kinds of mischief that are one."""
    match mischief:
        case Mischief.LOST:
            raise PeerLost("gone")
        case Mischief.FULL:
            raise CacheFull("no blocks")
        case Mischief.UNWANTED:
            raise InvalidRequest("open.drafter", "oracle", "one of model, or empty")


def spoil(answer: draft_pb.ProposeResponse, mischief: Mischief | None) -> None:
    """Makes a right answer wrong, for the kinds of mischief that are one."""
    match mischief:
        case Mischief.FORGET:
            answer.tokens_wanted.known_len = 0
        case Mischief.TOO_MANY:
            answer.proposal.token_ids.extend([1] * (len(answer.proposal.token_ids) + 1))
        case Mischief.OUTSIDE:
            answer.proposal.token_ids[:] = [NUM_TOKENS]
        case Mischief.BAD_PARENTS:
            answer.proposal.parents[:] = [1] * len(answer.proposal.token_ids)
        case Mischief.FUTURE:
            answer.fence.base_len += 1


def stale(right: draft_pb.ProposeResponse) -> draft_pb.ProposeResponse:
    """An answer of the epoch before, with other guesses."""
    answer = draft_pb.ProposeResponse()
    answer.CopyFrom(right)
    answer.fence.epoch -= 1
    answer.proposal.token_ids[:] = [1] * len(right.proposal.token_ids)
    return answer
