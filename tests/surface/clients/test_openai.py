"""The official openai package, unmodified, against a running stack: what it makes of whole answers and of streams."""

import asyncio
import math
import re
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import CompletionUsage
from support.grid import decoded
from support.rest.rest_stack import RestStack, said

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALE = "Once upon a time there was a king who had"
CHAT = {"model": "target", "max_completion_tokens": 16, "seed": 5, **said("Tell me of the king's daughter \U0001f409.")}
TEXT = {"model": "target", "max_tokens": 16, "seed": 5, "prompt": TALE}


async def test_models_are_listed_and_found(client: AsyncOpenAI) -> None:
    """The list has the target's model, and nothing else; another name is not found."""
    [model] = (await client.models.list()).data
    assert (model.id, model.object) == ("target", "model")
    assert (await client.models.retrieve("target")).id == "target"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no-such-model")


async def test_chat_whole_and_streamed_are_the_same(client: AsyncOpenAI) -> None:
    """Joined deltas are the message; role, reason and usage are where the package looks for them."""
    whole = await client.chat.completions.create(**CHAT)
    stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    [choice] = whole.choices
    assert choice.message.role == chunks[0].choices[0].delta.role == "assistant"
    assert choice.message.content == "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert choice.message.content
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == choice.finish_reason
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage and chunks[-1].usage.prompt_tokens_details}
    )
    assert whole.usage.completion_tokens == 16
    assert whole.id != chunks[0].id
    assert whole.system_fingerprint == chunks[0].system_fingerprint


