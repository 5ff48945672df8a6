"""From reply messages to plain events, and the stub that brings them. Keeps nothing, and opens no connection."""

from typing import Protocol

from google.protobuf.descriptor import EnumDescriptor

from outrider.client.events import (
    Event,
    Origin,
    PromptToken,
    RejectedToken,
    Result,
    Round,
    RoundFacts,
    SpeculationFigures,
    Token,
)
from outrider.parameters import TokenLogprob
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.wire_acceptance import acceptance_from, logprobs_from

Stub = GenerationServiceStub
"""Takes a channel of either kind."""


class Replies(Protocol):
    """A call of the stub on a blocking channel."""

    def __next__(self) -> pb.GenerateResponse:
        """The next message; raises StopIteration behind the last one."""

    def cancel(self) -> object:
        """Ends the call."""


class AsyncReplies(Protocol):
    """A call of the stub on a channel of asyncio."""

    async def read(self) -> object:
        """The next message, or something else behind the last one."""

    def cancel(self) -> object:
        """Ends the call."""

    def done(self) -> bool:
        """Whether it has ended."""


ORIGINS = {
    pb.TOKEN_ORIGIN_ACCEPTED: Origin.ACCEPTED,
    pb.TOKEN_ORIGIN_CORRECTION: Origin.CORRECTION,
    pb.TOKEN_ORIGIN_BONUS: Origin.BONUS,
}
FACTS = tuple(field.name for field in pb.RoundFacts.DESCRIPTOR.fields if field.name != "fallback_reason")


def event_from(message: pb.GenerateResponse) -> Event:
    """What a message of the stream tells."""
    return _round(message.round) if message.HasField("round") else _result(message.completion)


def event_or_end(message: object) -> Event | None:
    """The same for what an AsyncReplies reads; None at its end."""
    return event_from(message) if isinstance(message, pb.GenerateResponse) else None


def _round(message: pb.Round) -> Round:
    return Round(
        tokens=tuple(map(_token, message.tokens)),
        text=message.text_delta,
        sample_index=message.sample_index,
        prompt=tuple(PromptToken(each.token_id, each.text, _logprob(each)) for each in message.prompt_tokens),
        rejected=tuple(RejectedToken(each.token_id, each.text, _draft_logprob(each)) for each in message.rejected),
        facts=_facts(message.facts),
    )


def _token(message: pb.GeneratedToken) -> Token:
    origin = ORIGINS.get(message.origin, Origin.PLAIN)
    return Token(message.token_id, origin, message.text, _logprob(message), _draft_logprob(message))


def _logprob(token: pb.GeneratedToken | pb.PromptToken) -> TokenLogprob | None:
    return logprobs_from([token.logprob])[0] if token.HasField("logprob") else None


def _draft_logprob(token: pb.GeneratedToken | pb.RejectedToken) -> float | None:
    return token.draft_logprob if token.HasField("draft_logprob") else None


def _facts(message: pb.RoundFacts) -> RoundFacts:
    number = message.fallback_reason
    reason = _name(pb.FallbackReason.DESCRIPTOR, number, "FALLBACK_REASON_") if number else ""
    return RoundFacts(fallback_reason=reason, **{name: getattr(message, name) for name in FACTS})


def _result(message: pb.Completion) -> Result:
    return Result(
        rest=message.text_delta,
        finish_reason=_name(types_pb2.FinishReason.DESCRIPTOR, message.finish_reason, "FINISH_REASON_"),
        seed=message.seed,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        speculation=_figures(message.speculation),
        first_token_us=message.timings.first_token_us,
        total_us=message.timings.total_us,
        model_hash=message.model_hash,
        numerics_ids=tuple(message.numerics_ids) or (message.numerics_id,),
        target_reopens=message.survival.target_reopens,
        drift_repairs=message.survival.drift_repairs,
        sample_index=message.sample_index,
        acceptance=acceptance_from(message.rule, message.acceptance, "completion.rule", "completion.acceptance."),
        cached_prompt_tokens=message.usage.cached_prompt_tokens,
        queue_us=message.timings.queue_us,
    )


def _figures(message: pb.SpeculationFigures) -> SpeculationFigures:
    return SpeculationFigures(
        rounds=message.rounds,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        acceptance_rate=message.acceptance_rate,
        draft_acceptance_rate=message.draft_acceptance_rate,
        mean_acceptance_length=message.mean_acceptance_length,
        fallback_rounds=message.fallback_rounds,
        drafts=message.drafts,
    )


def _name(enum: EnumDescriptor, number: int, prefix: str) -> str:
    """A value's name without its prefix; "unknown" for a value of a newer protocol."""
    value = enum.values_by_number.get(number)
    return "unknown" if value is None else value.name.removeprefix(prefix).lower()
