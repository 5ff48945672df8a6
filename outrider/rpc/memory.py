"""Memory of a process for requests, in bytes, taken before they are read and before they are parsed."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.errors import Overloaded

# Others that hold memory are read and answered meanwhile; who waits longer would rather hear that it is too much.
WAIT_S = 15.0
# What takes no more is let in where longer ones wait, into a part of the memory that is left to it.
SHORT_BYTES = 64 << 10
SHORT_PART = 8


class Memory:
    """A budget of bytes. Who finds too little waits, in order, but not for long.

    Where it is known whose the bytes are, the requests of one together hold no more than a half. An eighth is left to
    those that are short.
    """

    def __init__(self, limit: int, wait_s: float = WAIT_S) -> None:
        self.limit = limit
        self.held = 0
        self._wait_s = wait_s
        self._held_by: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[Share, int]] = {}

    @contextmanager
    def share(self, whose: str = "") -> Iterator["Share"]:
        """Share of one request, given back at the end; of those without a name it is not known whose they are."""
        share = Share(self, whose)
        try:
            yield share
        finally:
            share.give_back()

    async def take(self, share: "Share", num_bytes: int) -> None:
        """Takes so many bytes; raises Overloaded where they do not come free in time, or never could."""
        if num_bytes <= SHORT_BYTES and self._has_room(share, num_bytes):
            self._change(share, num_bytes)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = share, num_bytes
        self._call()
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
        for turn, (share, num_bytes) in list(self._waiting.items()):
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
