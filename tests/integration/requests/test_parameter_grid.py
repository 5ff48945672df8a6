"""All parameters by all rules by speculation, through real services: every pair of values occurs in a request."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.basics import grid
from support.grid import (
    BANNED_WORDS,
    BLOCK,
    EOS,
    LENIENT,
    MATCH,
    PARAMETERS,
    RATIO,
    RULES,
    STORY,
    Fields,
    Row,
    Samples,
    ask,
    banned_sequences,
    check_same_where_equal,
    check_samples,
    contains,
    fields_of,
    is_greedy,
    is_plain,
    missing_pairs,
    parameters_of,
    plain_of,
    rows,
)
from support.stack import PATIENT, RunningStack, running_stack

AT_A_TIME = 8
# Each needs another parameter to have an effect.
LIKELY_EOS = {"logit_bias": {EOS: 9.0}}
BASES: dict[str, dict[str, Any]] = {"length": LIKELY_EOS, "ignore_eos": LIKELY_EOS}
SAID_OTHERWISE = {"speculation", "drafter", "logprobs", "samples", "prompt"}


async def check_row(stack: RunningStack, row: Row) -> int:
    """Asks for a row twice, and for the same plainly, all at once; then for its last sample alone.

    Returns how many draft tokens were accepted.
    """
    fields = fields_of(row)
    first, again, plain = await asyncio.gather(ask(stack, fields), ask(stack, fields), ask(stack, plain_of(fields)))
    for samples in (first, again, plain):
        check_samples(samples)
        check_same_where_equal(samples, plain)
    if first.draft_counts == again.draft_counts and not draws_anew(fields):
        assert first.token_ids == again.token_ids
    if is_deterministic(fields):
        assert first.draft_counts == again.draft_counts
        await check_alone(stack, first)
    if says_what_plain_says(fields):
        assert first.token_ids == again.token_ids == plain.token_ids
        assert first.logprobs == again.logprobs == plain.logprobs
    return sum(answer.completion.speculation.accepted_tokens for answer in first.answers)


async def check_alone(stack: RunningStack, samples: Samples) -> None:
    """A sample's seed gives it again, without the others."""
    last = samples.answers[-1]
    alone = await ask(stack, {**samples.fields, "sample_count": 1, "seed": last.completion.seed})
    assert alone.token_ids == [last.token_ids]
    assert alone.answers[0].text == last.text


def draws_anew(fields: Fields) -> bool:
    """Whether the noise is new each time: the rule tests guesses with it, and the request does not fix what guesses."""
    is_tested = fields["rule"] in {RATIO, BLOCK, LENIENT} and not is_plain(fields)
    return is_tested and not fields.keys() >= {"draft_count", "drafter"}


def is_deterministic(fields: Fields) -> bool:
    """Whether nothing but the request decides how many tokens are drafted in each round, and what they are."""
    return is_plain(fields) or ("draft_count" in fields and not draws_anew(fields))


def says_what_plain_says(fields: Fields) -> bool:
    """Whether speculation must not change a token: under `match`, without any, and where a rule has no choice."""
    # `lenient` with a factor of 1 is `ratio`; `typical` keeps a guess beside the most probable token.
    is_ratio = fields["rule"] == LENIENT and "acceptance" in fields
    has_no_choice = is_greedy(fields) and (is_ratio or fields["rule"] in {RATIO, BLOCK})
    return fields["rule"] == MATCH or is_plain(fields) or has_no_choice


async def check_rows(stack: RunningStack, some: Sequence[Row]) -> int:
    """Checks rows at the same time; what fails says for which row. Returns how many draft tokens were accepted."""
    outcomes = await asyncio.gather(*(check_row(stack, row) for row in some), return_exceptions=True)
    errors = []
    for row, outcome in zip(some, outcomes, strict=True):
        if isinstance(outcome, Exception):
            outcome.add_note(f"in {fields_of(row)}")
            errors.append(outcome)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(some)} rows", errors)
    await stack.quiet()
    return sum(outcome for outcome in outcomes if isinstance(outcome, int))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["match", "block", *grid("ratio", "lenient", "typical")])
async def test_every_parameter_under_every_rule(rule: str) -> None:
    """Nothing crashes, counts and ends are right, nothing is left, and tokens are those of the rule."""
    wanted = rows(rule)
    parts = [wanted[start : start + AT_A_TIME] for start in range(0, len(wanted), AT_A_TIME)]
    async with running_stack(gateway=PATIENT) as stack:
        accepted = [await check_rows(stack, part) for part in parts]
    # Else all of this would be about plain decoding.
    assert any(accepted)


@pytest.mark.parametrize("rule", RULES)
def test_the_grid_has_every_pair(rule: str) -> None:
    """And with that, each value of each parameter with speculation and without."""
    assert missing_pairs(parameters_of(rule), rows(rule)) == []


@pytest.mark.slow
async def test_every_value_changes_an_answer() -> None:
    """No parameter is in the grid in name only: beside its default, each value gives other tokens with some seed."""
    async with running_stack(draft=None) as stack:
        for name, values in PARAMETERS.items():
            if name not in SAID_OTHERWISE:
                base = {"text": STORY, "max_tokens": 24, **BASES.get(name, {}), **values[0]}
                await asyncio.gather(*(check_changes(stack, base, value) for value in values[1:]))


async def check_changes(stack: RunningStack, base: Fields, value: Fields) -> None:
    """Fails when a value changes nothing."""
    for seed in range(6):
        usual = await ask(stack, {"seed": seed, **base})
        changed = await ask(stack, {"seed": seed, **base, **value})
        if usual.token_ids != changed.token_ids:
            return
    raise AssertionError(f"{value} changes nothing beside {base}")


@pytest.mark.slow
async def test_banned_words_would_be_said() -> None:
    """The same request without the ban says one of them: the check can fail."""
    fields = {"text": STORY, "max_tokens": 24, "temperature": 0.0, "seed": 1}
    async with running_stack(draft=None) as stack:
        [token_ids] = (await ask(stack, fields)).token_ids
        assert any(contains(token_ids, sequence) for sequence in banned_sequences(tuple(BANNED_WORDS)))
        [token_ids] = (await ask(stack, {**fields, "banned_words": BANNED_WORDS})).token_ids
        assert not any(contains(token_ids, sequence) for sequence in banned_sequences(tuple(BANNED_WORDS)))
