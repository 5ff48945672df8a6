"""Parts of every message of a round, as protobuf and plain: fence, times, log-probabilities, steps, and the end."""

from collections.abc import Iterable

from outrider.beams import BeamStep, Candidate
from outrider.estimates.timing import ComputeTimes
from outrider.parameters import (
    FinishReason,
    TokenLogprob,
)
from outrider.rpc.fencing import Fence
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb

FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
FINISH_REASONS_BY_NUMBER = {number: reason for reason, number in FINISH_REASONS.items()}


def fence_from(message: pb.Fence) -> Fence:
    """The fence of a request, whatever it says."""
    return Fence(message.session_id, message.epoch, message.base_len)


def write_fence(message: pb.Fence, fence: Fence) -> None:
    message.session_id, message.epoch, message.base_len = fence.session_id, fence.epoch, fence.base_len


def fence_message(fence: Fence) -> pb.Fence:
    return pb.Fence(session_id=fence.session_id, epoch=fence.epoch, base_len=fence.base_len)


def steps_from(steps: Iterable[target_pb.BeamStep]) -> tuple[BeamStep, ...]:
    """The steps of a search, whatever they say."""

    def candidates(entries: Iterable[target_pb.BeamCandidate]) -> tuple[Candidate, ...]:
        return tuple(Candidate(each.parent, each.token_id, each.score) for each in entries)

    return tuple(BeamStep(candidates(step.live), candidates(step.ended)) for step in steps)


def step_message(step: BeamStep) -> target_pb.BeamStep:
    def entries(candidates: Iterable[Candidate]) -> list[target_pb.BeamCandidate]:
        return [target_pb.BeamCandidate(**each._asdict()) for each in candidates]

    return target_pb.BeamStep(live=entries(step.live), ended=entries(step.ended))


def write_times(message: pb.ComputeTimes, times: ComputeTimes) -> None:
    message.queue_us, message.compute_us = times.queue_us, times.compute_us
    message.forward_count, message.row_count = times.forward_count, times.row_count
    message.prompt_row_count = times.prompt_row_count


def times_message(times: ComputeTimes) -> pb.ComputeTimes:
    message = pb.ComputeTimes()
    write_times(message, times)
    return message


def finish_reason(message: pb.FinishReason.ValueType) -> FinishReason | None:
    """Reason why a request ended, None while it goes on or for a reason of a newer protocol."""
    return FINISH_REASONS_BY_NUMBER.get(message)


def finish_reason_message(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """The reason to send; unspecified while the request goes on."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def logprob_message(each: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(logprob=each.logprob, top_token_ids=each.top_token_ids, top_logprobs=each.top_logprobs)


def logprob_size(count: int, vocabulary_size: int) -> int:
    """Most bytes that an entry with `count` alternatives takes in a list of them."""
    id_bytes = -(-max(vocabulary_size - 1, 1).bit_length() // 7)
    # Nine for the number; two lists with tag and length, of which the longer may need two bytes; the entry's own.
    return 9 + (2 + count * id_bytes) + (3 + 8 * count) + 3


def logprobs_from(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs)) for message in messages
    )
