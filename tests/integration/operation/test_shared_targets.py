"""Equal targets of one gateway share its sessions, and no token is another one for that."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.basics import eventually
from support.stack import (
    PATIENT,
    Answer,
    HaltedTarget,
    RunningStack,
    answers,
    make_places_as_fast,
    request_of,
    running_stack,
    token_ids,
)

from gateway.metrics import Watched
from gateway.sessions import replicas
from gateway.sessions.link import Link
from gateway.sessions.placement import LinkFigures, PlacedFor, Placement, PlaceWish, PromptPrefix

ANIMALS = ("dog", "cat", "cow", "pig", "fox", "hen", "owl", "bee")
STREAMS = [f"Once upon a time there was a {animal} who" for animal in ANIMALS]
STORY = " One day she went to the park with her mother, and they saw a big dog that was very happy to play with a ball."
SAID = {"max_tokens": 24, "temperature": 0.8, "cache_salt": "shared"}


@asynccontextmanager
async def sharing(**options: Any) -> AsyncIterator[tuple[RunningStack, list[HaltedTarget]]]:
    """A stack with two equal targets, which make no forward before they are let go."""
    async with running_stack(further_targets=1, **options) as stack:
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
async def test_two_targets_share_eight_streams(monkeypatch: pytest.MonkeyPatch, draft_count: int) -> None:
    """Both have some of those that wait, where both are as fast, and the answers are those of one target alone."""
    make_places_as_fast(monkeypatch)
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


async def test_the_second_turn_goes_to_where_the_first_one_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of conversations that began on both targets, every one finds what was read of it, where both are as fast."""
    make_places_as_fast(monkeypatch)
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


LONG = [each + 6 * STORY for each in STREAMS]
SMALL = {"target_options": {"kv_tokens": 256}, "draft_options": {"kv_tokens": 4096}}


@asynccontextmanager
async def crowded(
    num_waiting: int,
) -> AsyncIterator[tuple[RunningStack, list[HaltedTarget], list[asyncio.Task[Answer]]]]:
    """Two halted targets with room for one session each, which they have, and more that came one after the other."""
    async with sharing(**SMALL) as (stack, halted):
        assert stack.gateway is not None
        target, calls = stack.gateway.backend.target, list[asyncio.Task[Answer]]()
        # On a busy machine more than ten seconds pass here, after which the first in the line would go to a full one.
        target.room.patience_s = 600.0
        await eventually(lambda: all(peer.load for peer in target.peers))
        for seed, text in enumerate(LONG[: 2 + num_waiting]):
            call = stack.generate(text=text, seed=seed, draft_count=0, **SAID)
            calls.append(asyncio.create_task(call))
            await eventually(lambda: sum(counts(stack)) + len(target.room) == len(calls))
        assert (counts(stack), len(target.room)) == ([1, 1], num_waiting)
        yield stack, halted, calls


async def test_who_finds_all_targets_full_goes_to_the_first_that_has_room() -> None:
    """One target hangs in its work, and the other one has all that waited, in order; the answers are the same."""
    async with running_stack() as stack:
        expected = token_ids(await answers(stack, LONG[:4], draft_count=0, **SAID))
    async with crowded(2) as (stack, halted, calls):
        assert stack.gateway is not None
        target = stack.gateway.backend.target
        watched = Watched(stack.gateway.frontend.admission, stack.gateway.backend, None, int)
        [waiting] = [each for each in watched.collect() if each.name == "outrider_sessions_waiting_for_room"]
        assert waiting.samples[0].value == 2
        halted[0].let_go()
        await asyncio.gather(calls[2], calls[3])
        assert [peer.book.num_opened for peer in target.peers] == [3, 1]
        assert (target.placements[PlacedFor.LATE], len(target.room)) == (2, 0)
        halted[1].let_go()
        assert token_ids(await asyncio.gather(*calls)) == expected


async def test_a_client_that_leaves_the_line_leaves_nothing() -> None:
    """No target hears of it, and who came after it goes on."""
    async with crowded(2) as (stack, halted, calls):
        assert stack.gateway is not None
        target = stack.gateway.backend.target
        calls[2].cancel()
        await eventually(lambda: len(target.room) == 1)
        for each in halted:
            each.let_go()
        await asyncio.gather(calls[0], calls[1], calls[3])
        assert sum(peer.book.num_opened for peer in target.peers) == 3


async def test_the_line_goes_on_when_a_target_is_lost() -> None:
    """To the one that is left, after the session that goes on there."""
    async with crowded(1) as (stack, halted, calls):
        await stack.further_targets.pop().stop(0)
        halted[0].let_go()
        found = await asyncio.gather(*calls)
        assert [len(each.token_ids) for each in found] == [24, 24, 24]


@pytest.mark.parametrize("draft_count", [0, 4])
async def test_a_session_costs_one_choice_and_a_round_none(draft_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rounds it has; the digests of its prompt are made once, and those of its answer when it ends."""
    chosen, grown = list[int](), list[int]()
    choose, grow = replicas.choose, PromptPrefix.grown

    def counting_choose(places: Sequence[LinkFigures], wish: PlaceWish) -> Placement | None:
        chosen.append(len(places))
        return choose(places, wish)

    def counting_grow(self: PromptPrefix, tokens: Sequence[int]) -> PromptPrefix:
        grown.append(len(tokens))
        return grow(self, tokens)

    async with sharing(gateway=PATIENT) as (stack, halted):
        for each in halted:
            each.let_go()
        monkeypatch.setattr(replicas, "choose", counting_choose)
        monkeypatch.setattr(PromptPrefix, "grown", counting_grow)
        for max_tokens in (8, 64):
            chosen.clear()
            grown.clear()
            said = SAID | {"max_tokens": max_tokens, "ignore_eos": True}
            answer = await stack.generate(text=LONG[0], seed=1, draft_count=draft_count, **said)
            assert len(answer.rounds) > 2
            # One among the targets, and one of the draft where guesses were asked for.
            assert sorted(chosen) == ([1, 2] if draft_count else [2])
            prompt_len = answer.completion.usage.prompt_tokens
            assert [length for length in grown if length <= prompt_len] == [prompt_len]
            # Then once a service that has read it.
            assert len(grown) <= (3 if draft_count else 2)
