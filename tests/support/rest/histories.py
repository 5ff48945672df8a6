"""One conversation by every door that takes conversations, as a client has it from whatever server answered before."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from support.services.reciting import RecitingStack

from outrider.v1 import generation_service_pb2 as pb

HEADER = "x-outrider-ignored"


@dataclass(frozen=True)
class Said:
    """A turn in which `role` says a text."""

    role: str
    text: str


@dataclass(frozen=True)
class Called:
    """A turn of calls: id, name and arguments as text."""

    calls: Sequence[tuple[str, str, str]]
    text: str = ""


@dataclass(frozen=True)
class Gave:
    """What the call with an id gave."""

    call_id: str
    text: str


Turns = Sequence[Said | Called | Gave]


@dataclass(frozen=True)
class Taken:
    """How a conversation was taken: the names of the header, or an error and the field that it names."""

    ignored: str = ""
    error: str = ""
    field: str = ""


def _of(reply: httpx.Response) -> Taken:
    if reply.status_code == 200:
        return Taken(reply.headers.get(HEADER, ""))
    message = reply.json()["error"]["message"]
    return Taken(error=message, field=message.split()[0])


async def chat(stack: RecitingStack, turns: Turns) -> Taken:
    """POST /v1/chat/completions."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        match turn:
            case Said(role, text):
                messages.append({"role": role, "content": text})
            case Called(calls, text):
                made = [
                    {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
                    for each, name, arguments in calls
                ]
                messages.append({"role": "assistant", "content": text or None, "tool_calls": made})
            case Gave(call_id, text):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    return _of(await stack.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4}))


async def responses(stack: RecitingStack, turns: Turns) -> Taken:
    """POST /v1/responses."""
    items: list[dict[str, Any]] = []
    for turn in turns:
        match turn:
            case Said(role, text):
                items.append({"role": role, "content": text})
            case Called(calls, text):
                items += [{"role": "assistant", "content": text}] if text else []
                items += [
                    {"type": "function_call", "call_id": each, "name": name, "arguments": arguments}
                    for each, name, arguments in calls
                ]
            case Gave(call_id, text):
                items.append({"type": "function_call_output", "call_id": call_id, "output": text})
    return _of(await stack.http.post("/v1/responses", json={"input": items, "max_output_tokens": 4}))


async def messages(stack: RecitingStack, turns: Turns) -> Taken:
    """POST /v1/messages, where rules are the system's and arguments are objects, or what is left of them."""
    said: list[dict[str, Any]] = []
    for turn in turns:
        match turn:
            case Said(role, text):
                said.append({"role": {"developer": "system"}.get(role, role), "content": text})
            case Called(calls, text):
                blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
                for each, name, arguments in calls:
                    try:
                        found = json.loads(arguments)
                    except ValueError:
                        found = arguments
                    blocks.append({"type": "tool_use", "id": each, "name": name, "input": found})
                said.append({"role": "assistant", "content": blocks})
            case Gave(call_id, text):
                result = {"type": "tool_result", "tool_use_id": call_id, "content": text}
                said.append({"role": "user", "content": [result]})
    return _of(await stack.http.post("/v1/messages", json={"messages": said, "max_tokens": 4}))


async def grpc_chat(stack: RecitingStack, turns: Turns) -> Taken:
    """Chat of the GenerationService, which names in its metadata what REST names in a header."""
    said = []
    for turn in turns:
        match turn:
            case Said(role, text):
                said.append(pb.ChatMessage(role=role, content=text))
            case Called(calls, text):
                made = [pb.ToolCall(id=each, name=name, arguments=arguments) for each, name, arguments in calls]
                said.append(pb.ChatMessage(role="assistant", content=text, tool_calls=made))
            case Gave(call_id, text):
                said.append(pb.ChatMessage(role="tool", tool_call_id=call_id, content=text))
    call = stack.stub.Chat(pb.ChatRequest(messages=said, generation=pb.GenerateRequest(max_tokens=4)))
    try:
        head = await call.initial_metadata()
        assert [each async for each in call]
    except grpc.aio.AioRpcError as error:
        return Taken(error=str(error.details()), field=str(error.details()).split()[0])
    return Taken(dict(head).get(HEADER, ""))


Door = Callable[[RecitingStack, Turns], Awaitable[Taken]]
DOORS: tuple[Door, ...] = (chat, responses, messages, grpc_chat)
