"""Tools and reasoning through the openai package and langchain, against a target that says prepared answers."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr
from support.services.reciting import RecitingStack, reciting_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.surface]

PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOKYO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Tokyo"}}\n</tool_call>'
CALLING = f"<think>\nTwo cities.\n</think>\n\nI ask.\n{PARIS}\n{TOKYO}"
ENDING = "Rain in both."
ASKED: dict[str, Any] = {"role": "user", "content": "How is the weather in Paris and in Tokyo?"}


class weather(BaseModel):  # noqa: N801 - the name of the tool
    """Tells the weather in a city."""

    city: str


def script(prompt: str) -> str:
    """Calls first, and words when both results are there."""
    return ENDING if prompt.count("it rains") == 2 else CALLING


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """One stack for all."""
    async with reciting_stack(tmp_path_factory.mktemp("reciter"), script, [CALLING, ENDING]) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: RecitingStack) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0) as made:
        yield made


async def test_a_loop_of_calls_and_results_ends_with_an_answer(client: openai.AsyncOpenAI) -> None:
    """The message of the calls goes back as the package dumps it."""
    tools = [openai.pydantic_function_tool(weather)]
    first = await client.chat.completions.create(model="markov", messages=[ASKED], tools=tools)  # type: ignore[list-item]
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "I ask."
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls if call.type == "function"] == [  # type: ignore[union-attr]
        '{"city": "Paris"}',
        '{"city": "Tokyo"}',
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "it rains"} for call in message.tool_calls]
    turns: Any = [ASKED, message.model_dump(), *results]
    last = await client.chat.completions.create(model="markov", messages=turns, tools=tools)
    assert last.choices[0].message.content == ENDING
    assert last.choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.reasoning_tokens == 0


async def test_the_stream_helper_parses_calls(client: openai.AsyncOpenAI) -> None:
    """Its events add up to the same message, with arguments as objects."""
    names = []
    asked: Any = {"model": "markov", "messages": [ASKED], "tools": [openai.pydantic_function_tool(weather)]}
    async with client.chat.completions.stream(**asked) as stream:
        async for event in stream:
            names.append(event.type)
        done = await stream.get_final_completion()
    assert names.count("tool_calls.function.arguments.done") == 2
    calls = done.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [weather(city="Paris"), weather(city="Tokyo")]
    assert done.choices[0].message.content == "I ask."
    parsed = await client.chat.completions.parse(**asked)
    assert parsed.choices[0].message.tool_calls is not None
    assert [call.function.parsed_arguments for call in parsed.choices[0].message.tool_calls] == [
        weather(city="Paris"),
        weather(city="Tokyo"),
    ]


async def test_reasoning_is_where_other_packages_look_for_it(client: openai.AsyncOpenAI) -> None:
    """Beside the content, whole and in deltas."""
    whole = await client.chat.completions.create(model="markov", messages=[ASKED])  # type: ignore[list-item]
    assert whole.choices[0].message.model_extra == {"reasoning_content": "Two cities."}
    told = ""
    asked: Any = {"model": "markov", "messages": [ASKED], "stream": True}
    async for chunk in await client.chat.completions.create(**asked):
        told += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
    assert told == "Two cities."


@pytest.mark.parametrize("choice", [None, "any", "weather"])
async def test_langchain_binds_tools(stack: RecitingStack, choice: str | None) -> None:
    """Whole and streamed, and the loop ends."""

    @tool("weather")
    def told(city: str) -> str:
        """Tells the weather in a city."""
        return f"{city}: it rains"

    model = ChatOpenAI(model="markov", base_url=stack.base_url, api_key=SecretStr("none"), max_retries=0)
    bound = model.bind_tools([told], **({"tool_choice": choice} if choice else {}))
    whole = await bound.ainvoke([HumanMessage(ASKED["content"])])
    assert isinstance(whole, AIMessage)
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}, {"city": "Tokyo"}]
    total: Any = None
    async for chunk in bound.astream([HumanMessage(ASKED["content"])]):
        total = chunk if total is None else total + chunk
    assert [call["args"] for call in total.tool_calls] == [call["args"] for call in whole.tool_calls]
    results = [ToolMessage(told.invoke(call["args"]), tool_call_id=call["id"]) for call in whole.tool_calls]
    last = await model.bind_tools([told]).ainvoke([HumanMessage(ASKED["content"]), whole, *results])
    assert last.content == ENDING
