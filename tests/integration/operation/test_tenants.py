"""What a gateway remembers of one tenant's requests is of no use, and no harm, to another's.

All rounds of a request are compared. They are the same in every run as long as no time that was measured has a part in
them: the number of guesses is given, and a draft that guesses beside the lookup in every round leaves no token to the
target that it may commit unasked. What a draft service learns from all who ask it is how far to trust its own values;
these are not compared, and the shape of its trees, which would depend on them, is given.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import tokenizers
from support.stack import DRAFT, PATIENT, TARGET, Answer, RunningStack, running_stack, token_ids

from gateway.lookup.chains import KEY_LEN
from outrider.cli.bench.common import OPENINGS
from outrider.v1 import types_pb2

MAX_TOKENS = 40
MERGED: dict[str, Any] = {
    "drafters": ["lookup", "model"],
    "draft_count": 6,
    "shape": types_pb2.TreeShape(expansions=[2, 1, 1]),
    "return_rounds": True,
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
}
ALONE: dict[str, Any] = {**MERGED, "drafters": ["lookup"], "draft_count": 8, "shape": None}
# The second and the last repeat the first, and the third begins like it.
TEXTS = (OPENINGS[0], OPENINGS[0], f"{OPENINGS[0]} a son. {OPENINGS[1]}", OPENINGS[1], OPENINGS[2], OPENINGS[0])
SEEDS = (5, 5, 6, 7, 8, 5)


async def ask(stack: RunningStack, number: int, salt: str, **fields: Any) -> Answer:
    """One of a tenant's requests; the greedy ones are the odd ones."""
    temperature = 0.0 if number in (3, 4) else 0.8
    asked = {"text": TEXTS[number], "seed": SEEDS[number], "temperature": temperature, "cache_salt": salt}
    return await stack.generate(**{**asked, **MERGED, **fields})


def told(answer: Answer) -> list[Any]:
    """Everything that a client gets, but for times, what depends on them, and sizes of messages that name times."""
    rounds = [
        (
            [(token.token_id, token.origin, token.row, token.drafter, token.draft_logprob) for token in each.tokens],
            [
                (
                    token.token_id,
                    token.row,
                    token.parent,
                    token.drafter,
                    token.value if token.drafter == "lookup" else 0,
                )
                for token in each.rejected
            ],
            each.text_delta,
            each.facts.draft_count,
            each.facts.accepted_count,
            each.facts.evaluated_count,
            each.facts.fallback_reason,
            each.facts.drafter,
        )
        for each in answer.rounds
    ]
    end = answer.completion
    return [rounds, *map(str, (end.finish_reason, end.usage, end.seed, end.speculation, end.survival))]


@asynccontextmanager
async def gateway() -> AsyncIterator[RunningStack]:
    """A gateway that remembers nothing yet, over services that have cached nothing."""
    async with running_stack(TARGET, DRAFT, gateway=PATIENT) as stack:
        yield stack


async def without_another(*, salt: str = "A", **fields: Any) -> list[Answer]:
    """The tenant's requests, one after the other, and no other tenant's."""
    async with gateway() as stack:
        return [await ask(stack, number, salt, **fields) for number in range(len(TEXTS))]


async def beside(salt: str) -> list[Answer]:
    """The tenant's requests; all of them come with another salt before the first, and beside each."""
    async with gateway() as stack:
        for number in range(len(TEXTS)):
            await ask(stack, number, salt)
        found = []
        for number in range(len(TEXTS)):
            own, *_ = await asyncio.gather(
                ask(stack, number, "A"), *(ask(stack, other, salt) for other in (number, number - 1))
            )
            found.append(own)
        return found


def looked_up(answer: Answer) -> int:
    """Guesses of the lookup."""
    return sum(each.draft_tokens for each in answer.completion.speculation.drafters if each.drafter == "lookup")


@pytest.mark.grid
async def test_another_tenant_changes_nothing() -> None:
    """Answers, guesses, their values, and figures are those without the other tenant's equal requests; the same
    requests under the tenant's own salt change them.
    """
    expected = [told(answer) for answer in await without_another()]
    for salt in ("B", "", "A "):
        assert [told(answer) for answer in await beside(salt)] == expected, salt
    own = await beside("A")
    assert token_ids(own) == [tuple(token[0] for each in rounds for token in each[0]) for rounds, *_ in expected]
    assert told(own[0]) != expected[0]
    alone = await without_another()
    # The tenant's first request finds nothing of itself in a memory, and its second all.
    assert looked_up(alone[0]) < looked_up(alone[1])
    assert looked_up(alone[0]) < looked_up(own[0])


def strangers(answer: Answer, prompt: Sequence[int]) -> list[int]:
    """Guesses after committed tokens that do not follow these tokens anywhere else in the request's own text."""
    text, found = [*prompt], []
    for each in answer.rounds:
        key, end = text[-KEY_LEN:], len(text)
        known = {text[place] for place in range(KEY_LEN, end) if text[place - KEY_LEN : place] == key}
        kept = [token.token_id for token in each.tokens if token.row][:1]
        first = kept + [token.token_id for token in each.rejected if token.parent == 0]
        found += [token_id for token_id in first if token_id not in known]
        text += [token.token_id for token in each.tokens]
    return found


@pytest.mark.slow
async def test_guesses_come_from_the_tenants_own_texts() -> None:
    """Of sixteen requests at once, those of a tenant that never asked before get nothing that others said."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in OPENINGS[:8]]

    async def each_of(stack: RunningStack, salt: str) -> list[Answer]:
        asked = (
            stack.generate(token_ids=prompt, seed=seed, temperature=0.8, cache_salt=f"{salt}{seed % 2}", **ALONE)
            for seed, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*asked)

    async with gateway() as stack:
        before = await each_of(stack, "A")
        again, strange = await asyncio.gather(each_of(stack, "A"), each_of(stack, "B"))
        assert token_ids(again) == token_ids(strange) == token_ids(before)
        for answer, prompt in zip((*before, *strange), (*prompts, *prompts), strict=True):
            assert strangers(answer, prompt) == []
        assert any(strangers(answer, prompt) for answer, prompt in zip(again, prompts, strict=True))
        accepted = [sum(answer.completion.speculation.accepted_tokens for answer in each) for each in (again, strange)]
        assert accepted[0] > 2 * accepted[1]


@pytest.mark.slow
async def test_a_request_without_speculation_leaves_no_trace() -> None:
    """Neither one that switches it off nor one without guesses is remembered, whichever client sent it."""
    async with gateway() as stack:
        for fields in ({"enabled": False}, {"draft_count": 0}):
            for number in range(len(TEXTS)):
                answer = await ask(stack, number, "A", **{"drafters": [], "shape": None, **fields})
                assert answer.completion.speculation.draft_tokens == 0
        assert stack.gateway is not None
        assert stack.gateway.backend.lookup is not None
        memories = stack.gateway.backend.lookup.memories
        assert memories is not None
        assert len(memories) == 0
        first = await ask(stack, 0, "A")
        assert len(memories) == 1
    expected = (await without_another())[0]
    assert told(first)[0] == told(expected)[0]
