"""Facts of a finished sample cross the wire whole."""

from dataclasses import fields

from outrider.answer import SECTIONS, CompletionFacts, DrafterFigures, SpeculationFigures
from outrider.parameters import Acceptance, Rule, SamplingParameters
from outrider.rpc.messages.completion import completion_message, facts_from
from outrider.v1 import generation_service_pb2 as pb

FACTS = CompletionFacts(
    finish_reason="stop_string",
    sample_index=1,
    seed=-7,
    prompt_tokens=12,
    cached_prompt_tokens=11,
    completion_tokens=10,
    accepted_prediction_tokens=9,
    rejected_prediction_tokens=8,
    reasoning_tokens=7,
    speculation=SpeculationFigures(6, 5, 4, 3, 4, 0.75, 0.7, 1.6, 2, (DrafterFigures("lookup", 4, 3),)),
    first_token_us=300,
    total_us=500,
    queue_us=200,
    target_reopens=2,
    drift_repairs=1,
    model_hash="hash",
    numerics_ids=("cpu", "cuda"),
    acceptance=Acceptance(rule=Rule.LENIENT, lenience=0.25),
    sampling=SamplingParameters(temperature=0.5),
    cumulative_logprob=-1.5,
    has_calls=True,
    ignored_keywords=("not",),
)


def test_facts_survive_the_wire() -> None:
    """Every fact comes back as it was, and none of these was left at its default."""
    message = pb.Completion.FromString(completion_message(FACTS).SerializeToString())
    assert CompletionFacts(**facts_from(message)) == FACTS
    assert [each.name for each in fields(FACTS) if getattr(FACTS, each.name) == each.default] == []


def test_sections_are_messages_with_the_same_fields() -> None:
    """A figure that is added to one of them is missed in neither."""
    for section, names in SECTIONS.items():
        message = pb.Completion.DESCRIPTOR.fields_by_name[section].message_type
        assert {each.name for each in message.fields} == set(names)


def test_sections_are_there_without_a_figure() -> None:
    """A section of zeros is a message of zeros, not an absent one."""
    message = completion_message(CompletionFacts(**facts_from(pb.Completion(finish_reason=1))))
    assert [section for section in (*SECTIONS, "speculation") if not message.HasField(section)] == []


def test_a_reason_of_a_newer_protocol_is_unknown() -> None:
    """A client that is older than its gateway reads on."""
    assert facts_from(pb.Completion(finish_reason=99))["finish_reason"] == "unknown"
