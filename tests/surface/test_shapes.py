"""Answers that follow a schema, as the official openai package asks for them, unmodified, whole and streamed."""

import datetime
import json
from enum import StrEnum
from typing import Annotated, Any, Literal

import jsonschema_rs
import openai
import pytest
from openai import AsyncOpenAI
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field
from support.rest.rest_stack import said

pytestmark = pytest.mark.asyncio(loop_scope="module")
Word = Annotated[str, Field(max_length=12)]
SEEDS = range(4)


class Kind(StrEnum):
    """What somebody is."""

    KING = "king"
    QUEEN = "queen"
    FOX = "fox"


class Hero(BaseModel):
    """Somebody in a tale."""

    name: Annotated[str, Field(pattern="^[A-Z][a-z]{2,9}$")]
    kind: Kind
    age: Annotated[int, Field(ge=0, le=120)] | None


class Tale(BaseModel):
    """Everything that a schema of pydantic's has in everyday use."""

    title: Word
    told: datetime.date
    heroes: Annotated[list[Hero], Field(min_length=1, max_length=2)]
    end: Literal["happy", "sad"]
    gold: Annotated[float, Field(gt=0, lt=100, multiple_of=0.5)]
    is_true: bool


class Chapter(BaseModel):
    """A schema that refers to itself."""

    word: Kind
    next: "Chapter | None"


SCHEMA = to_strict_json_schema(Tale)
ASKED: dict[str, Any] = {"model": "target", "max_completion_tokens": 600, **said("Tell me of the king's daughter.")}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_model_of_pydantics_comes_back_parsed(client: AsyncOpenAI, temperature: float) -> None:
    """An answer that ended by itself is the object; one that its length ended is an error of the package's."""
    for seed in SEEDS:
        fields = {**ASKED, "temperature": temperature, "seed": seed}
        parsed = await client.chat.completions.parse(**fields, response_format=Tale)
        [choice] = parsed.choices
        assert isinstance(choice.message.parsed, Tale)
        check(choice.message.content)
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(**{**ASKED, "max_completion_tokens": 9}, response_format=Tale)


@pytest.mark.slow
async def test_a_schema_refers_to_itself(client: AsyncOpenAI) -> None:
    """As deep as the model goes."""
    for seed in SEEDS:
        parsed = await client.chat.completions.parse(**ASKED, seed=seed, response_format=Chapter)
        assert isinstance(parsed.choices[0].message.parsed, Chapter)


@pytest.mark.slow
async def test_whole_and_streamed_are_the_same(client: AsyncOpenAI) -> None:
    """Strict, with one answer and with several; each that ended validates."""
    shape = {"type": "json_schema", "json_schema": {"name": "Tale", "strict": True, "schema": SCHEMA}}
    for count in (1, 3):
        fields = {**ASKED, "seed": 1, "n": count, "response_format": shape}
        whole = await client.chat.completions.create(**fields)
        texts, reasons = dict.fromkeys(range(count), ""), dict.fromkeys(range(count), "")
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or ""
        for choice in whole.choices:
            assert texts[choice.index] == choice.message.content
            assert reasons[choice.index] == choice.finish_reason
            assert choice.finish_reason == "stop"
            check(choice.message.content)


@pytest.mark.slow
async def test_the_streaming_helper_parses(client: AsyncOpenAI) -> None:
    """Its last event has the object, and every one before what can be read so far."""
    fields = {**ASKED, "seed": 1, "response_format": Tale}
    whole = await client.chat.completions.parse(**fields)
    async with client.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert isinstance(final.choices[0].message.parsed, Tale)


async def test_guesses_change_nothing(client: AsyncOpenAI) -> None:
    """With speculation and without, and with the log-probabilities of every token."""
    fields = {**ASKED, "seed": 2, "logprobs": True, "response_format": {"type": "json_object"}}
    plain = await client.chat.completions.create(**fields, extra_body={"speculation": {"enabled": False}})
    guessed = await client.chat.completions.create(**fields, extra_body={"speculation": {"draft_count": 4}})
    assert guessed.choices[0].message == plain.choices[0].message
    assert guessed.choices[0].logprobs == plain.choices[0].logprobs
    assert str(plain.choices[0].message.content).startswith("{")


async def test_what_cannot_be_enforced_is_refused_by_name(client: AsyncOpenAI) -> None:
    """As an error of the field, unless it is asked for as far as it goes; then the answer names what is not kept."""
    schema = {"type": "array", "items": {"enum": ["fox", "sea"]}, "maxItems": 2, "uniqueItems": True}
    shape: dict[str, Any] = {"name": "animals", "schema": schema}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as raised:
        await client.chat.completions.create(
            **ASKED, response_format={"type": "json_schema", "json_schema": {**shape, "strict": True}}
        )
    assert raised.value.param == "response_format.json_schema.schema"
    answer = await client.chat.completions.create(
        **ASKED, response_format={"type": "json_schema", "json_schema": {**shape, "strict": False}}
    )
    assert answer.model_extra is not None
    assert answer.model_extra["outrider"]["ignored_keywords"] == ["uniqueItems"]


def check(text: str | None) -> None:
    """By a validator that shares nothing with what made the answer."""
    jsonschema_rs.validate(SCHEMA, json.loads(text or ""), validate_formats=True)
