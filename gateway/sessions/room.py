"""The line of sessions for which no place has room yet.

A session that is bound to a full service waits in that one's queue, whichever has room first. So it stays with the
gateway until one has, after those that came before. A session that only some places are open to keeps no other one from
the rest of them.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import Placement

# Links, breakers and loads change with time and in several places, so who waits for them looks now and then.
LOOK_S = 0.02
PATIENCE_S = 10.0  # of the first in the line: figures may be wrong, and a full service takes a session all the same


@dataclass(frozen=True, slots=True)
class PlacesFound:
    """Places that are open to a session, by address, and the best of those that none before it waits for."""

    peers: Mapping[str, ServicePeer]
    placement: Placement | None

    @property
    def peer(self) -> ServicePeer | None:
        return None if self.placement is None else self.peers[self.placement.address]


@dataclass(slots=True, eq=False)
class RoomSeeker:
    """A session that looks for room."""

    priority: int
    look: Callable[[Set[str]], PlacesFound]
    """Looks for a place other than these."""
    found: PlacesFound | None = None
    """Where it goes; it is about to go there."""
    first_s: float | None = None
    """Since when it is the first in the line."""
    is_late: bool = False
    """Whether there was no room at once."""
    turn: asyncio.Event = field(default_factory=asyncio.Event)


class RoomLine:
    """Sessions that look for room, in the order in which they get it: by priority, then as they came."""

    def __init__(self, num_places: Callable[[], int]) -> None:
        """`num_places` returns how many there are."""
        self.patience_s = PATIENCE_S
        self._num_places = num_places
        self._line: list[RoomSeeker] = []

    def __len__(self) -> int:
        return len(self._line)

    async def turn(self, priority: int, look: Callable[[Set[str]], PlacesFound]) -> RoomSeeker:
        """Waits for a session's turn; the seeker has found a place then, or that there is none at all.

        Who gets a turn has to open its session before it waits for anything, so that the next one sees it there.
        """
        seeker, loop = RoomSeeker(priority, look), asyncio.get_running_loop()
        insort(self._line, seeker, key=lambda each: each.priority)
        try:
            self._call()
            while seeker.found is None:
                seeker.is_late, is_first = True, self._line[0] is seeker
                if is_first and seeker.first_s is None:
                    seeker.first_s = loop.time()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S if is_first else None):
                        await seeker.turn.wait()
                seeker.turn.clear()
                self._call()
        finally:
            self._line.remove(seeker)
            if self._line:
                self._line[0].turn.set()
        return seeker

    def _call(self) -> None:
        """Sends those on for whom there is room, one to a place."""
        held, now_s, num_places = set[str](), asyncio.get_running_loop().time(), self._num_places()
        for seeker in self._line:
            if seeker.found is None:
                found = seeker.look(held)
                is_patient = seeker.first_s is None or now_s - seeker.first_s < self.patience_s
                # Where no place is open at all, the line does not get it one.
                if not found.peers or (found.placement and not (found.placement.is_full and is_patient)):
                    seeker.found = found
                    seeker.turn.set()
                held |= found.peers.keys()
            else:
                held |= seeker.found.peers.keys()
            if len(held) >= num_places:
                return
