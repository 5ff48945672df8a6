"""A response of OpenAI's newer protocol, whole and streamed, as its own package reads it."""

import json
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.requests.answer_events import events_of, figures_of, payloads, streamed, whole

from gateway.rest.answering import ResponseHeader
from gateway.rest.openai.responses_api import repeated
from gateway.rest.openai.responses_api_answer import ResponseWriter
from gateway.rest.openai.responses_api_body import ResponsesRequest
from outrider.answer import CallArguments, CallBegun, ContentDelta, ReasoningDelta
from outrider.errors import InvalidRequest, OutriderError, Overloaded, PeerLost
from outrider.parameters import FinishReason, SamplingParameters

HEADER = ResponseHeader("resp_1", 1, "markov", "fp")
READER: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
BODY = ResponsesRequest.model_validate({"input": "hi", "tools": [TOOL], "metadata": {"a": "b"}})
ROUNDS = [
    (ReasoningDelta("Let me "), ReasoningDelta("look.")),
    (ContentDelta("I look."),),
    (),
    (CallBegun(0, "call_1", "look"), CallArguments(0, '{"where": '), CallArguments(0, '"sea"}')),
]
TEXT_PART = ("response.content_part.added", "response.output_text.delta", "response.output_text.done")
REASONING_PART = ("response.content_part.added", "response.reasoning_text.delta", "response.reasoning_text.delta")
ADDED, DONE, PART_DONE = "response.output_item.added", "response.output_item.done", "response.content_part.done"


def new_writer(obfuscates: bool = False) -> ResponseWriter:
    """A writer that has seen nothing yet."""
    return ResponseWriter(HEADER, figures_of(), repeated(BODY, SamplingParameters(temperature=0.5)), obfuscates)


def told(*rounds: Any, **end: Any) -> list[dict[str, Any]]:
    """The events of an answer that is streamed."""
    writer = new_writer()
    return payloads(streamed(writer, writer.figures, events_of(*rounds, **end)))


def answered(*rounds: Any, **end: Any) -> dict[str, Any]:
    """An answer that is sent whole, as far as the package knows it."""
    writer = new_writer()
    text = whole(writer, writer.figures, events_of(*rounds, **end))
    Response.model_validate_json(text, strict=False)
    return dict(json.loads(text))


def test_events_come_in_openais_order() -> None:
    """Numbered from 0; an item begins empty, grows, and is reported whole before the next one begins."""
    events = told(*ROUNDS, has_calls=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress"),
        *(ADDED, *REASONING_PART, "response.reasoning_text.done", PART_DONE, DONE),
        *(ADDED, *TEXT_PART, PART_DONE, DONE),
        *(ADDED, *["response.function_call_arguments.delta"] * 2, "response.function_call_arguments.done", DONE),
        "response.completed",
    ]


def test_an_item_has_one_identity() -> None:
    """In its events, in the response at the end, and in an answer that is sent whole."""
    events = told(*ROUNDS, has_calls=True)
    begun = [event["item"]["id"] for event in events if event["type"] == ADDED]
    ended = [event["item"] for event in events if event["type"] == DONE]
    assert [item["id"] for item in ended] == begun
    assert len(set(begun)) == 3
    assert {event["item_id"] for event in events if "item_id" in event} == set(begun)
    assert events[-1]["response"]["output"] == ended == answered(*ROUNDS, has_calls=True)["output"]
    assert [item["status"] for item in ended] == ["completed"] * 3


def test_the_package_accumulates_the_stream() -> None:
    """Its own state refuses whatever does not fit together."""
    state = ResponseStreamState(input_tools=[TOOL], text_format=omit)  # type: ignore[arg-type, list-item, var-annotated]
    seen: list[Any] = []
    for event in told(*ROUNDS, has_calls=True):
        seen += state.handle_event(READER.validate_python(event))
    response = seen[-1].response
    assert response.output_text == "I look."
    [_, _, call] = response.output
    assert (call.call_id, call.name, call.parsed_arguments) == ("call_1", "look", {"where": "sea"})
    assert (response.usage.input_tokens_details.cached_tokens, response.usage.total_tokens) == (1, 8)


def test_a_limit_makes_the_response_incomplete() -> None:
    """And its last item."""
    events = told(*ROUNDS, finish_reason=FinishReason.LENGTH)
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "completed", "incomplete"]


def test_a_response_repeats_its_request() -> None:
    """With what took effect where nothing was said, and never stored."""
    response = answered((ContentDelta("Hi."),))
    told = {name: response[name] for name in ("metadata", "tools", "tool_choice", "temperature", "store", "text")}
    assert told == {
        "metadata": {"a": "b"},
        "tools": [TOOL],
        "tool_choice": "auto",
        "temperature": 0.5,
        "store": False,
        "text": {"format": {"type": "text"}},
    }
    assert (response["status"], response["outrider"]["seed"]) == ("completed", 7)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerLost("away"), "server_error"),
        (Overloaded("full"), "rate_limit_exceeded"),
        (InvalidRequest("a", 1, "2"), "invalid_prompt"),
    ],
)
def test_an_error_in_a_stream_fails_the_response(error: OutriderError, code: str) -> None:
    """What there is of it is reported, and is not complete."""
    writer = new_writer()
    events = events_of((ContentDelta("I lo"),))
    frames = [*writer.begin(), *writer.frames(0, events[1]), *writer.failure(error)]
    *_, last = payloads(b"".join(frames))
    READER.validate_python(last)
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": code, "message": error.message}
    assert last["response"]["status"] == "failed"
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_deltas_are_padded_when_asked() -> None:
    """To lengths that say little about the text."""
    writer = new_writer(obfuscates=True)
    raw = streamed(writer, writer.figures, events_of((ContentDelta("I"),), (ContentDelta(" look"),)))
    lines = [line for line in raw.split(b"\n") if b"output_text.delta" in line and line.startswith(b"data: ")]
    assert len(lines) == 2
    assert {len(line.removeprefix(b"data: ")) % 32 for line in lines} == {0}
