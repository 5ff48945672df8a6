"""Deltas of an answer from messages, and what they are together: reasoning, and calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta
from outrider.v1 import generation_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; the arguments are a JSON object as text."""

    id: str
    name: str
    arguments: str


def deltas_from(messages: Iterable[pb.Delta], text: str) -> tuple[Delta, ...]:
    """New pieces of an answer in a message; where it lists nothing, its text. Those of newer protocols are left out."""
    found: list[Delta] = []
    for message in messages:
        match message.WhichOneof("kind"):
            case "content":
                found.append(ContentDelta(message.content))
            case "reasoning":
                found.append(ReasoningDelta(message.reasoning))
            case "call_begun":
                begun = message.call_begun
                found.append(CallBegun(begun.index, begun.id, begun.name))
            case "call_arguments":
                found.append(CallArguments(message.call_arguments.index, message.call_arguments.text))
    if not found and text:
        found.append(ContentDelta(text))
    return tuple(found)


def calls_of(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    """Calls of tools, in order."""
    begun: dict[int, CallBegun] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        match delta:
            case CallBegun():
                begun[delta.index] = delta
            case CallArguments():
                arguments[delta.index] = arguments.get(delta.index, "") + delta.text
    return tuple(ToolCall(call.call_id, call.name, arguments.get(index, "")) for index, call in begun.items())
