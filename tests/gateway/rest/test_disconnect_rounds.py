"""A client of REST that leaves costs nothing beyond the forward that runs: whole and streamed, at any moment."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.basics import PATIENCE_S, HeldDevice, eventually, held
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, rest_stack, said

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Once upon a time there was a miller who had"
PROMPTS = {CHAT: said(TEXT), COMPLETIONS: {"prompt": TEXT}}
# Longer than what may be generated while a test looks.
LENGTH = {"max_tokens": 3000, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rest() -> AsyncIterator[RestStack]:
    """One stack for the tests, each of which leaves it as it was."""
    async with rest_stack() as running:
        yield running


def sessions_of(rest: RestStack) -> list[Any]:
    """The sessions that target and draft hold."""
    return [each.session for service in (rest.stack.target, rest.stack.draft) for each in service.table]


def most_said(rest: RestStack) -> int:
    """Tokens after the prompt of the target's session that has most."""
    return max((len(each.session) - each.session.prompt_len for each in rest.stack.target.table), default=0)


async def leave(rest: RestStack, asking: "asyncio.Task[Any]", devices: tuple[HeldDevice, HeldDevice]) -> None:
    """Breaks the connection and lets held devices do all that is asked of them but forwards, until nothing is held."""
    assert not asking.done()
    asking.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while sessions_of(rest):
            await asyncio.gather(*(device.run_jobs() for device in devices))


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [{"enabled": False}, {"draft_count": 4}, {"draft_count": "auto"}])
@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_who_leaves_in_the_middle_costs_no_further_forward(
    rest: RestStack, path: str, stream: bool, num_tokens: int, speculation: dict[str, Any]
) -> None:
    """With both devices held between two forwards, the disconnection alone makes both services free the sessions."""
    body = {**PROMPTS[path], **LENGTH, "stream": stream, "n": 2, "speculation": speculation}
    asking = asyncio.create_task(rest.http.post(path, json=body))
    await eventually(lambda: most_said(rest) >= num_tokens or asking.done())
    async with held(rest.stack.target) as target, held(rest.stack.draft) as draft:
        sessions = sessions_of(rest)
        forwards = [session.last_forward for session in sessions]
        assert max(forwards, default=0)
        await leave(rest, asking, (target, draft))
    await rest.quiet()
    assert [session.last_forward for session in sessions] == forwards


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_who_leaves_before_the_prompt_is_read_costs_none(rest: RestStack, path: str, stream: bool) -> None:
    """The sessions that wait for their first forward are freed without it."""
    async with held(rest.stack.target) as target, held(rest.stack.draft) as draft:
        asking = asyncio.create_task(rest.http.post(path, json={**PROMPTS[path], **LENGTH, "stream": stream}))
        async with asyncio.timeout(PATIENCE_S):
            while not rest.stack.target.table:
                await asyncio.gather(target.run_jobs(), draft.run_jobs())
        sessions = sessions_of(rest)
        await leave(rest, asking, (target, draft))
    await rest.quiet()
    assert {session.last_forward for session in sessions} == {0}
