"""Runs instructor, pydantic-ai and llm, in a virtual environment of their own, and prints what they got as JSON.

Imports nothing of the project. Each entry of the printed object is a pet as one way of asking for one returned it.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import instructor
import openai
from pets import QUESTION, Pet
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MAX_TOKENS = 120


def of_instructor(base_url: str, model: str) -> dict[str, Any]:
    """Whole in two modes, and as a stream of what is known of the pet so far, of which the last counts."""

    def client(mode: instructor.Mode) -> instructor.Instructor:
        return instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=mode)

    ask: dict[str, Any] = {
        "model": model,
        "response_model": Pet,
        "max_tokens": MAX_TOKENS,
        "max_retries": 0,
        "temperature": 0.0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    found = {
        f"instructor {mode.name}": client(mode).chat.completions.create(**ask)
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
    }
    partial = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(**ask)
    found["instructor partial"] = list(partial)[-1]
    return {name: pet.model_dump() for name, pet in found.items()}


def of_pydantic_ai(base_url: str, model: str) -> dict[str, Any]:
    """By a schema and by a call, whole and streamed, over chat completions and responses."""
    outputs: dict[str, Callable[[], Any]] = {"native": lambda: NativeOutput(Pet), "tool": lambda: ToolOutput(Pet)}
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    found: dict[str, Any] = {}

    async def streamed(agent: Agent[None, Pet]) -> Pet:
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()

    async def ask() -> None:
        for kind in (OpenAIChatModel, OpenAIResponsesModel):
            for name, output in outputs.items():
                agent: Agent[None, Pet] = Agent(
                    kind(model, provider=provider),
                    output_type=output(),
                    model_settings={"max_tokens": MAX_TOKENS, "temperature": 0.0},
                    retries=0,
                )
                found[f"{kind.__name__} {name}"] = (await agent.run(QUESTION)).output.model_dump()
                found[f"{kind.__name__} {name} streamed"] = (await streamed(agent)).model_dump()

    asyncio.run(ask())
    return found


def of_llm(base_url: str, model: str) -> dict[str, Any]:
    """From its command line, with a schema."""
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "pet", "model_name": model, "api_base": base_url, "supports_schema": True}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([entry]))
        options = ["-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS), "--no-stream", "--no-log"]
        command = [sys.executable, "-m", "llm", "-m", "pet", "--schema", json.dumps(Pet.model_json_schema()), *options]
        run = subprocess.run(
            [*command, QUESTION],
            env={**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return {"llm": json.loads(run.stdout)}


def main(base_url: str, model: str) -> None:
    """Asks everybody and prints it."""
    found = of_instructor(base_url, model) | of_pydantic_ai(base_url, model) | of_llm(base_url, model)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
