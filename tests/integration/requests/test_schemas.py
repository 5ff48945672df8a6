"""Answers to hundreds of schemas: each that ended by itself is valid, and no guess changes one."""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from support.requests.schemas import Made, make
from support.stack import Answer, RunningStack, running_stack

from outrider.cli.bench.common import OPENINGS
from outrider.errors import InvalidRequest
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

NUM_SCHEMAS, USUAL, PART, AT_A_TIME = 400, 24, 47, 4
MAX_TOKENS = 300
# Plain decoding, chains, and whatever the gateway chooses, with what the schema forces.
GUESSES: Sequence[dict[str, Any]] = ({"draft_count": 0}, {"draft_count": 4}, {"draft_count": None})
TEMPERATURES = (0.0, 1.0)
EOS = types_pb2.FINISH_REASON_EOS


async def answer(stack: RunningStack, number: int, schema: str, *, is_lenient: bool = False, **fields: Any) -> Answer:
    """What is said to a schema; a model of fairy tales, which has never seen JSON, would write white space for ever."""
    constraint = pb.Constraint(json_schema=schema, whitespace=" ?", is_lenient=is_lenient)
    opening = OPENINGS[number % len(OPENINGS)]
    return await stack.generate(text=opening, seed=number, max_tokens=MAX_TOKENS, constraint=constraint, **fields)


async def ended(stack: RunningStack, number: int) -> list[bool]:
    """Whether the answers to a schema ended by themselves, greedy and drawn; checks them.

    Where not all of it can be enforced it is refused, and answered when that is asked for, with what was not kept.
    """
    made, found = make(number), []
    schema, is_lenient = json.dumps(made.schema), bool(made.unenforced)
    if is_lenient:
        [keyword] = made.unenforced
        with pytest.raises(InvalidRequest, match=f'"{keyword}"') as refused:
            await answer(stack, number, schema)
        assert refused.value.metadata["field"] == "constraint.json_schema"
    for temperature in TEMPERATURES:
        fields = {"is_lenient": is_lenient, "temperature": temperature}
        answers = [await answer(stack, number, schema, **fields, **guesses) for guesses in GUESSES]
        assert len({each.token_ids for each in answers}) == 1, f"schema {number}: guesses change tokens"
        assert {*answers[0].completion.ignored_keywords} == made.unenforced
        found.append(answers[0].completion.finish_reason == EOS)
        if found[-1] and not is_lenient:
            check(number, made, answers[0].text)
    return found


def check(number: int, made: Made, text: str) -> None:
    """By a validator that shares nothing with what made the answer."""
    # What docs/structured.md says of times: any minute may have a leap second, and any year a leap day.
    told = re.sub(r"(\d\d:\d\d):60", r"\1:59", text).replace("-02-29", "-02-28")
    try:
        jsonschema_rs.validate(made.schema, json.loads(told), validate_formats=True)
    except ValueError as error:
        pytest.fail(f"schema {number}: {text!r}: {error}")


async def answered(numbers: range) -> list[bool]:
    """Result of `ended` for every answer to the schemas of these numbers."""
    slots = asyncio.Semaphore(AT_A_TIME)
    async with running_stack() as stack:

        async def one(number: int) -> list[bool]:
            async with slots:
                return await ended(stack, number)

        return [each for found in await asyncio.gather(*map(one, numbers)) for each in found]


@pytest.mark.slow
async def test_answers_follow_their_schemas() -> None:
    """Two dozen of them, refused ones among them."""
    assert any(make(number).unenforced for number in range(USUAL))
    found = await answered(range(USUAL))
    assert sum(found) > len(found) * 2 / 3


@pytest.mark.grid
@pytest.mark.parametrize("first", range(USUAL, NUM_SCHEMAS, PART))
async def test_answers_follow_four_hundred_schemas(first: int) -> None:
    """All of them, minutes long."""
    found = await answered(range(first, first + PART))
    assert sum(found) > len(found) * 2 / 3


def test_a_schema_is_made_from_its_number() -> None:
    """Every one is a schema, hardly two are the same, and everything that the generator knows occurs."""
    schemas = [make(number) for number in range(NUM_SCHEMAS)]
    texts = [json.dumps(made.schema) for made in schemas]
    assert texts == [json.dumps(make(number).schema) for number in range(NUM_SCHEMAS)]
    assert len(set(texts)) > 0.98 * NUM_SCHEMAS
    for made in schemas:
        jsonschema_rs.meta.validate(made.schema)
    words = ("$ref", "anyOf", "oneOf", "allOf", "prefixItems", "patternProperties", "multipleOf", "format", "pattern")
    assert [word for word in words if sum(f'"{word}"' in text for text in texts) < NUM_SCHEMAS / 40] == []
