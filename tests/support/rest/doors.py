"""One question by every door of a gateway: chat, the Responses API, messages and completions, and gRPC's two calls."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from support.services.reciting import RecitingStack

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

Schema = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool as a client offers it; of one whose `strict` is None the client does not say."""

    name: str
    parameters: Schema
    strict: bool | None = None

    def fields(self, schema_name: str) -> dict[str, Any]:
        """Its fields, with what was said."""
        strict = {} if self.strict is None else {"strict": self.strict}
        return {"name": self.name, schema_name: self.parameters, **strict}


@dataclass(frozen=True)
class Question:
    """What is asked, and how it may be answered. `prompt` is what completions go on with."""

    text: str
    prompt: str = ""
    tools: Sequence[Tool] = ()
    must_call: bool = False
    schema: Schema | None = None
    strict: bool | None = None
    max_tokens: int = 400


@dataclass
class Said:
    """An answer: its parts, why it ended and whether it was refused."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    error: str = ""


def _shape(asked: Question) -> dict[str, Any]:
    strict = {} if asked.strict is None else {"strict": asked.strict}
    return {"name": "shape", "schema": asked.schema, **strict}


def _refused(reply: httpx.Response) -> Said | None:
    return None if reply.status_code == 200 else Said(error=reply.json()["error"]["message"])


def _events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def _chat_body(asked: Question) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": asked.text}], "max_tokens": asked.max_tokens}
    if asked.tools:
        body["tools"] = [{"type": "function", "function": tool.fields("parameters")} for tool in asked.tools]
        body["tool_choice"] = "required" if asked.must_call else "auto"
    if asked.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": _shape(asked)}
    return body


async def chat(stack: RecitingStack, asked: Question) -> Said:
    """POST /v1/chat/completions, whole."""
    reply = await stack.http.post("/v1/chat/completions", json=_chat_body(asked))
    if refused := _refused(reply):
        return refused
    [choice] = reply.json()["choices"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return Said(
        message["content"] or "",
        message.get("reasoning_content", ""),
        [(each["name"], json.loads(each["arguments"])) for each in calls],
        choice["finish_reason"] == "length",
    )


async def chat_stream(stack: RecitingStack, asked: Question) -> Said:
    """POST /v1/chat/completions, put together from its chunks."""
    reply = await stack.http.post("/v1/chat/completions", json={**_chat_body(asked), "stream": True})
    if refused := _refused(reply):
        return refused
    said, names, arguments = Said(), dict[int, str](), dict[int, str]()
    for chunk in _events(reply):
        [choice] = chunk["choices"]
        delta = choice["delta"]
        said.content += delta.get("content") or ""
        said.reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            names.setdefault(call["index"], call["function"].get("name", ""))
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
        said.is_cut = said.is_cut or choice["finish_reason"] == "length"
    said.calls = [(name, json.loads(arguments[index])) for index, name in names.items()]
    return said


async def responses(stack: RecitingStack, asked: Question) -> Said:
    """POST /v1/responses: the items of the last event, whose text is that of the events before."""
    body: dict[str, Any] = {"input": asked.text, "max_output_tokens": asked.max_tokens, "stream": True}
    if asked.tools:
        body["tools"] = [{"type": "function", **tool.fields("parameters")} for tool in asked.tools]
        body["tool_choice"] = "required" if asked.must_call else "auto"
    if asked.schema is not None:
        body["text"] = {"format": {"type": "json_schema", **_shape(asked)}}
    reply = await stack.http.post("/v1/responses", json=body)
    if refused := _refused(reply):
        return refused
    events = _events(reply)
    response = events[-1]["response"]
    said = Said(is_cut=response["status"] == "incomplete")
    for item in response["output"]:
        match item["type"]:
            case "message":
                said.content += "".join(part["text"] for part in item["content"])
            case "reasoning":
                said.reasoning += "".join(part["text"] for part in item["content"])
            case "function_call":
                said.calls.append((item["name"], json.loads(item["arguments"])))
    assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == said.content
    return said


async def messages(stack: RecitingStack, asked: Question) -> Said:
    """POST /v1/messages, where a form is always strict."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": asked.text}], "max_tokens": asked.max_tokens}
    if asked.tools:
        body["tools"] = [tool.fields("input_schema") for tool in asked.tools]
        body["tool_choice"] = {"type": "any" if asked.must_call else "auto"}
    if asked.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": asked.schema}}
    reply = await stack.http.post("/v1/messages", json=body)
    if refused := _refused(reply):
        return refused
    told = reply.json()
    blocks = told["content"]
    return Said(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        told["stop_reason"] == "max_tokens",
    )


async def completions(stack: RecitingStack, asked: Question) -> Said:
    """POST /v1/completions, where all of an answer is text."""
    body: dict[str, Any] = {"prompt": asked.prompt, "max_tokens": asked.max_tokens}
    if asked.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": _shape(asked)}
    reply = await stack.http.post("/v1/completions", json=body)
    if refused := _refused(reply):
        return refused
    streamed = await stack.http.post("/v1/completions", json={**body, "stream": True})
    [choice] = reply.json()["choices"]
    assert "".join(each["choices"][0]["text"] for each in _events(streamed)) == choice["text"]
    return Said(choice["text"], is_cut=choice["finish_reason"] == "length")


def _generation(asked: Question) -> pb.GenerateRequest:
    generation = pb.GenerateRequest(max_tokens=asked.max_tokens)
    if asked.schema is not None:
        generation.constraint.json_schema = json.dumps(asked.schema)
        generation.constraint.is_lenient = not asked.strict
    return generation


async def _grpc(call: Any) -> Said:
    said, calls = Said(), dict[int, list[str]]()
    try:
        async for response in call:
            is_end = response.HasField("completion")
            event = response.completion if is_end else response.round
            if not event.deltas:
                said.content += event.text_delta
            for delta in event.deltas:
                said.content += delta.content
                said.reasoning += delta.reasoning
                if delta.HasField("call_begun"):
                    calls[delta.call_begun.index] = [delta.call_begun.name, ""]
                if delta.HasField("call_arguments"):
                    calls[delta.call_arguments.index][1] += delta.call_arguments.text
            said.is_cut = is_end and event.finish_reason == types_pb2.FINISH_REASON_LENGTH
    except grpc.aio.AioRpcError as error:
        return Said(error=str(error.details()))
    said.calls = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return said


async def grpc_chat(stack: RecitingStack, asked: Question) -> Said:
    """Chat of the GenerationService."""
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=asked.text)],
        tools=[
            pb.Tool(name=tool.name, parameters=json.dumps(tool.parameters), strict=bool(tool.strict))
            for tool in asked.tools
        ],
        generation=_generation(asked),
    )
    if asked.must_call:
        request.tool_choice.mode = pb.TOOL_MODE_REQUIRED
    return await _grpc(stack.stub.Chat(request))


async def grpc_generate(stack: RecitingStack, asked: Question) -> Said:
    """Generate of the GenerationService, where all of an answer is text."""
    generation = _generation(asked)
    generation.text = asked.prompt
    return await _grpc(stack.stub.Generate(generation))


Door = Callable[[RecitingStack, Question], Awaitable[Said]]
CHAT_DOORS: tuple[Door, ...] = (chat, chat_stream, responses, messages, grpc_chat)
TEXT_DOORS: tuple[Door, ...] = (completions, grpc_generate)