async def test_chat_by_the_streaming_helper(client: AsyncOpenAI) -> None:
    """Its accumulated message is the whole one, with log-probabilities."""
    fields: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 2}
    text = str((await client.chat.completions.create(**fields)).choices[0].message.content)
    # It takes an answer that its length ends for an error.
    fields["stop"] = text[len(text) // 2 :][:3]
    whole = await client.chat.completions.create(**fields)
    async with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


async def test_text_whole_and_streamed_are_the_same(client: AsyncOpenAI) -> None:
    """The older protocol as well, for text and for token ids."""
    whole = await client.completions.create(**TEXT)
    chunks = [chunk async for chunk in await client.completions.create(**TEXT, stream=True)]
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    ids = [2256, 677, 259, 513, 443, 307, 259, 540, 390, 337]
    assert decoded(ids) == TALE
    numbered = await client.completions.create(**{**TEXT, "prompt": ids})
    assert numbered.choices[0].text == whole.choices[0].text
    assert numbered.usage == whole.usage.model_copy(  # type: ignore[union-attr]
        update={"prompt_tokens_details": numbered.usage and numbered.usage.prompt_tokens_details}
    )


async def test_synchronous_client_says_the_same(rest: RestStack, client: AsyncOpenAI) -> None:
    """In a thread of its own, whole and streamed."""

    def ask() -> tuple[str | None, str]:
        with OpenAI(base_url=rest.base_url, api_key="none", max_retries=0) as connected:
            whole = connected.chat.completions.create(**CHAT)
            chunks = list(connected.chat.completions.create(**CHAT, stream=True))
        return whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    expected = (await client.chat.completions.create(**CHAT)).choices[0].message.content
    assert await asyncio.to_thread(ask) == (expected, expected)


async def test_log_probabilities_of_chat(client: AsyncOpenAI) -> None:
    """One entry a token, whose bytes join to the text, with so many alternatives in falling order."""
    reply = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, logit_bias={"128": 8, "103": 8})
    [choice] = reply.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert reply.usage is not None
    assert len(content) == reply.usage.completion_tokens
    spelled = b"".join(bytes(each.bytes or ()) for each in content)
    assert spelled.decode(errors="replace").startswith(str(choice.message.content).rstrip("\ufffd"))
    for each in content:
        values = [other.logprob for other in each.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert all(-1e4 < value <= 0 for value in [each.logprob, *values])


async def test_log_probabilities_of_text(client: AsyncOpenAI) -> None:
    """Four lists of one length; with echo they begin with the prompt, whose first token has none."""
    reply = await client.completions.create(**TEXT, logprobs=2, echo=True)
    [choice] = reply.choices
    assert choice.text.startswith(TALE)
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert reply.usage is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == reply.usage.total_tokens
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs[0] is None
    assert all(value is not None and math.isfinite(value) for value in told.token_logprobs[1:])
    assert [choice.text[start:][:4] for start in told.text_offset[:3]] == [
        (token + choice.text[start + len(token) :])[:4]
        for token, start in zip(told.tokens[:3], told.text_offset[:3], strict=True)
    ]


async def test_several_answers(client: AsyncOpenAI) -> None:
    """Each has its index and its text, streamed or not; the first is what one alone would be."""
    whole = await client.chat.completions.create(**CHAT, n=4)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert texts[0] == (await client.chat.completions.create(**CHAT)).choices[0].message.content
    streamed = dict.fromkeys(range(4), "")
    async for chunk in await client.chat.completions.create(**CHAT, n=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4 * 16


async def test_stop_ends_the_text_before_it(client: AsyncOpenAI) -> None:
    """A string or a list of them, streamed or not; the text does not contain it, and the reason is `stop`."""
    full = (await client.completions.create(**TEXT)).choices[0].text
    stop = full[len(full) // 2 :][:3]
    expected = full[: full.index(stop)]
    for given in (stop, [stop, "\u2603"]):
        reply = (await client.completions.create(**TEXT, stop=given)).choices[0]
        assert (reply.text, reply.finish_reason) == (expected, "stop")
        chunks = [chunk async for chunk in await client.completions.create(**TEXT, stop=given, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"


def kept_and_not(usage: CompletionUsage | None) -> tuple[int | None, int | None]:
    """The request's prediction in its usage, where the package looks for it."""
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


# With a draft that guesses in every round, so that the target does not say everything before anybody looks.
TOGETHER = {"drafter": ["model", "lookup"], "draft_count": 4}


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [{}, {"drafter": "lookup", "draft_count": 4}, TOGETHER])
async def test_a_prediction_changes_no_text(client: AsyncOpenAI, speculation: dict[str, Any]) -> None:
    """As text and as parts, right, wrong and half right, whole and streamed; tokens of it that were accepted and that
    were not are reported.
    """
    asked: dict[str, Any] = {**CHAT, "max_completion_tokens": 48}
    text = str((await client.chat.completions.create(**asked)).choices[0].message.content)
    # So often that four guesses in a row are never all right.
    changed = " never".join(re.findall(r"\s*\S+\s*\S+\s*\S+|.+", text))
    for name, content in (
        ("right", text),
        ("parts", [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]),
        ("changed", changed),
        ("wrong", TALE * 3),
        ("empty", ""),
    ):
        # A memory of the answers before would know better than any prediction.
        body: dict[str, Any] = {"speculation": speculation, "cache_salt": f"{name} {speculation.get('drafter')}"}
        predicted = {**asked, "prediction": {"type": "content", "content": content}, "extra_body": body}
        whole = await client.chat.completions.create(**predicted)
        body["cache_salt"] += " streamed"
        stream = await client.chat.completions.create(**predicted, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert whole.choices[0].message.content == joined == text
        for accepted, rejected in (kept_and_not(whole.usage), kept_and_not(chunks[-1].usage)):
            assert accepted is not None
            assert rejected is not None
            if speculation and name in {"right", "parts"}:
                assert accepted > 0
            if speculation == TOGETHER and name == "changed":
                assert accepted > 0
                assert rejected > 0
            if name in {"wrong", "empty"}:
                assert accepted < 12
            if name == "empty":
                assert (accepted, rejected) == (0, 0)


async def test_a_completion_has_a_prediction_too(client: AsyncOpenAI) -> None:
    """An extra field of the older protocol."""
    expected = (await client.completions.create(**TEXT)).choices[0].text
    body = {
        "prediction": {"type": "content", "content": expected},
        "speculation": TOGETHER,
        "cache_salt": "a completion's prediction",
    }
    reply = await client.completions.create(**TEXT, extra_body=body)
    assert reply.choices[0].text == expected
    accepted, _ = kept_and_not(reply.usage)
    assert accepted


async def test_a_prediction_where_nothing_is_guessed_is_refused(client: AsyncOpenAI) -> None:
    """By name, because it would be of no use."""
    prediction: Any = {"type": "content", "content": "once"}
    for speculation in ({"enabled": False}, {"draft_count": 0}, {"drafter": "model"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**CHAT, prediction=prediction, extra_body={"speculation": speculation})
        assert caught.value.param == "prediction"


async def test_usage_has_a_place_for_predictions(client: AsyncOpenAI) -> None:
    """Where the package looks for it, whole and streamed; guesses of a draft are no part of it."""
    speculation = {"speculation": {"draft_count": 4}}
    whole = await client.chat.completions.create(**CHAT, extra_body=speculation)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.completions.create(**TEXT, **options, extra_body=speculation)]
    for usage in (whole.usage, chunks[-1].usage):
        assert kept_and_not(usage) == (0, 0)
    assert whole.model_extra is not None
    [drafter] = whole.model_extra["outrider"]["drafters"]
    figures = whole.model_extra["metrics"]["speculative_decoding"]
    assert drafter["draft_tokens"] == figures["num_draft_tokens"] > 0
    assert drafter["accepted_tokens"] == figures["num_accepted_draft_tokens"]


async def test_speculation_is_an_extra_field(client: AsyncOpenAI) -> None:
    """`extra_body` carries it, and the reply's own fields are there as attributes."""
    reply = await client.chat.completions.create(**CHAT, extra_body={"speculation": {"draft_count": 4}})
    plain = await client.chat.completions.create(**CHAT, extra_body={"speculation": {"enabled": False}})
    assert reply.choices[0].message.content == plain.choices[0].message.content
    assert reply.model_extra is not None
    assert plain.model_extra is not None
    assert reply.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain.model_extra["metrics"]["speculative_decoding"] is None
