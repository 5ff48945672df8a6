"""A grammar that is too much work to follow ends equal requests equally, whatever was asked before or guessed."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from support.basics import grid
from support.stack import PATIENT, HaltedTarget, RunningStack, running_stack

from outrider.client import InvalidRequest, OutriderError, Speculation
from outrider.token_tree import TreeShape

# What each exhausts: the lexer's steps, these once more by another path, alternatives of a grammar, and of a schema.
HARD: dict[str, dict[str, Any]] = {
    "nested": {"regex": "(a{0,100}){0,100}"},
    "mixed": {"regex": "([a-c]{0,50}[b-d]{0,50}){0,50}"},
    "rules": {
        "lark": f"start: {' | '.join(f'r{each}' for each in range(2000))}\n"
        + "\n".join(f'r{each}: "w{each * 7919 % 100_003} of" " x"' for each in range(2000))
    },
    "properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"property {each * 7919 % 100_003}": {"type": "integer"} for each in range(400)},
            "additionalProperties": False,
        }
    },
}
PLAIN = Speculation(enabled=False)
WAYS = (
    PLAIN,
    Speculation(draft_count=8, drafter="model"),
    Speculation(draft_count=12, drafter="model", shape=TreeShape()),
    Speculation(draft_count=8, drafter="lookup"),
    Speculation(),
)
End = tuple[tuple[int, ...], str]


async def end_of(stack: RunningStack, speculation: Speculation, options: Mapping[str, Any]) -> End:
    """The tokens of an answer, and the sentence or the reason that it ended with."""
    tokens: list[int] = []
    settings: dict[str, Any] = {"max_tokens": 90, "temperature": 0.0, "seed": 1, "speculation": speculation, **options}
    stream = stack.client.generate("Once upon a time", **settings)
    try:
        async for event in stream:
            tokens += [token.token_id for token in getattr(event, "tokens", ())]
    except OutriderError as error:
        return tuple(tokens), str(error)
    return tuple(tokens), (await stream.result()).result.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [*grid(0.0), 1.0])
async def test_equal_requests_end_equally(temperature: float) -> None:
    """Ten times each: one after another, side by side, among others, with chains, trees and lookups, and after a
    restart of the target.
    """
    async with running_stack(gateway=PATIENT) as stack:
        cases = {name: {"temperature": temperature, **options} for name, options in HARD.items()}
        first = {name: await end_of(stack, PLAIN, options) for name, options in cases.items()}
        for speculation in WAYS:
            assert {name: await end_of(stack, speculation, options) for name, options in cases.items()} == first
        beside = [end_of(stack, speculation, options) for speculation in WAYS[:3] for options in cases.values()]
        others = [end_of(stack, PLAIN, {"regex": f"(a{{0,{each}}}){{0,100}}"}) for each in range(90, 98)]
        ends = await asyncio.gather(*beside, *others)
        assert ends[: len(beside)] == [*first.values()] * 3
        await stack.restart_target()
        for speculation in WAYS[:2]:
            assert {name: await end_of(stack, speculation, options) for name, options in cases.items()} == first
        assert temperature or all(" of the answer it " in sentence for _, sentence in first.values())


@pytest.mark.slow
async def test_what_is_exhausted_is_named() -> None:
    """By the request's own name of the field, with the limit, and how far the answer got."""
    async with running_stack() as stack:
        ends = {name: await end_of(stack, Speculation(draft_count=8), options) for name, options in HARD.items()}
        for name, (tokens, sentence) in ends.items():
            assert sentence.startswith(f"constraint.{next(iter(HARD[name]))} is ")
            assert f"behind {len(tokens)} token{'s' * (len(tokens) != 1)} of the answer it " in sentence
        limits = {name: sentence.partition(" of the answer it ")[2] for name, (_, sentence) in ends.items()}
        assert limits["nested"] == limits["mixed"] == "takes more than 50,000 steps of the lexer for one token"
        assert limits["rules"] == "has 2001 alternatives at one place, of at most 1,200"
        assert limits["properties"].endswith("alternatives at one place, of at most 1,200")


@pytest.mark.slow
async def test_a_restart_within_an_answer_does_not_move_its_end() -> None:
    """The new target reads the tokens as the one before has."""
    async with running_stack(gateway=PATIENT) as stack:
        expected = await end_of(stack, PLAIN, HARD["nested"])
        assert len(expected[0]) > 3 * (1 + 8)
        for speculation in (PLAIN, Speculation(draft_count=8)):
            options = {"max_tokens": 90, "temperature": 0.0, "seed": 1, "speculation": speculation, **HARD["nested"]}
            halted = HaltedTarget(stack, 3)
            stream, tokens = stack.client.generate("Once upon a time", **options), list[int]()
            tokens += [token.token_id for token in (await anext(stream)).tokens]
            await halted.make()
            await stack.restart_target()
            with pytest.raises(InvalidRequest) as ended:
                [tokens.extend(token.token_id for token in event.tokens) async for event in stream]
            assert (tuple(tokens), str(ended.value)) == expected
            assert ended.value.metadata["field"] == "constraint.regex"
