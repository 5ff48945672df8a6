"""Answers of sessions on their way out: put on the device thread, taken on the event loop of their link."""

import asyncio
import threading
from typing import Any, Generic, NamedTuple, TypeVar

from outrider.errors import OutriderError, Overloaded
from outrider.estimates.timing import ComputeTimes
from outrider.rpc.fencing import Fence

# Answers that wait on a link, of one session and of all: eight windows of unasked verdicts, so that a client that asks
# for all of them again a few times is still heard.
MAX_UNSENT_OF_SESSION = 2048
MAX_UNSENT = 65_536

ContentT = TypeVar("ContentT")

# The content of an answer to a ping.
PONG = object()


class SessionAnswer(NamedTuple, Generic[ContentT]):
    """Answer of a session to a message: a proposal or verdict on the fence's length, or that it lacks tokens."""

    fence: Fence
    content: ContentT | None
    """Proposal or verdict; None asks for the tokens after known_len, unless there is an error."""
    known_len: int
    cached_len: int
    times: ComputeTimes
    error: OutriderError | None = None
    """Error that ended the session."""


class Outboxes:
    """The outboxes that the device has filled since it last rested.

    No link is woken before, so that all that one step has for one gateway leaves together.
    """

    def __init__(self) -> None:
        self._filled: dict[Outbox, None] = {}

    def add(self, outbox: "Outbox") -> None:
        self._filled[outbox] = None

    def flush(self) -> None:
        """Wakes those who wait for what was put; on the device thread."""
        filled, self._filled = self._filled, {}
        for outbox in filled:
            outbox.flush()


class Outbox:
    """Answers of one link in order; filled on the device thread, emptied on the loop that made it. Owns its sessions.

    A client that leaves more than MAX_UNSENT of them unread is given up: `overflow` has the error then. `client` is the
    name in its certificate, and empty without one.
    """

    def __init__(self, outboxes: Outboxes, client: str = "") -> None:
        self.client = client
        self._outboxes = outboxes
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._answers: list[SessionAnswer[Any]] = []
        self._counts: dict[bytes, int] = {}
        self._has_ended = False
        self._is_waking = self._is_nudged = False
        self._wanted: asyncio.Future[None] | None = None
        self._flooded: set[bytes] = set()
        self.overflow: asyncio.Future[Overloaded] = self._loop.create_future()

    def put(self, answer: SessionAnswer[Any]) -> None:
        """Adds an answer, which leaves when the device rests."""
        session_id = answer.fence.session_id
        with self._lock:
            count = self._counts.get(session_id, 0)
            if answer.error is None and count >= MAX_UNSENT_OF_SESSION:
                self._flooded.add(session_id)
            elif len(self._answers) <= MAX_UNSENT:
                self._counts[session_id] = count + 1
                self._answers.append(answer)
        self._outboxes.add(self)

    def take_flooded(self) -> set[bytes]:
        """Sessions that have had more answers here than one may have, and lost what came after; each is named once."""
        flooded, self._flooded = self._flooded, set()
        return flooded

    def pong(self, fence: Fence) -> None:
        """Answers a ping at once; on the loop."""
        with self._lock:
            self._answers.append(SessionAnswer(fence, PONG, 0, 0, ComputeTimes()))
        self._wake()

    def nudge(self) -> None:
        """Lets `take` return, with whatever answers there are; on the loop."""
        self._is_nudged = True
        self._wake()

    def end(self) -> None:
        """Ends the link after the answers so far."""
        self._has_ended = True
        self._outboxes.add(self)

    def flush(self) -> None:
        """Wakes the loop; from any thread. One wake serves all that is put before the loop gets to it."""
        # A loop that has been closed has no links left.
        if not self._is_waking and not self._loop.is_closed():
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake)

    async def take(self) -> list[SessionAnswer[Any]] | None:
        """Takes all answers there are, at least one unless it was nudged; None at the end of the link."""
        while not (self._answers or self._has_ended or self._is_nudged):
            self._wanted = self._loop.create_future()
            await self._wanted
        self._is_nudged = False
        with self._lock:
            answers, self._answers = self._answers, []
            self._counts.clear()
        return answers or (None if self._has_ended else answers)

    def _wake(self) -> None:
        # Before the looking, so that whatever is put from now on wakes again.
        self._is_waking = False
        if len(self._answers) > MAX_UNSENT and not self.overflow.done():
            message = f"the client has left {MAX_UNSENT} answers of this link unread"
            self.overflow.set_result(Overloaded(message, limit=MAX_UNSENT))
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)
