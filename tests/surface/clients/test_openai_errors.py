"""What the official openai package makes of refusals: their class, their fields, and whether it asks again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from support.basics import eventually
from support.rest.rest_stack import RestStack, rest_stack, said

ASK: dict[str, Any] = {"model": "target", "max_tokens": 8, "seed": 1, **said("Hello")}
LONG: dict[str, Any] = {"model": "target", "max_tokens": 3000, "seed": 1, "stream": True, **said("Hello")}
ENDLESS = {"ignore_eos": True, "speculation": {"enabled": False}}


def watched(rest: RestStack, **options: Any) -> tuple[AsyncOpenAI, list[httpx.Response]]:
    """A client, and the responses that it gets."""
    seen: list[httpx.Response] = []

    async def note(response: httpx.Response) -> None:
        seen.append(response)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]}, trust_env=False)
    return AsyncOpenAI(base_url=rest.base_url, api_key="none", http_client=http, **options), seen


@pytest.fixture
async def rest() -> AsyncIterator[RestStack]:
    """Room for one sample, and for one request in the queue."""
    async with rest_stack(gateway={"max_requests": 1, "max_queue": 1}) as running:
        yield running


async def test_bad_value_is_a_bad_request(rest: RestStack) -> None:
    """Status 400 with the field's name, asked once although the client would ask again."""
    client, seen = watched(rest, max_retries=2)
    async with client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**{**ASK, "temperature": 1e6})
    assert raised.value.param == "temperature"
    assert raised.value.type == "invalid_request_error"
    assert "temperature" in raised.value.message
    assert [response.status_code for response in seen] == [400]


@pytest.mark.surface
async def test_unknown_model_is_not_found(rest: RestStack) -> None:
    """Status 404 and OpenAI's own code."""
    client, _ = watched(rest, max_retries=0)
    async with client:
        with pytest.raises(openai.NotFoundError) as raised:
            await client.chat.completions.create(**{**ASK, "model": "gpt-9"})
    assert raised.value.code == "model_not_found"
    assert "gpt-9" in raised.value.message


@pytest.mark.surface
async def test_prompt_that_is_too_long(rest: RestStack) -> None:
    """OpenAI's own code for it, in a stream as well: nothing has begun."""
    client, _ = watched(rest, max_retries=0)
    async with client:
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(**{**ASK, "max_tokens": 5000, "stream": is_stream})
            assert raised.value.code == "context_length_exceeded"


@pytest.mark.slow
async def test_full_queue_is_asked_again(rest: RestStack) -> None:
    """Status 429 with Retry-After; the client comes back by itself, and succeeds when there is room."""
    client, seen = watched(rest, max_retries=2)
    async with client, AsyncExitStack() as held:
        first = await client.chat.completions.create(**LONG, extra_body=ENDLESS)
        held.push_async_callback(first.close)
        waiting = asyncio.create_task(client.chat.completions.create(**LONG, extra_body=ENDLESS))
        await eventually(lambda: rest.admission.waiting == 1)
        seen.clear()
        turned_away = asyncio.create_task(client.chat.completions.create(**ASK))
        await eventually(lambda: bool(seen))
        assert seen[0].status_code == 429
        assert 1 <= int(seen[0].headers["retry-after"]) <= 60
        await first.close()
        await (await waiting).close()
        reply = await turned_away
    assert reply.choices[0].message.content
    assert [response.status_code for response in seen if response.request.content.find(b'"max_tokens":8') > 0] == [
        429,
        200,
    ]


@pytest.mark.surface
async def test_queue_that_stays_full_is_a_rate_limit(rest: RestStack) -> None:
    """Without retries the error says that it was too much at a time."""
    client, _ = watched(rest, max_retries=0)
    async with client:
        first = await client.chat.completions.create(**LONG, extra_body=ENDLESS)
        waiting = asyncio.create_task(client.chat.completions.create(**LONG, extra_body=ENDLESS))
        await eventually(lambda: rest.admission.waiting == 1)
        with pytest.raises(openai.RateLimitError) as raised:
            await client.chat.completions.create(**ASK)
        assert raised.value.type == "rate_limit_error"
        await first.close()
        await (await waiting).close()


@pytest.mark.surface
async def test_requests_that_can_never_run_are_not_asked_again(rest: RestStack) -> None:
    """More samples than a request may have: an error for good, asked once. More than the places are answered."""
    client, seen = watched(rest, max_retries=2)
    async with client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(**ASK, n=9)
        assert raised.value.status_code == 400
        assert len(seen) == 1
        answer = await client.chat.completions.create(**ASK, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(seen) == 2


@pytest.mark.slow
async def test_lost_target_ends_a_stream_with_an_error() -> None:
    """In mid-stream it is an exception with a message, not an end that looks like success."""
    async with rest_stack(gateway={"rebuild_budget_seconds": 0.0}) as rest:
        client, _ = watched(rest, max_retries=0)
        async with client:
            stream = await client.chat.completions.create(**LONG, extra_body=ENDLESS)
            with pytest.raises(openai.APIError) as raised:
                await lose_target_in(stream, rest)
    assert raised.value.message
    assert type(raised.value) is openai.APIError


async def lose_target_in(stream: Any, rest: RestStack) -> None:
    """Reads a stream whose target goes away after the third chunk."""
    number = 0
    async for _ in stream:
        number += 1
        if number == 3:
            await rest.stack.target.stop(0)
            rest.stack.target = None
