"""Events of an answer made by hand, as a reader of tool calls and reasoning would make them."""

import json
from dataclasses import replace
from typing import Any

from support.basics import spec_of

from gateway.generation.events import CompletionEvent, Event, OutputToken, RoundEvent
from gateway.generation.request import CheckedRequest
from gateway.rest.answering import AnswerWriter, ChoiceBuffer
from gateway.rest.figures import ResponseFigures
from gateway.rounds.round import TokenOrigin
from outrider.answer import Delta, SpeculationFigures
from outrider.parameters import FinishReason


def ended(**changes: Any) -> CompletionEvent:
    """The end of an answer of six tokens to a prompt of two, of which one was cached."""
    fields: dict[str, Any] = {
        "finish_reason": FinishReason.EOS,
        "prompt_tokens": 2,
        "cached_prompt_tokens": 1,
        "completion_tokens": 6,
        "seed": 7,
        "speculation": SpeculationFigures(),
        "model_hash": "hash",
        "numerics_ids": ("numerics",),
        "text_delta": "",
        "first_token_us": 30_000,
        "total_us": 130_000,
        "queue_us": 10_000,
    }
    return CompletionEvent(**{**fields, **changes})


def events_of(*rounds: tuple[Delta, ...], **end: Any) -> list[Event]:
    """A round for each tuple of deltas, of which the first has all six tokens, and the end."""
    tokens = (OutputToken(1, TokenOrigin.PLAIN, ""),) * 6
    events = [RoundEvent((), None, deltas=deltas) for deltas in ((), *rounds)]
    return [replace(events[0], tokens=tokens), *events[1:], ended(**end)]


def figures_of(max_len: int = 64, *, fills_context: bool = False) -> ResponseFigures:
    """Figures of a prompt of two tokens, with room for an answer up to max_len tokens in all, which may be the
    context.
    """
    spec = spec_of([3, 5], max_len=max_len)
    return ResponseFigures([CheckedRequest(spec, (), None, fills_context=fills_context)], 4)


def streamed(writer: AnswerWriter, figures: ResponseFigures, events: list[Event]) -> bytes:
    """All frames of a stream."""
    frames = writer.begin()
    for event in events:
        figures.add(0, event)
        frames += writer.frames(0, event)
    return b"".join([*frames, *writer.end()])


def whole(writer: AnswerWriter, figures: ResponseFigures, events: list[Event]) -> str:
    """The answer that is sent whole."""
    choice = ChoiceBuffer()
    for event in events:
        figures.add(0, event)
        choice.add(event)
    return writer.whole([choice])


def payloads(raw: bytes) -> list[dict[str, Any]]:
    """All events of a stream, each of the type that its first line says."""
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found
