"""Vercel's AI SDK, LibreChat's library and promptfoo, unmodified, as npm has them, with the Node that they ask for."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, output_of, run_client, said
from support.services.reciting import reciting_stack
from surface.programs.pets import Pet

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.agents]
CLIENTS = Path(__file__).resolve().parents[3] / ".npm-clients" / "node_modules"
NODE = CLIENTS / "node" / "bin" / "node"
QUESTION = "Tell me of a fox."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SCHEMA = Pet.model_json_schema()
PATIENCE_S = 240


async def ask_library(name: str, base_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results that the script of the libraries prints."""
    monkeypatch.setenv("NODE_PATH", str(CLIENTS))
    return await run_client(NODE, "npm_clients.cjs", name, base_url, model, json.dumps(SCHEMA))


async def test_vercels_sdk_gets_text_objects_and_calls(rest: RestStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and streamed they are one, and text is what the same body gets; a bad value is an error with a sentence."""
    told = await ask_library("vercel", rest.base_url, await rest.model(), monkeypatch)
    for way in ("text", "object", "call"):
        assert told[way]["streamed"] == told[way]["whole"]
    [choice] = (await rest.ask(CHAT, **said(QUESTION), **GREEDY))["choices"]
    text = told["text"]["whole"]
    assert (text["text"], text["reason"], text["tokens"]) == (choice["message"]["content"], "length", 12)
    assert jsonschema_rs.is_valid(SCHEMA, told["object"]["whole"]["object"])
    [call] = told["call"]["whole"]["calls"]
    assert (call["name"], told["call"]["whole"]["reason"]) == ("keep", "tool-calls")
    assert jsonschema_rs.is_valid(SCHEMA, call["input"])
    assert told["refused"]["status"] == 400
    assert told["refused"]["message"].startswith("temperature is 1000000")


async def test_librechat_calls_a_tool_and_names_the_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of its library with streams and their usage: the call, the tool's result and the answer; then a title."""
    pet = {"name": "Rusty", "kind": "fox", "age": 3}
    call = f"<tool_call>\n{json.dumps({'name': 'keep', 'arguments': pet})}\n</tool_call>"
    done, title = "Rusty is kept.", "A fox"

    def script(prompt: str) -> str:
        if "<tool_call></tool_call>" not in prompt:
            return title
        return done if "<|turn|>tool\nkept" in prompt else call

    async with reciting_stack(tmp_path, script, (call, done, title), served_model_name="fox") as stack:
        told = await ask_library("librechat", stack.base_url, "fox", monkeypatch)
    assert told["asked"] == [pet]
    assert told["title"] == title
    asked, result, answer = told["messages"]
    assert [each["type"] for each in told["messages"]] == ["ai", "tool", "ai"]
    assert (result["text"], answer["text"]) == ("kept", done)
    assert asked["usage"]["output_tokens"] > answer["usage"]["output_tokens"] > 0


async def test_promptfoo_passes_what_it_is_given(
    rest: RestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its providers of chat, completions and messages get what the same bodies get; one asks for an object."""
    model = await rest.model()
    openai = {"apiBaseUrl": rest.base_url, "apiKey": "none", **GREEDY}
    form = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
    providers = {
        "chat": (f"openai:chat:{model}", {**openai, "passthrough": {"speculation": {"draft_count": 4}}}),
        "completion": (f"openai:completion:{model}", openai),
        "messages": (f"anthropic:messages:{model}", {**openai, "apiBaseUrl": f"http://{rest.address}"}),
        "object": (f"openai:chat:{model}", {**openai, "max_tokens": 120, "response_format": form}),
    }
    config = {
        "prompts": [QUESTION],
        "providers": [{"id": each, "label": name, "config": how} for name, (each, how) in providers.items()],
        "tests": [{"assert": [{"type": "javascript", "value": "!!output"}]}],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    # It keeps its records with the rest, and whatever else it wants to reach is refused.
    for name, value in {
        "PATH": f"{NODE.parent}:{os.environ['PATH']}",
        "PROMPTFOO_CONFIG_DIR": str(tmp_path / "home"),
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "PROMPTFOO_DISABLE_UPDATE": "1",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    report = tmp_path / "report.json"
    words = ["eval", "--config", tmp_path / "config.json", "--output", report, "--no-cache", "--no-table"]
    await output_of(CLIENTS / ".bin" / "promptfoo", *words, patience_s=PATIENCE_S)
    results = json.loads(report.read_text())["results"]["results"]
    told = {each["provider"]["label"]: each["response"]["output"] for each in results}
    [chat] = (await rest.ask(CHAT, **said(QUESTION), **GREEDY))["choices"]
    [completion] = (await rest.ask(COMPLETIONS, prompt=QUESTION, **GREEDY))["choices"]
    assert told["chat"] == told["messages"] == chat["message"]["content"]
    assert told["completion"] == completion["text"]
    assert jsonschema_rs.is_valid(SCHEMA, told["object"])
