"""Runs litellm, in a virtual environment of its own, against the address it is given, and prints what it got as JSON.

Imports nothing of the project. Every field of the printed object is what litellm made of a reply, not the reply.
"""

import asyncio
import json
import os
import sys
from importlib.metadata import version
from typing import Any

import litellm

# Else the import asks the network what models cost.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


KEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 20, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "keep", "description": "Keeps a pet.", "parameters": KEEP}}]
MESSAGES = [{"role": "user", "content": "Tell me of the king\u2019s daughter. \U0001f409"}]
ASK = {"messages": MESSAGES, "max_tokens": 12, "seed": 5, "temperature": 0.7}


def connection(base_url: str, model: str) -> dict[str, Any]:
    """What every call needs."""
    return {"model": f"openai/{model}", "api_base": base_url, "api_key": "none", "timeout": 60, "num_retries": 0}


def answer(reply: Any) -> dict[str, Any]:
    """A reply that is not streamed."""
    choice, usage = reply.choices[0], reply.usage
    return {
        "text": choice.message.content,
        "role": choice.message.role,
        "finish_reason": choice.finish_reason,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A reply that is: litellm ends it with a chunk that has a finish reason, and puts usage on one of its own."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None) is not None]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "finish_reasons": [choice.finish_reason for choice in choices if choice.finish_reason],
        "completion_tokens": [usage.completion_tokens for usage in usages],
    }


async def asynchronous(link: dict[str, Any]) -> dict[str, Any]:
    """Both kinds once more, on an event loop."""
    whole = answer(await litellm.acompletion(**link, **ASK))
    stream = await litellm.acompletion(**link, **ASK, stream=True, stream_options={"include_usage": True})
    return {"whole": whole, "streamed": joined([chunk async for chunk in stream])}


def refusal(link: dict[str, Any], **wrong: Any) -> dict[str, Any]:
    """The exception that a bad request becomes."""
    try:
        litellm.completion(**link, **{**ASK, **wrong})
    except litellm.exceptions.APIError as error:
        return {"kind": "APIError", "status": error.status_code, "message": str(error)}
    except litellm.exceptions.BadRequestError as error:
        return {"kind": "BadRequestError", "status": error.status_code, "message": str(error)}
    return {"kind": "none"}


def call(link: dict[str, Any]) -> dict[str, Any]:
    """A tool that the model has to call, whole and as a stream that litellm puts together."""
    wanted: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    ask = {**ASK, **wanted, "max_tokens": 120, "temperature": 0.0}
    whole = litellm.completion(**link, **ask).choices[0]
    built = litellm.stream_chunk_builder(list(litellm.completion(**link, **ask, stream=True)), messages=MESSAGES)
    told = {}
    for name, choice in (("whole", whole), ("streamed", built.choices[0])):
        [made] = choice.message.tool_calls
        told[name] = {"name": made.function.name, "arguments": json.loads(made.function.arguments)}
        told[name]["finish_reason"] = choice.finish_reason
    return told


def main(base_url: str, model: str) -> None:
    """Asks for everything and prints it."""
    litellm.suppress_debug_info = True
    link = connection(base_url, model)
    stream = litellm.completion(**link, **ASK, stream=True, stream_options={"include_usage": True})
    completion = litellm.text_completion(
        **{**link, "model": f"text-completion-openai/{model}"}, prompt="Once upon a time", max_tokens=8, seed=5
    )
    told = {
        "versions": {name: version(name) for name in ("litellm", "openai")},
        "chat": answer(litellm.completion(**link, **ASK)),
        "streamed": joined(list(stream)),
        "async": asyncio.run(asynchronous(link)),
        "completion": {"text": completion.choices[0].text, "finish_reason": completion.choices[0].finish_reason},
        "refused": refusal(link, temperature=1e6),
        "call": call(link),
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
