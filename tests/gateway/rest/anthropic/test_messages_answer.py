"""A message of Anthropic's protocol, whole and streamed, as its own package reads it."""

from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from support.requests.answer_events import events_of, figures_of, payloads, streamed, whole

from gateway.generation.events import Event
from gateway.rest.answering import ResponseHeader
from gateway.rest.anthropic.messages_answer import MessageWriter
from outrider.answer import CallArguments, CallBegun, ContentDelta, ReasoningDelta
from outrider.errors import Overloaded, PeerLost, ProtocolViolation
from outrider.parameters import FinishReason

HEADER = ResponseHeader("msg_1", 1, "markov", "fp")
READER: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
ROUNDS = [
    (ReasoningDelta("Let me "),),
    (ReasoningDelta("look."), ContentDelta("I"), ContentDelta(" look.")),
    (),
    (CallBegun(0, "call_1", "look"), CallArguments(0, '{"where": "s'), CallArguments(0, 'ea"}')),
    (CallBegun(1, "call_2", "stop"), CallArguments(1, "{}")),
]


def writer_of(events: list[Event], max_tokens: int = 9, *, fills_context: bool = False) -> MessageWriter:
    """A writer that has seen nothing yet; the answer has room for 62 tokens."""
    return MessageWriter(HEADER, figures_of(fills_context=fills_context), max_tokens)


def answered(*rounds: Any, max_tokens: int = 9, fills_context: bool = False, **end: Any) -> Message:
    """An answer that is sent whole."""
    events = events_of(*rounds, **end)
    writer = writer_of(events, max_tokens, fills_context=fills_context)
    return Message.model_validate_json(whole(writer, writer.figures, events))


def accumulated(*rounds: Any, **end: Any) -> Message:
    """An answer that is streamed, put together by the package."""
    events = events_of(*rounds, **end)
    writer = writer_of(events)
    snapshot, pieces = None, dict[int, bytes]()
    for payload in payloads(streamed(writer, writer.figures, events)):
        event = READER.validate_python(payload)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=pieces)
    assert snapshot is not None
    return Message.model_validate(snapshot.to_dict())


def test_blocks_of_a_stream_follow_one_another() -> None:
    """Each begins empty, grows and ends before the next one; thinking is signed at its end."""
    writer = writer_of([])
    told = payloads(streamed(writer, writer.figures, events_of(*ROUNDS, has_calls=True)))
    steps = [(each["type"], each.get("index"), each.get("delta", {}).get("type")) for each in told]
    assert steps == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert told[10]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    assert told[-2]["outrider"]["seed"] == 7


def test_whole_and_streamed_are_one_message() -> None:
    """With content, reason and usage, of which cached tokens are a part of their own."""
    message = answered(*ROUNDS, has_calls=True)
    assert accumulated(*ROUNDS, has_calls=True).content == message.content
    thinking, text, *calls = message.to_dict()["content"]  # type: ignore[misc]
    assert (thinking["thinking"], text["text"]) == ("Let me look.", "I look.")
    assert thinking["signature"]
    assert [(call["id"], call["name"], call["input"]) for call in calls] == [
        ("call_1", "look", {"where": "sea"}),
        ("call_2", "stop", {}),
    ]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 1, 6)
    assert accumulated(*ROUNDS).usage == usage


@pytest.mark.parametrize(
    ("end", "max_tokens", "fills_context", "expected"),
    [
        ({}, 9, True, ("end_turn", None)),
        ({"finish_reason": FinishReason.STOP_TOKEN}, 9, True, ("end_turn", None)),
        ({"finish_reason": FinishReason.STOP_STRING, "stop_string": "\n\n"}, 9, True, ("stop_sequence", "\n\n")),
        ({"finish_reason": FinishReason.LENGTH}, 62, True, ("max_tokens", None)),
        ({"finish_reason": FinishReason.LENGTH}, 63, True, ("model_context_window_exceeded", None)),
        ({"finish_reason": FinishReason.LENGTH}, 63, False, ("max_tokens", None)),
        ({"finish_reason": FinishReason.LENGTH, "has_calls": True}, 62, True, ("max_tokens", None)),
        ({"has_calls": True}, 9, True, ("tool_use", None)),
    ],
)
def test_the_reason_to_stop_has_its_word(
    end: dict[str, Any], max_tokens: int, fills_context: bool, expected: tuple[str, str]
) -> None:
    """The end of the context is another than the limit that was asked for, or than that of a key."""
    message = answered((ContentDelta("Hi."),), max_tokens=max_tokens, fills_context=fills_context, **end)
    assert (message.stop_reason, message.stop_sequence) == expected


def test_an_answer_may_be_empty() -> None:
    """It has no block at all."""
    assert answered().content == accumulated().content == []


def test_arguments_that_were_cut_are_kept_as_text() -> None:
    """They are no object, and must not look like one that is whole."""
    message = answered((CallBegun(0, "call_1", "look"), CallArguments(0, '{"where": "s')))
    assert message.to_dict()["content"][0]["input"] == {"partial_json": '{"where": "s'}  # type: ignore[index]


def test_arguments_of_no_call_are_a_fault() -> None:
    """They would be lost otherwise."""
    with pytest.raises(ProtocolViolation):
        answered((ContentDelta("Hi."), CallArguments(0, "{}")))


def test_an_error_in_a_stream_has_its_shape() -> None:
    """The type follows from what went wrong, as for an answer that has not begun."""
    writer = writer_of([])
    [lost], [full] = (payloads(b"".join(writer.failure(error))) for error in (PeerLost("away"), Overloaded("full")))
    assert lost == {"type": "error", "error": {"type": "overloaded_error", "message": "away"}}
    assert full["error"]["type"] == "rate_limit_error"
