"""Tools through the Python client: what goes out, and what comes back from a target that says prepared answers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.services.reciting import RecitingStack, reciting_stack

from outrider.client import (
    AsyncClient,
    CallArguments,
    CallBegun,
    CallMessage,
    ChatMessage,
    ContentDelta,
    InvalidRequest,
    ReasoningDelta,
    Speculation,
    Tool,
    ToolCall,
)
from outrider.client.requests import chat_request
from outrider.v1 import generation_service_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = (
    '<think>\nWhere?\n</think>\n\nI ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
RESULT = "It rains."


def script(prompt: str) -> str:
    """A call first, and words when its result is there."""
    return RESULT if "18 degrees" in prompt else ANSWER


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """One stack for all."""
    async with reciting_stack(tmp_path_factory.mktemp("reciter"), script, [ANSWER, RESULT]) as running:
        yield running


async def test_an_answer_has_its_calls_its_reasoning_and_its_text(stack: RecitingStack) -> None:
    """Also in pieces, in order; and the next turn carries all of it."""
    turns = [ChatMessage(role="user", content="How is the weather?")]
    async with AsyncClient(stack.gateway.address) as client:
        stream = client.chat(turns, tools=[WEATHER], speculation=Speculation(draft_count=4))
        deltas = [delta async for event in stream for delta in event.deltas]
        answer = await stream.result()
        assert (answer.text, answer.reasoning) == ("I ask.", "Where?")
        [call] = answer.tool_calls
        assert call == ToolCall(call.id, "weather", '{"city": "Rome"}')
        assert answer.result.has_calls
        assert 0 < answer.result.reasoning_tokens < answer.result.completion_tokens
        assert [type(each) for each in deltas[-2:]] == [CallBegun, CallArguments]
        assert {type(each) for each in deltas[:-2]} == {ReasoningDelta, ContentDelta}
        said = CallMessage(id=call.id, name=call.name, arguments=call.arguments)
        turns += [
            ChatMessage(role="assistant", content=answer.text, reasoning=answer.reasoning, tool_calls=[said]),
            ChatMessage(role="tool", content="18 degrees", tool_call_id=call.id),
        ]
        last = await client.chat(turns, tools=[WEATHER]).result()
        assert (last.text, last.tool_calls, last.result.has_calls) == (RESULT, (), False)


async def test_without_tools_nothing_is_a_call(stack: RecitingStack) -> None:
    """The template's own variables are for the client to set."""
    async with AsyncClient(stack.gateway.address) as client:
        turns = [ChatMessage(role="user", content="How is the weather?")]
        answer = await client.chat(turns).result()
        assert answer.text.startswith("I ask.\n<tool_call>")
        with pytest.raises(InvalidRequest, match=r"template_variables\.mood is"):
            await client.chat(turns, template_variables={"mood": "good"}).result()


async def test_a_message_that_has_begun_goes_on(stack: RecitingStack) -> None:
    """After its text, in the middle of a thought as well; not where another turn is to begin."""
    async with AsyncClient(stack.gateway.address) as client:
        asked, whole = ChatMessage(role="user", content="How is the weather?"), ANSWER.partition("</think>\n\n")[2]
        for begun, reasoning, text in (("<think>\nWhere", "?", whole), (ANSWER.partition(" ask")[0], "", whole[1:])):
            turns = [asked, ChatMessage(role="assistant", content=begun)]
            answer = await client.chat(turns, continue_final_message=True).result()
            assert (answer.reasoning, answer.text) == (reasoning, text)
        with pytest.raises(InvalidRequest, match="add_generation_prompt is True, but must be false or absent"):
            await client.chat(turns, continue_final_message=True, add_generation_prompt=True).result()


async def test_choices_are_words_or_names() -> None:
    """A name alone is the tool that must be called."""
    turns = [ChatMessage(role="user", content="x")]
    for choice, mode, names in (
        ("auto", pb.TOOL_MODE_AUTO, []),
        ("required", pb.TOOL_MODE_REQUIRED, []),
        ("weather", pb.TOOL_MODE_REQUIRED, ["weather"]),
        (["a", "b"], pb.TOOL_MODE_REQUIRED, ["a", "b"]),
    ):
        message = chat_request(turns, {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False})
        assert (message.tool_choice.mode, list(message.tool_choice.names)) == (mode, names)
        assert not message.parallel_tool_calls


@pytest.mark.parametrize(
    ("turn", "options", "sentence"),
    [
        ({"tool_calls": 5}, {}, r"messages\.0\.tool_calls is 5, but must be a list"),
        ({"tool_calls": [{"id": "a"}]}, {}, r"messages\.0\.tool_calls\.0 is .* but must be a mapping with id, name"),
        ({"mood": "x"}, {}, r"messages\.0 is .* nothing else but name, reasoning, tool_call_id, tool_calls"),
        ({}, {"tools": ["weather"]}, r"tools\.0 is 'weather', but must be an instance of Tool"),
        ({}, {"tools": [Tool("a", parameters={"x": {1}})]}, r"tools\.0\.parameters is"),
        ({}, {"template_variables": {"a": {1}}}, r"template_variables is"),
    ],
)
async def test_what_cannot_travel_is_named(turn: dict[str, Any], options: Any, sentence: str) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidRequest, match=sentence):
        chat_request([{"role": "user", "content": "x", **turn}], options)
