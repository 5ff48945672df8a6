"""Several draft services that guess for one request at once; a round goes on without those late, lost or absent."""

import asyncio
from collections.abc import Sequence
from typing import Self

from gateway.rounds.planner import DraftOutlook
from gateway.rounds.round import NOTHING, GuessRequest, Proposal
from gateway.sessions.draft import RemoteDraftSession

GRACE = 1.0  # time that the others have after the first answer, in times that this took
MIN_GRACE_S = 0.005


class DraftTeam:
    """Sessions on several drafts, in the order of their guesses. Each has its own deadlines, epochs and breaker."""

    def __init__(self, sessions: Sequence[RemoteDraftSession]) -> None:
        """Takes at least one session."""
        self._sessions = tuple(sessions)

    @property
    def outlook(self) -> DraftOutlook:
        """Outlook of all, like that of one draft: no obstacle while any draft can be asked, for the longest context."""
        outlooks = [session.outlook for session in self._sessions]
        able = [each for each in outlooks if each.obstacle is None]
        if not able:
            return outlooks[0]
        limits = [each.max_draft_count for each in able if each.max_draft_count is not None]
        contexts = [each.context_len for each in able if each.context_len is not None]
        return DraftOutlook(None, max(contexts, default=None), min(limits, default=None))

    async def __aenter__(self) -> Self:
        for session in self._sessions:
            await session.__aenter__()
        return self

    async def __aexit__(self, *exit_: object) -> None:
        for session in self._sessions:
            await session.__aexit__(*exit_)

    async def propose(self, asked: GuessRequest) -> Proposal:
        """Guesses of each that can be asked, as parts of a proposal that is not merged yet."""
        able = [session for session in self._sessions if asked.count and session.can_guess(asked.count)]
        for session in self._sessions:
            if session not in able:
                session.change_place(is_guessing=False)
        if not able:
            return NOTHING
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        tasks = [asyncio.create_task(session.propose(asked)) for session in able]
        try:
            waiting = set(tasks)
            # An answer that only says what went wrong hurries no other draft.
            while waiting and not any(task.done() and task.result().tree for task in tasks):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                _, waiting = await asyncio.wait(waiting, timeout=max(MIN_GRACE_S, GRACE * (loop.time() - started_s)))
            return Proposal(parts=tuple(task.result() for task in tasks if task not in waiting))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
