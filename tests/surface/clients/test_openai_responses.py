"""The official openai package, unmodified, on /v1/responses of a running stack, whole and streamed."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from support.rest.rest_stack import RestStack

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: dict[str, Any] = {
    "model": "target",
    "max_output_tokens": 16,
    "instructions": "Be brief.",
    "input": "Tell me of the king's daughter \U0001f409.",
    "extra_body": {"seed": 5},
}


async def test_whole_and_streamed_are_the_same(rest: RestStack, client: AsyncOpenAI) -> None:
    """And the same as chat says: it is one core."""
    whole = await client.responses.create(**ASKED)
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert text == whole.output_text == last.response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.incomplete_details is not None
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED["input"]}]
    chat = await rest.ask("/v1/chat/completions", messages=said, max_tokens=16, seed=5)
    assert chat["choices"][0]["message"]["content"] == text
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 16)


@pytest.mark.slow
async def test_the_streaming_helper_takes_an_answer_without_a_limit(client: AsyncOpenAI) -> None:
    """It may be as long as the context; then it ends by itself, or the context ends it."""
    fields = {name: value for name, value in ASKED.items() if name != "max_output_tokens"}
    async with client.responses.stream(**fields) as stream:
        events = [event async for event in stream]
    final = events[-1]
    assert final.type in {"response.completed", "response.incomplete"}
    usage = final.response.usage
    assert usage is not None
    assert usage.output_tokens > 128
    if final.type == "response.incomplete":
        assert usage.total_tokens == 4096


async def test_synchronous_client_says_the_same(rest: RestStack, client: AsyncOpenAI) -> None:
    """In a thread of its own, whole and streamed."""

    def ask() -> tuple[str, str]:
        with OpenAI(base_url=rest.base_url, api_key="none", max_retries=0) as connected:
            whole = connected.responses.create(**ASKED).output_text
            events = list(connected.responses.create(**ASKED, stream=True))
        return whole, "".join(event.delta for event in events if event.type == "response.output_text.delta")

    expected = (await client.responses.create(**ASKED)).output_text
    assert await asyncio.to_thread(ask) == (expected, expected)


async def test_an_answer_goes_on_when_its_items_are_sent_back(client: AsyncOpenAI) -> None:
    """Nothing is stored, so a client brings the whole conversation."""
    first = await client.responses.create(**ASKED)
    turns = [{"role": "user", "content": ASKED["input"]}, *(item.to_dict() for item in first.output)]
    second = await client.responses.create(**{**ASKED, "input": [*turns, {"role": "user", "content": "And then?"}]})
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert second.model_extra is not None
    assert second.model_extra["store"] is False


async def test_what_needs_a_memory_is_refused(client: AsyncOpenAI) -> None:
    """By name."""
    for field, value in (("previous_response_id", "resp_1"), ("store", True), ("conversation", "conv_1")):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**{**ASKED, field: value})
        assert refused.value.param == field
    reply = await client.responses.with_raw_response.create(**ASKED, prompt_cache_key="mine")
    assert reply.headers["x-outrider-ignored"] == "prompt_cache_key"
