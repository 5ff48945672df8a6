"""Memory of a process for requests, in bytes, taken before they are read and before they are parsed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from outrider.errors import Overloaded

# Others that hold memory are read and answered meanwhile; who waits longer would rather hear that it is too much.
WAIT_S = 15.0
# What takes no more is let in where longer ones wait, into a part of the memory that is left to it.
SHORT_BYTES = 64 << 10
SHORT_PART = 8
# Name of those of whom nothing is known, not even that they ever sent what they began. They are served after all
# others.
STRANGERS = "strangers"


class Memory:
    """A budget of bytes. Who finds too little waits, in order, but not for long.

    Where it is known whose the bytes are, the requests of one together hold no more than a half; so do strangers. An
    eighth is left to those that are short.
    """

    def __init__(self, limit: int, wait_s: float = WAIT_S) -> None:
        self.limit = limit
        self.held = 0
        self._wait_s = wait_s
        self._held_by: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[Share, int]] = {}
        # Whose each is that reads, and when it has to be done if it keeps others waiting.
        self._readers: dict[asyncio.Timeout, tuple[str, float]] = {}

    @contextmanager
    def share(self, whose: str = "") -> Iterator["Share"]:
        """Share of one request, given back at the end; of those without a name it is not known whose they are."""
        share = Share(self, whose)
        try:
            yield share
        finally:
            share.give_back()

    @asynccontextmanager
    async def reading(self, share: "Share", longest_s: float, hurried_s: float) -> AsyncIterator[None]:
        """Time for a share whose bytes are taken before they are there; raises TimeoutError after longest_s.

        Where it keeps others waiting for memory it has hurried_s, so that a silent client keeps no other out for long.
        """
        async with asyncio.timeout(longest_s) as limit:
            self._readers[limit] = share.whose, asyncio.get_running_loop().time() + hurried_s
            self._hurry()
            try:
                yield
            finally:
                del self._readers[limit]

    def _hurry(self) -> None:
        """Has those that read done soon who keep others waiting: for memory, or for a name's half of it."""
        kept_out = [share.whose if self._is_too_much(share, size) else None for share, size in self._waiting.values()]
        now_s = asyncio.get_running_loop().time()
        for limit, (whose, hurried_s) in self._readers.items():
            until_s = max(hurried_s, now_s)
            # Later than now, so that it has not run out, after which it cannot be changed.
            if (None in kept_out or whose in kept_out) and (limit.when() or 0.0) > until_s:
                limit.reschedule(until_s)

    async def take(self, share: "Share", num_bytes: int) -> None:
        """Takes so many bytes; raises Overloaded where they do not come free in time, or never could."""
        if num_bytes <= SHORT_BYTES and self._has_room(share, num_bytes):
            self._change(share, num_bytes)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = share, num_bytes
        self._call()
        if not turn.done():
            self._hurry()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            # Its turn may have come in the same moment.
            has_come = turn.done() and not turn.cancelled()
            if isinstance(error, asyncio.CancelledError):
                self._change(share, -num_bytes if has_come else 0)
                raise
            if not has_come:
                held = f"requests hold {self.held} of {self.limit} bytes"
                message = f"{held}, and {num_bytes} more did not come free within {self._wait_s:g} seconds"
                raise Overloaded(message, held=self.held, limit=self.limit, num_bytes=num_bytes) from None
        finally:
            self._waiting.pop(turn, None)
            self._call()

    def _has_room(self, share: "Share", num_bytes: int) -> bool:
        if num_bytes <= SHORT_BYTES:
            return self.held + num_bytes <= self.limit
        most = self.limit - self.limit // SHORT_PART
        return self.held + num_bytes <= most and not self._is_too_much(share, num_bytes)

    def _is_too_much(self, share: "Share", num_bytes: int) -> bool:
        """Whether these bytes and other requests of the same name would be more than its half."""
        held = self._held_by[share.whose] if share.whose else 0
        return held > 0 and held + num_bytes > self.limit // 2

    def _change(self, share: "Share", num_bytes: int) -> None:
        share.num_bytes += num_bytes
        self.held += num_bytes
        if share.whose:
            self._held_by[share.whose] += num_bytes
            if not self._held_by[share.whose]:
                del self._held_by[share.whose]

    def give_back(self, share: "Share", num_bytes: int) -> None:
        """Frees so many bytes of a share for those that wait."""
        self._change(share, -num_bytes)
        self._call()

    def _call(self) -> None:
        """Lets those in that wait and have room now; none passes one that all the others keep out."""
        known = [each for each in self._waiting.items() if each[1][0].whose != STRANGERS]
        strangers = [each for each in self._waiting.items() if each[1][0].whose == STRANGERS]
        for turn, (share, num_bytes) in (*known, *strangers):
            if turn.done():
                continue
            if self._has_room(share, num_bytes):
                self._change(share, num_bytes)
                turn.set_result(None)
            elif not self._is_too_much(share, num_bytes):
                return


@dataclass(slots=True, eq=False)
class Share:
    """Bytes that a request holds of a memory."""

    memory: Memory
    whose: str
    num_bytes: int = 0

    async def take(self, num_bytes: int) -> None:
        """Takes all that the request needs, at once: halves would keep each other from an end. See Memory."""
        await self.memory.take(self, num_bytes)

    def give_back(self) -> None:
        """Frees all that the request holds."""
        self.memory.give_back(self, self.num_bytes)


class RequestMemory:
    """The memory that requests have of a process: a quarter for those that are on their way, the rest for what they
    become.

    A request that is on its way and waits for the rest never holds up one that has it, so there is always one that
    ends.
    """

    def __init__(self, limit: int, wait_s: float = WAIT_S) -> None:
        self.coming = Memory(limit // 4, wait_s)
        self.kept = Memory(limit - limit // 4, wait_s)

    @property
    def held(self) -> int:
        return self.coming.held + self.kept.held
