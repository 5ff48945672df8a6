"""Facts of a finished sample as the message Completion, and back."""

from dataclasses import asdict
from typing import Any

from google.protobuf.descriptor import EnumDescriptor

from outrider.answer import SECTIONS, CompletionFacts, DrafterFigures, SpeculationFigures
from outrider.parameters import FinishReason
from outrider.rpc.messages.round import finish_reason_message
from outrider.rpc.messages.rules import RULES, acceptance_from, settings_message
from outrider.rpc.messages.session import sampling_from, sampling_message
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

FIGURES = tuple(each for each in SpeculationFigures.__dataclass_fields__ if each != "drafters")


def completion_message(facts: CompletionFacts) -> pb.Completion:
    """The message, still without text and deltas."""
    return pb.Completion(
        finish_reason=finish_reason_message(FinishReason(facts.finish_reason)),
        sample_index=facts.sample_index,
        seed=facts.seed,
        usage=pb.Usage(**facts.section("usage")),
        speculation=pb.SpeculationFigures(**asdict(facts.speculation)),
        timings=pb.Timings(**facts.section("timings")),
        survival=pb.SurvivalFigures(**facts.section("survival")),
        model_hash=facts.model_hash,
        numerics_id=facts.numerics_ids[-1],
        numerics_ids=facts.numerics_ids,
        rule=RULES[facts.acceptance.rule],
        acceptance=settings_message(facts.acceptance),
        sampling=sampling_message(facts.sampling),
        cumulative_logprob=facts.cumulative_logprob,
        has_calls=facts.has_calls,
        ignored_keywords=facts.ignored_keywords,
    )


def facts_from(message: pb.Completion) -> dict[str, Any]:
    """Fields of CompletionFacts, of which a newer gateway may know other finish reasons: those are "unknown"."""
    figures = message.speculation
    drafters = (DrafterFigures(each.drafter, each.draft_tokens, each.accepted_tokens) for each in figures.drafters)
    sections = {name: getattr(getattr(message, of), name) for of, names in SECTIONS.items() for name in names}
    return sections | {
        "finish_reason": enum_name(types_pb2.FinishReason.DESCRIPTOR, message.finish_reason, "FINISH_REASON_"),
        "sample_index": message.sample_index,
        "seed": message.seed,
        "speculation": SpeculationFigures(
            **{name: getattr(figures, name) for name in FIGURES}, drafters=tuple(drafters)
        ),
        "model_hash": message.model_hash,
        "numerics_ids": tuple(message.numerics_ids) or (message.numerics_id,),
        "acceptance": acceptance_from(message.rule, message.acceptance, "completion.rule", "completion.acceptance."),
        "sampling": sampling_from(message.sampling, "completion.sampling."),
        "cumulative_logprob": message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        "has_calls": message.has_calls,
        "ignored_keywords": tuple(message.ignored_keywords),
    }


def enum_name(enum: EnumDescriptor, number: int, prefix: str) -> str:
    """A value's name without its prefix; "unknown" for a value of a newer protocol."""
    value = enum.values_by_number.get(number)
    return "unknown" if value is None else value.name.removeprefix(prefix).lower()
