"""Parts of every message of a round, as protobuf and plain: fence, times, log-probabilities, steps, load, end."""

from collections.abc import Iterable

from outrider.beams import BeamStep, Candidate
from outrider.errors import InvalidRequest, check_range
from outrider.estimates.prefixes import PrefixNews
from outrider.estimates.timing import ComputeTimes, ServiceLoad
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

# No service has more, and what is chosen by such figures stays finite.
MAX_TOKENS, MAX_US, MAX_LINKS, MAX_ROWS = 1 << 40, 1 << 40, 1 << 16, 1 << 20


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


def write_load(message: pb.ServiceLoad, load: ServiceLoad) -> None:
    message.waiting_tokens, message.own_waiting_tokens = load.waiting_tokens, load.own_waiting_tokens
    message.owner_count = load.owner_count
    message.free_blocks, message.cached_blocks = load.free_blocks, load.cached_blocks
    message.step_us, message.step_rows = load.step_us, load.step_rows
    message.prefill_us_per_token = load.prefill_us_per_token
    message.is_draining, message.drain_left_ms = load.is_draining, load.drain_left_ms


def write_news(message: pb.PrefixNews, news: PrefixNews) -> None:
    message.number, message.has_more = news.number, news.has_more
    message.added.extend(news.added)
    message.removed.extend(news.removed)


def news_from(message: pb.PrefixNews) -> PrefixNews:
    return PrefixNews(message.number, message.added, message.removed, message.has_more)


def load_from(message: pb.ServiceLoad, block_count: int, came_s: float) -> ServiceLoad:
    """The load of a service with a cache of so many blocks; raises InvalidRequest about what none can have."""
    waiting_tokens = check_range("load.waiting_tokens", message.waiting_tokens, 0, MAX_TOKENS)
    free_blocks = check_range("load.free_blocks", message.free_blocks, 0, block_count)
    prefill_us = message.prefill_us_per_token
    # Comparisons with what is no number are false.
    if not 0 <= prefill_us <= MAX_US:
        raise InvalidRequest("load.prefill_us_per_token", prefill_us, f"in [0, {MAX_US}]")
    return ServiceLoad(
        waiting_tokens,
        check_range("load.own_waiting_tokens", message.own_waiting_tokens, 0, waiting_tokens),
        check_range("load.owner_count", message.owner_count, 1, MAX_LINKS),
        free_blocks,
        check_range("load.cached_blocks", message.cached_blocks, 0, free_blocks),
        check_range("load.step_us", message.step_us, 0, MAX_US),
        check_range("load.step_rows", message.step_rows, 0, MAX_ROWS),
        prefill_us,
        message.is_draining,
        check_range("load.drain_left_ms", message.drain_left_ms, 0, (1 << 31) - 1),
        came_s,
    )


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
