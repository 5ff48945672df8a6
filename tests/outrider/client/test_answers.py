"""Events become whole answers; nothing of a message is lost on the way to an event."""

from dataclasses import replace

import pytest
from support.command_line import RESULT, ROUNDS, TEXT

from outrider.client import (
    DrafterFigures,
    GeneratedToken,
    Origin,
    OutriderError,
    RejectedToken,
    Result,
    Round,
    RoundFacts,
)
from outrider.client.events import AnswerBuilder, event_from
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

NAMES = {"new_numerics_id": "cuda", "drafter": "hosted", "branches": "hit"}


def test_samples_in_order_whatever_came_first() -> None:
    """Mixed events are sorted by sample, and an answer speaks for its first one."""
    builder = AnswerBuilder()
    for index in (1, 0):
        for event in ROUNDS:
            builder.add(replace(event, sample_index=index))
    for index in (1, 0):
        assert not builder.is_whole
        builder.add(replace(RESULT, sample_index=index, seed=11 + index))
    answer = builder.answer()
    assert [(sample.text, sample.result.seed) for sample in answer.samples] == [(TEXT, 11), (TEXT, 12)]
    assert (answer.text, answer.token_ids, answer.result.seed) == (TEXT, (5, 6, 7, 8, 9), 11)


@pytest.mark.parametrize("count", [0, 1])
def test_half_an_answer_is_none(count: int) -> None:
    """Neither nothing at all nor a sample without its result is an answer."""
    builder = AnswerBuilder()
    for event in ROUNDS[:count]:
        builder.add(event)
    with pytest.raises(OutriderError, match="before the answer had ended"):
        builder.answer()


def test_a_round_tells_everything() -> None:
    """Every field of the facts has its place, and so have guesses in a tree and log-probabilities of the draft."""
    facts = {field.name: 3 for field in pb.RoundFacts.DESCRIPTOR.fields if field.name not in NAMES}
    message = pb.Round(text_delta=" a", sample_index=2, facts=pb.RoundFacts(**NAMES, **facts))
    message.tokens.add(token_id=4, origin=pb.TOKEN_ORIGIN_ACCEPTED, text=" a", draft_logprob=-0.5, row=3, drafter="x")
    message.rejected.add(token_id=5, text=" b", row=4, parent=2, drafter="lookup", value=0.25)
    message.rejected.add(token_id=6, text=" c", row=5, parent=4)
    event = event_from(pb.GenerateResponse(round=message))
    assert isinstance(event, Round)
    expected = RoundFacts(**{**facts, "fallback_reason": "draft_late"}, **NAMES)  # type: ignore[arg-type]
    assert (event.facts, event.sample_index, event.text) == (expected, 2, " a")
    assert event.tokens == (GeneratedToken(4, Origin.ACCEPTED, " a", None, -0.5, 3, "x"),)
    valued = RejectedToken(5, " b", row=4, parent=2, drafter="lookup", value=0.25)
    assert event.rejected == (valued, RejectedToken(6, " c", row=5, parent=4))


def test_a_result_tells_each_drafters_part() -> None:
    """And how much of the request's prediction was kept."""
    drafters = [
        pb.DrafterFigures(drafter="lookup", draft_tokens=9, accepted_tokens=4),
        pb.DrafterFigures(draft_tokens=2),
    ]
    usage = pb.Usage(accepted_prediction_tokens=4, rejected_prediction_tokens=5)
    figures = pb.SpeculationFigures(draft_tokens=11, accepted_tokens=4, drafters=drafters)
    result = event_from(pb.GenerateResponse(completion=pb.Completion(usage=usage, speculation=figures)))
    assert isinstance(result, Result)
    assert result.speculation.drafters == (DrafterFigures("lookup", 9, 4), DrafterFigures("", 2, 0))
    assert (result.accepted_prediction_tokens, result.rejected_prediction_tokens) == (4, 5)


def test_values_of_a_newer_protocol_have_a_name() -> None:
    """A client meets gateways that are younger than itself."""
    message = pb.GenerateResponse(completion=pb.Completion(finish_reason=99))  # type: ignore[arg-type]
    assert event_from(message).finish_reason == "unknown"  # type: ignore[union-attr]
    message.completion.finish_reason = types_pb2.FINISH_REASON_STOP_STRING
    assert event_from(message).finish_reason == "stop_string"  # type: ignore[union-attr]
