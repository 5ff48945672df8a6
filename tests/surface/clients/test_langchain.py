"""langchain-openai, unmodified, against a running stack."""

import asyncio
from typing import Annotated, Any, Literal

import jsonschema_rs
import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field, SecretStr
from support.rest.rest_stack import RestStack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.surface]
TURNS = [SystemMessage("You tell fairy tales."), HumanMessage("Tell me of the king's daughter \U0001f409.")]


def model_of(rest: RestStack, **options: Any) -> ChatOpenAI:
    """A chat model that asks for 16 tokens with a seed."""
    return ChatOpenAI(
        model="target",
        base_url=rest.base_url,
        api_key=SecretStr("none"),
        max_retries=0,
        seed=5,
        max_completion_tokens=16,
        **options,
    )


async def test_whole_and_streamed_are_the_same(rest: RestStack) -> None:
    """Chunks add up to the message, its usage and its reason."""
    model = model_of(rest, stream_usage=True)
    whole = await model.ainvoke(TURNS)
    total: Any = None
    async for chunk in model.astream(TURNS):
        total = chunk if total is None else total + chunk
    assert isinstance(whole, AIMessage)
    assert isinstance(total, AIMessageChunk)
    assert whole.content
    assert total.content == whole.content
    assert whole.usage_metadata is not None
    assert total.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == total.usage_metadata["output_tokens"] == 16
    assert whole.response_metadata["finish_reason"] == total.response_metadata["finish_reason"] == "length"
    assert whole.response_metadata["model_name"] == "target"


async def test_synchronous_calls_and_batches(rest: RestStack) -> None:
    """In threads, one after the other and several at a time."""
    model = model_of(rest)
    expected = (await model.ainvoke(TURNS)).content
    assert (await in_thread(model.invoke, TURNS)).content == expected
    assert "".join([str(chunk.content) for chunk in await in_thread(lambda: list(model.stream(TURNS)))]) == expected
    batch = await in_thread(model.batch, [TURNS, TURNS[1:], TURNS])
    assert [each.content for each in batch] == [expected, (await model.ainvoke(TURNS[1:])).content, expected]


async def in_thread(call: Any, *arguments: Any) -> Any:
    """Keeps the loop free, on which the stack runs."""
    return await asyncio.to_thread(call, *arguments)


async def test_bound_stop_and_log_probabilities(rest: RestStack) -> None:
    """What is bound goes into the request; the reply's log-probabilities are in its metadata."""
    model = model_of(rest)
    full = str((await model.ainvoke(TURNS)).content)
    stop = full[len(full) // 2 :][:3]
    stopped = await model.bind(stop=[stop]).ainvoke(TURNS)
    assert stopped.content == full[: full.index(stop)]
    assert stopped.response_metadata["finish_reason"] == "stop"
    told = await model.bind(logprobs=True, top_logprobs=2).ainvoke(TURNS)
    content = told.response_metadata["logprobs"]["content"]
    assert len(content) == 16
    assert all(len(each["top_logprobs"]) == 2 for each in content)


SCHEMA: dict[str, Any] = {
    "title": "Tale",
    "type": "object",
    "properties": {
        "hero": {"enum": ["king", "queen", "fox"]},
        "gold": {"type": "integer", "minimum": 0, "maximum": 999},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["hero", "gold", "friends"],
    "additionalProperties": False,
}


class Tale(BaseModel):
    """The same as a class."""

    hero: Literal["king", "queen", "fox"]
    gold: Annotated[int, Field(ge=0, le=999)]
    friends: Annotated[list[Annotated[str, Field(max_length=8)]], Field(max_length=2)]


async def test_structured_output(rest: RestStack) -> None:
    """By a schema and by a class, whole and streamed, strict or not."""
    model = model_of(rest).model_copy(update={"max_tokens": 200})
    for strict in (True, False, None):
        by_schema = model.with_structured_output(SCHEMA, method="json_schema", strict=strict, include_raw=True)
        answer: Any = await by_schema.ainvoke(TURNS)
        assert answer["parsing_error"] is None
        jsonschema_rs.validate(SCHEMA, answer["parsed"])
        parts: list[Any] = [part async for part in by_schema.astream(TURNS)]
        assert [part["parsed"] for part in parts if "parsed" in part][-1] == answer["parsed"]
    by_class = model.with_structured_output(Tale, method="json_schema", strict=True)
    assert isinstance(await by_class.ainvoke(TURNS), Tale)
    as_object = model.with_structured_output(None, method="json_mode", include_raw=True)
    raw: Any = await as_object.ainvoke(TURNS)
    assert raw["raw"].content.startswith("{")


async def test_what_is_not_served_is_refused_by_name(rest: RestStack) -> None:
    """A schema that cannot be enforced becomes an error of its field."""
    schema = {**SCHEMA, "not": {"required": ["gold"]}}
    structured = model_of(rest).with_structured_output(schema, method="json_schema", strict=True)
    with pytest.raises(openai.BadRequestError, match='"not"') as raised:
        await structured.ainvoke(TURNS)
    assert raised.value.param == "response_format.json_schema.schema"
    assert raised.value.code == "invalid_value"


async def test_text_completions(rest: RestStack) -> None:
    """The older class sends a list of one prompt, and nulls for what it does not set."""
    model = OpenAI(model="target", base_url=rest.base_url, api_key=SecretStr("none"), max_tokens=16, seed=5)
    text = await model.ainvoke("Once upon a time there was a king who had")
    assert text
    assert "".join([chunk async for chunk in model.astream("Once upon a time there was a king who had")]) == text
