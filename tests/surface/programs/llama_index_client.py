"""Runs llama-index, in litellm's virtual environment, against the address it is given, and prints what it got as JSON.

Imports nothing of the project.
"""

import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pets import QUESTION, Pet


def keep(name: str, kind: str, age: int) -> str:
    """Keeps a pet."""
    return f"{name} the {kind}, {age}"


def main(base_url: str, model: str) -> None:
    """Asks for everything and prints it."""
    options: dict[str, Any] = {"model": model, "api_base": base_url, "api_key": "none", "max_retries": 0}
    llm = OpenAILike(
        **options,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=120,
        temperature=0.0,
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    # What is said of the parameters in the function's own annotations does not reach the model.
    tool = FunctionTool.from_defaults(keep, fn_schema=Pet)
    called = llm.chat_with_tools([tool], chat_history=messages, tool_required=True)
    calls = llm.get_tool_calls_from_response(called)
    told = {
        "whole": llm.chat(messages).message.content,
        "streamed": "".join(part.delta or "" for part in llm.stream_chat(messages)),
        "pet": llm.structured_predict(Pet, PromptTemplate(QUESTION)).model_dump(),
        "call": {"name": calls[0].tool_name, "arguments": calls[0].tool_kwargs},
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
