"""A request with more choices than the gateway has places: its parts take turns with everybody else's requests."""

import asyncio

import pytest
from support.basics import eventually
from support.rest.rest_stack import COMPLETIONS, RestStack, rest_stack

BIG = {
    "prompt": ["Once upon a time", "The fox said", "A king had"],
    "n": 4,
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 5,
    "return_token_ids": True,
}
SMALL = {"prompt": "Il était une fois", "max_tokens": 4, "ignore_eos": True, "seed": 6, "return_token_ids": True}


async def whole(rest: RestStack, **body: object) -> list[list[int]]:
    """The token ids of each choice."""
    return [choice["token_ids"] for choice in (await rest.ask(COMPLETIONS, **body))["choices"]]


async def streamed(rest: RestStack, **body: object) -> list[list[int]]:
    """Token ids of each choice of a stream."""
    found = await rest.stream(COMPLETIONS, **body)
    assert found.is_done
    indices = sorted({choice["index"] for chunk in found.chunks for choice in chunk["choices"]})
    return [[token_id for part in found.of_choice(index) for token_id in part["token_ids"]] for index in indices]


@pytest.mark.slow
async def test_a_small_request_behind_a_big_one_is_answered_before_the_big_one_ends() -> None:
    """And both say what they say where there is room for all, token for token."""
    async with rest_stack() as roomy:
        expected, small = await whole(roomy, **BIG), await whole(roomy, **SMALL)
    assert list(map(len, expected)) == [40] * 12
    async with rest_stack(gateway={"max_requests": 2, "max_queue": 1}) as rest:
        for ask in (whole, streamed):
            big = asyncio.create_task(ask(rest, **BIG))
            await eventually(lambda: rest.admission.running == 2)
            assert await ask(rest, **SMALL) == small
            assert not big.done()
            assert await big == expected
