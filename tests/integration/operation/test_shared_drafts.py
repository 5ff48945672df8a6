"""Drafts that come, drain or die while streams run: all share the sessions that run, and no token is another one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
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
    running_stack,
    token_ids,
)

from draft_service.server import start as start_draft
from gateway.sessions import discovery, draft_move
from gateway.sessions.placement import MovedFor
from gateway.sessions.replicas import Replicas

ANIMALS = ("dog", "cat", "cow", "pig")
STREAMS = [f"Once upon a time there was a {animal} who" for animal in ANIMALS]
SAID: dict[str, Any] = {
    "max_tokens": 80,
    "ignore_eos": True,
    "temperature": 0.8,
    "cache_salt": "shared",
    "draft_count": 4,
}
HALFWAY = 6  # forwards of the target, after which every stream is in the middle


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and sessions are looked at as often as may be."""
    monkeypatch.setattr(discovery, "FILE_LOOK_S", 0.01)
    monkeypatch.setattr(draft_move, "LOOK_S", 0.0)


class Pool:
    """Drafts of a stack, which its gateway finds in a file."""

    def __init__(self, stack: RunningStack, addresses: Path) -> None:
        assert stack.gateway is not None
        assert stack.gateway.backend.draft is not None
        self.replicas: Replicas = stack.gateway.backend.draft
        self.stack, self._file = stack, addresses

    async def join(self, count: int) -> None:
        """Starts so many further drafts, and waits until the gateway has a link to each."""
        settings = self.stack.draft_settings
        assert settings is not None
        for _ in range(count):
            further = self.stack.further_drafts
            further[f"further {len(further)}"] = await start_draft(replace(settings, listen="127.0.0.1:0"))
        await self.found()

    async def found(self) -> None:
        """Writes the file anew, and waits until the gateway has a link to each."""
        drafts = [self.stack.draft, *self.stack.further_drafts.values()]
        lines = "\n".join(each.address for each in drafts)
        further = self._file.with_suffix(".new")
        further.write_text(lines)
        further.rename(self._file)
        await eventually(lambda: len(self.replicas.peers) == len(drafts) and all(p.info for p in self.replicas.peers))

    @property
    def opened(self) -> list[int]:
        """Sessions that each draft has had, in the order of the file."""
        return [peer.book.num_opened for peer in self.replicas.peers]

    async def plain(self) -> list[tuple[int, ...]]:
        """What the target says alone to the same prompts."""
        return token_ids(await answers(self.stack, STREAMS, **SAID | {"draft_count": 0}))

    async def streams(self, in_the_middle: Callable[[], Coroutine[Any, Any, None]]) -> Sequence[Answer]:
        """Answers to all streams; what happens in their middle has happened before they go on."""
        halted = HaltedTarget(self.stack, HALFWAY)
        asking = asyncio.create_task(answers(self.stack, STREAMS, **SAID))
        await halted.make()
        await in_the_middle()
        halted.let_go()
        return await asking


@asynccontextmanager
async def pool_of(folder: Path, count: int) -> AsyncIterator[Pool]:
    """A stack whose gateway has so many drafts."""
    addresses = folder / "drafts"
    addresses.write_text("")
    settings = {"draft": f"file:{addresses}", "draft_wait_seconds": 0.0, **PATIENT}
    async with running_stack(gateway=settings) as stack:
        here = Pool(stack, addresses)
        await here.found()
        await here.join(count - 1)
        yield here


async def test_a_pool_that_grows_shares_the_sessions_that_run(tmp_path: Path) -> None:
    """Four streams are on one draft when two more come: each of these has some, and no round is without guesses."""
    async with pool_of(tmp_path, 1) as here:
        found = await here.streams(lambda: here.join(2))
        assert token_ids(found) == await here.plain()
        assert min(here.opened[1:]) >= 1
        assert here.replicas.moves[MovedFor.LOAD] >= 2
        assert not any(each.completion.speculation.fallback_rounds for each in found)


async def test_a_draft_that_drains_ends_before_its_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions go on with the other one, and no round is without guesses."""
    make_places_as_fast(monkeypatch)
    async with pool_of(tmp_path, 2) as here:
        draft, ended_first = here.stack.draft, list[bool]()
        tasks = list[asyncio.Task[None]]()

        async def stop() -> None:
            await draft.stop(600)
            ended_first.append(any(peer.book.session_count for peer in here.replicas.peers[1:]))

        async def drain() -> None:
            assert here.replicas.peers[0].book.session_count > 0
            tasks.append(asyncio.create_task(stop()))
            await eventually(lambda: here.replicas.peers[0].is_draining)

        found = await here.streams(drain)
        await tasks[0]
        here.stack.draft = None
        assert token_ids(found) == await here.plain()
        assert ended_first == [True]
        assert here.replicas.moves[MovedFor.LEAVING] > 0
        assert not any(each.completion.speculation.fallback_rounds for each in found)


async def test_sessions_of_a_killed_draft_guess_on_the_others(tmp_path: Path) -> None:
    """Each loses a round or two, and then has guesses to its end."""
    async with pool_of(tmp_path, 3) as here:
        found = await here.streams(here.stack.stop_draft)
        assert token_ids(found) == await here.plain()
        for each in found:
            assert each.completion.speculation.fallback_rounds <= 2
            assert all(round_.facts.draft_count for round_ in each.rounds[-10:-1])
