"""Agents at work over both dialects: calls and reasoning from a target that says prepared answers, in three steps."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from support.requests.agent_bodies import claude_code_body, codex_body, parameters
from support.services.reciting import RecitingStack, reciting_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


def called(name: str, value: str) -> str:
    """A call as the target writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'value': value}}, ensure_ascii=False)}\n</tool_call>"


THOUGHT, SAID, DONE = "There is a file.", "I look. ☔", "Done: the king is a queen."
STEPS = (
    f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{called('Read', 'é.txt')}\n{called('Bash', 'ls')}",
    called("Edit", "queen"),
    DONE,
)
TOOL_NAMES = ("Read", "Bash", "Edit")
ASK = "Make the king a queen."
CLAUDE_TOOLS: list[Any] = [{"name": name, "input_schema": parameters(name)} for name in TOOL_NAMES]
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": parameters(name), "strict": None} for name in TOOL_NAMES
]
# So that several tokens come at once.
EXTRA = {"speculation": {"draft_count": 4}}


def script(prompt: str) -> str:
    """The next step, by how many turns the assistant has had."""
    return STEPS[min(prompt.count("<|turn|>assistant") - 1, 2)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """One stack for all, which takes any model's name."""
    folder, texts = tmp_path_factory.mktemp("reciter"), [*STEPS, json.dumps(CLAUDE_TOOLS)]
    async with reciting_stack(folder, script, texts, served_model_name="*") as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_of_anthropics_does_its_task(stack: RecitingStack, stream: bool) -> None:
    """What it sends back is what it got: thinking, text and calls, each with its result."""
    turns: list[Any] = [{"role": "user", "content": ASK}]
    asked: dict[str, Any] = {"model": "any", "max_tokens": 500, "tools": CLAUDE_TOOLS, "extra_body": EXTRA}
    steps = []
    async with AsyncAnthropic(base_url=str(stack.http.base_url), api_key="none", max_retries=0) as client:
        while not steps or steps[-1].stop_reason == "tool_use":
            if stream:
                async with client.messages.stream(**asked, messages=turns) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked, messages=turns)
            steps.append(message)
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]
            turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    thinking, text, *calls = steps[0].content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", THOUGHT)
    assert (text.type, text.text.strip()) == ("text", SAID)
    assert [(call.name, call.input) for call in calls] == [("Read", {"value": "é.txt"}), ("Bash", {"value": "ls"})]
    assert [step.stop_reason for step in steps] == ["tool_use", "tool_use", "end_turn"]
    assert steps[-1].content[0].text == DONE
    # Of events the package drops what it does not know.
    assert stream or steps[-1].model_extra["outrider"]["accepted_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_of_openais_does_its_task(stack: RecitingStack, stream: bool) -> None:
    """It sends the items back as they came, each call with its output."""
    items: list[Any] = [{"role": "user", "content": ASK}]
    asked: dict[str, Any] = {"model": "any", "tools": OPENAI_TOOLS, "extra_body": EXTRA}
    steps = []
    async with AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0) as client:
        calls: list[Any] = []
        while not steps or calls:
            if stream:
                async with client.responses.stream(**asked, input=items) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**asked, input=items)
            steps.append(response)
            calls = [item for item in response.output if item.type == "function_call"]
            outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
            items += [*(item.to_dict() for item in response.output), *outputs]
    assert [item.type for item in steps[0].output] == ["reasoning", "message", "function_call", "function_call"]
    assert steps[0].output[0].content[0].text.strip() == THOUGHT
    assert steps[0].output_text.strip() == SAID
    assert [json.loads(item.arguments) for item in steps[0].output[2:]] == [{"value": "é.txt"}, {"value": "ls"}]
    assert [step.status for step in steps] == ["completed"] * 3
    assert steps[0].usage.output_tokens_details.reasoning_tokens > 0
    assert steps[-1].output_text == DONE


async def test_bodies_of_agents_are_taken_as_they_are(stack: RecitingStack) -> None:
    """All of Claude Code's and of Codex's, with what has no effect named."""
    for path, body, named in (
        ("/v1/messages", claude_code_body(), "system.x-anthropic-billing-header"),
        ("/v1/responses", codex_body(), "tools.7=web_search"),
    ):
        reply = await stack.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert named in reply.headers["x-outrider-ignored"].split(", ")
        assert "text/event-stream" in reply.headers["content-type"]
        assert '"arguments' in reply.text or '"tool_use"' in reply.text


async def test_a_forced_call_follows_its_schema(stack: RecitingStack) -> None:
    """A name that no tool has is refused by the dialect's own name of the field."""
    body = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 200, "tools": CLAUDE_TOOLS}
    refused = await stack.http.post("/v1/messages", json={**body, "tool_choice": {"type": "tool", "name": "Write"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tool_choice")
    spoiled = [{**CLAUDE_TOOLS[0], "input_schema": {"type": "array"}}]
    refused = await stack.http.post("/v1/messages", json={**body, "tools": spoiled})
    assert refused.json()["error"]["message"] == "tools.0.input_schema.type is 'array', but must be 'object'"
