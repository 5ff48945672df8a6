"""The official anthropic package, unmodified, against a running stack: what it makes of answers and of streams."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message
from support.rest.rest_stack import RestStack, rest_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 16,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "Tell me of the king's daughter \U0001f409."}],
    "extra_body": {"seed": 5},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rest() -> AsyncIterator[RestStack]:
    """One stack for all of them, which takes any model's name."""
    async with rest_stack(gateway={"served_model_name": "outrider, claude, *"}) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(rest: RestStack) -> AsyncIterator[AsyncAnthropic]:
    """A client that does not ask twice."""
    async with AsyncAnthropic(base_url=f"http://{rest.address}", api_key="none", max_retries=0) as connected:
        yield connected


def text_of(message: Message) -> str:
    """What a message of one block says."""
    [block] = message.content
    assert block.type == "text"
    return block.text


@pytest.mark.slow
async def test_whole_and_streamed_are_the_same(rest: RestStack, client: AsyncAnthropic) -> None:
    """And the same as chat says: it is one core."""
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert (whole.stop_reason, whole.usage.output_tokens, whole.model) == ("max_tokens", 16, "outrider")
    assert final.usage.output_tokens == 16
    said = [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
    chat = await rest.ask("/v1/chat/completions", messages=said, max_tokens=16, seed=5)
    assert chat["choices"][0]["message"]["content"] == text
    assert chat["usage"]["prompt_tokens"] == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def test_events_are_those_of_the_package(client: AsyncAnthropic) -> None:
    """Every one is of a type that it knows."""
    kinds = [event.type async for event in await client.messages.create(**ASKED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_synchronous_client_says_the_same(rest: RestStack, client: AsyncAnthropic) -> None:
    """In a thread of its own, whole and streamed."""

    def ask() -> tuple[str, str]:
        with Anthropic(base_url=f"http://{rest.address}", api_key="none", max_retries=0) as connected:
            whole = text_of(connected.messages.create(**ASKED))
            with connected.messages.stream(**ASKED) as stream:
                return whole, stream.get_final_text()

    expected = text_of(await client.messages.create(**ASKED))
    assert await asyncio.to_thread(ask) == (expected, expected)


async def test_the_string_that_stopped_an_answer_is_told(client: AsyncAnthropic) -> None:
    """It is no part of the text."""
    text = text_of(await client.messages.create(**ASKED))
    stop = text[len(text) // 2 :][:3]
    stopped = await client.messages.create(**ASKED, stop_sequences=["never said", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == text[: text.index(stop)]


@pytest.mark.slow
async def test_a_limit_beyond_the_context_is_the_context(client: AsyncAnthropic) -> None:
    """As its clients send one that hardly any context has; a prompt that does not fit is an error still."""
    long = {**ASKED, "max_tokens": 20_000, "messages": [{"role": "user", "content": "so " * 4060}]}
    counted = await client.messages.count_tokens(model="claude", messages=long["messages"], system=ASKED["system"])
    message = await client.messages.create(**long)
    assert message.stop_reason == "model_context_window_exceeded"
    assert counted.input_tokens + message.usage.output_tokens == 4096
    with pytest.raises(anthropic.BadRequestError, match="but must leave room for one more"):
        await client.messages.create(**{**long, "messages": [{"role": "user", "content": "so " * 5000}]})


async def test_tokens_are_counted_as_they_are_used(client: AsyncAnthropic) -> None:
    """Before anything is spent on them."""
    fields = {name: ASKED[name] for name in ("model", "system", "messages")}
    counted = await client.messages.count_tokens(**fields)
    usage = (await client.messages.create(**ASKED)).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_what_has_no_effect_is_named(client: AsyncAnthropic) -> None:
    """In a header of every answer, streamed or not."""
    for fields in ({}, {"stream": True}):
        reply = await client.messages.with_raw_response.create(**ASKED, metadata={"user_id": "me"}, **fields)
        assert reply.headers["x-outrider-ignored"] == "system.cache_control, metadata"
        assert reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_errors_are_the_packages_own(client: AsyncAnthropic) -> None:
    """With the place of what is at fault."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(
            **{**ASKED, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}
        )
    assert refused.value.type == "invalid_request_error"
    assert "messages.0.content.0.type is 'image', but only 'text'" in str(refused.value.body)
    assert refused.value.request_id is not None


async def test_all_names_are_listed(rest: RestStack) -> None:
    """The first is the model's own; any other is taken here."""
    listed = (await rest.http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["outrider", "claude"]
    assert (await rest.http.get("/v1/models/whatever")).json()["id"] == "whatever"
