"""Equal targets of one gateway share its sessions, and no token is another one for that."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from support.basics import eventually
from support.stack import Answer, HaltedTarget, RunningStack, answers, request_of, running_stack, token_ids

from gateway.sessions.link import Link
from gateway.sessions.placement import PlacedFor

ANIMALS = ("dog", "cat", "cow", "pig", "fox", "hen", "owl", "bee")
STREAMS = [f"Once upon a time there was a {animal} who" for animal in ANIMALS]
STORY = " One day she went to the park with her mother, and they saw a big dog that was very happy to play with a ball."
SAID = {"max_tokens": 24, "temperature": 0.8, "cache_salt": "shared"}


@asynccontextmanager
async def sharing() -> AsyncIterator[tuple[RunningStack, list[HaltedTarget]]]:
    """A stack with two equal targets, which make no forward before they are let go."""
    async with running_stack(further_targets=1) as stack:
        assert stack.gateway is not None
        peers = stack.gateway.backend.target.peers
        await eventually(lambda: all(peer.info for peer in peers))
        yield stack, [HaltedTarget(stack, target=each) for each in stack.targets]


def counts(stack: RunningStack) -> list[int]:
    """Sessions of the gateway on each target."""
    assert stack.gateway is not None
    return [peer.book.session_count for peer in stack.gateway.backend.target.peers]


async def halfway(
    stack: RunningStack, halted: Sequence[HaltedTarget], prompts: Sequence[str], **fields: object
) -> tuple[list[Answer], list[int]]:
    """Answers to prompts that all wait at once, and how many of them each target had."""
    asking = asyncio.create_task(answers(stack, prompts, **SAID | fields))
    await eventually(lambda: sum(counts(stack)) == len(prompts))
    shares = counts(stack)
    for each in halted:
        each.let_go()
    return await asking, shares


@pytest.mark.parametrize("draft_count", [0, 4])
async def test_two_targets_share_eight_streams(draft_count: int) -> None:
    """Both have some of those that wait, and the answers are those of one target alone."""
    async with running_stack() as stack:
        expected = token_ids(await answers(stack, STREAMS, draft_count=draft_count, **SAID))
    async with sharing() as (stack, halted):
        found, shares = await halfway(stack, halted, STREAMS, draft_count=draft_count)
        assert token_ids(found) == expected
        assert min(shares) >= 2
        assert stack.gateway is not None
        placements = stack.gateway.backend.target.placements
        assert (sum(placements.values()), placements[PlacedFor.ONLY]) == (8, 0)


async def test_a_wrong_token_on_one_of_them_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that confuses the answers of two sessions of one link."""
    async with running_stack() as stack:
        expected = token_ids(await answers(stack, STREAMS, draft_count=0, **SAID))
    send, sent = Link.send, list[object]()

    def confused(self: Link, session_id: bytes, messages: Sequence[object]) -> int:
        opens = [each for each in messages if each.HasField("open")] if not sent else []  # type: ignore[attr-defined]
        for each in opens:
            each.open.session.seed += 1  # type: ignore[attr-defined]
            sent.append(each)
        return send(self, session_id, messages)  # type: ignore[arg-type]

    monkeypatch.setattr(Link, "send", confused)
    async with sharing() as (stack, halted):
        found, _ = await halfway(stack, halted, STREAMS, draft_count=0)
        assert sum(one != two for one, two in zip(token_ids(found), expected, strict=True)) == 1


async def test_the_second_turn_goes_to_where_the_first_one_is_cached() -> None:
    """Of conversations that began on both targets, every one finds what was read of it."""
    async with sharing() as (stack, halted):
        first = [each + 6 * STORY for each in STREAMS]
        found, shares = await halfway(stack, halted, first, draft_count=0)
        assert min(shares) >= 2
        for begun, answer in zip(first, found, strict=True):
            text = begun + answer.text + STORY
            usage = (await stack.generate(text=text, draft_count=0, seed=1, **SAID)).completion.usage
            assert usage.cached_prompt_tokens > usage.prompt_tokens / 2
        assert stack.gateway is not None
        assert stack.gateway.backend.target.placements[PlacedFor.HIT] > 0


async def test_all_samples_of_a_request_go_to_one_target() -> None:
    """They share what is cached of its prompt."""
    async with sharing() as (stack, halted):
        call = stack.call(request_of(text=STREAMS[0], sample_count=4, draft_count=0, **SAID))
        await eventually(lambda: sum(counts(stack)) == 4)
        assert sorted(counts(stack)) == [0, 4]
        for each in halted:
            each.let_go()
        completions = [response.HasField("completion") async for response in call]
        assert sum(completions) == 4
