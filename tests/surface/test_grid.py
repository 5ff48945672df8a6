"""All parameters by all rules by speculation over REST: no crash, and equal answers where the rule promises them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from support.grid import BLOCK, LENIENT, MATCH, RATIO, RULES, STORY, ask, fields_of, is_greedy, is_plain, plain_of, rows
from support.rest.rest_rows import body_of, chat_of
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, rest_stack
from support.stack import PATIENT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.surface]
AT_A_TIME = 8
SLICE = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rest() -> AsyncIterator[RestStack]:
    """A stack whose draft is never too late."""
    async with rest_stack(gateway=PATIENT) as running:
        yield running


def equals_plain(fields: Mapping[str, Any]) -> bool:
    """Whether speculation must not change a token of the answer."""
    is_ratio = fields["rule"] == LENIENT and "acceptance" in fields
    has_no_choice = is_greedy(fields) and (is_ratio or fields["rule"] in {RATIO, BLOCK})
    return fields["rule"] == MATCH or is_plain(fields) or has_no_choice


def answers(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was said, without what may differ."""
    return list(reply["choices"])


async def check_row(rest: RestStack, fields: Mapping[str, Any]) -> int:
    """Asks for a row as text, streamed, as a conversation, plainly, and by gRPC. Returns how much was accepted."""
    body, plain = body_of(fields), body_of(plain_of(fields))
    whole, expected = await asyncio.gather(rest.ask(COMPLETIONS, **body), rest.ask(COMPLETIONS, **plain))
    assert len(whole["choices"]) == fields.get("sample_count", 1)
    if equals_plain(fields):
        assert answers(whole) == answers(expected)
        texts = [choice["text"].removeprefix(STORY if body.get("echo") else "") for choice in whole["choices"]]
        assert texts == [answer.text for answer in (await ask(rest.stack, plain_of(fields))).answers]
    if equals_plain(fields) and not body.get("echo"):
        stream = await rest.stream(COMPLETIONS, **body)
        assert [stream.text(choice["index"]) for choice in whole["choices"]] == [
            choice["text"] for choice in whole["choices"]
        ]
    talk, plain_talk = await asyncio.gather(rest.ask(CHAT, **chat_of(body)), rest.ask(CHAT, **chat_of(plain)))
    if equals_plain(fields):
        assert answers(talk) == answers(plain_talk)
    figures = whole["metrics"]["speculative_decoding"]
    return figures["num_accepted_draft_tokens"] if figures else 0


async def check_rows(rest: RestStack, some: Sequence[Mapping[str, Any]]) -> int:
    """Checks rows at the same time; what fails says for which row."""
    fields = [fields_of(row) for row in some]
    outcomes = await asyncio.gather(*(check_row(rest, each) for each in fields), return_exceptions=True)
    errors = []
    for each, outcome in zip(fields, outcomes, strict=True):
        if isinstance(outcome, Exception):
            outcome.add_note(f"in {each}")
            errors.append(outcome)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(some)} rows", errors)
    await rest.quiet()
    return sum(outcome for outcome in outcomes if isinstance(outcome, int))


async def check_all(rest: RestStack, some: Sequence[Mapping[str, Any]]) -> None:
    """Checks rows, a few at a time; some guesses must have been kept, else all would be about plain decoding."""
    parts = [some[start : start + AT_A_TIME] for start in range(0, len(some), AT_A_TIME)]
    assert any([await check_rows(rest, part) for part in parts])


@pytest.mark.parametrize("rule", RULES)
async def test_some_parameters_under_every_rule(rest: RestStack, rule: str) -> None:
    """Each sixth row of the grid."""
    await check_all(rest, rows(rule)[::SLICE])


@pytest.mark.grid
@pytest.mark.parametrize("rule", RULES)
async def test_every_parameter_under_every_rule(rest: RestStack, rule: str) -> None:
    """Every pair of values of any two parameters."""
    await check_all(rest, rows(rule))
