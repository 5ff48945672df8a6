"""Who gets room first, where no place has any: the line of sessions that wait with the gateway."""

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.basics import eventually

from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import PlacedFor, Placement
from gateway.sessions.room import PlacesFound, RoomLine


@dataclass
class Places:
    """Places by name, each with so much room, and the sessions that wait for it or have got it."""

    room: dict[str, int]
    went: list[tuple[str, str]] = field(default_factory=list)
    """Sessions and their places, in the order in which they went there."""

    def __post_init__(self) -> None:
        self.line = RoomLine(lambda: len(self.room))
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def found(self, size: int, names: Set[str], held: Set[str]) -> PlacesFound:
        """What a session of that size finds among these places."""
        peers = {name: cast("ServicePeer", name) for name in self.room if name in names}
        free = sorted((name for name in peers if name not in held), key=lambda name: -self.room[name])
        placement = Placement(free[0], PlacedFor.LOAD, is_full=self.room[free[0]] < size) if free else None
        return PlacesFound(peers, placement)

    async def come(self, session: str, size: int = 1, names: str = "ab", priority: int = 0) -> None:
        """A session comes, and takes its room when it gets it."""

        async def go() -> None:
            seeker = await self.line.turn(priority, lambda held: self.found(size, {*names}, held))
            assert seeker.found is not None
            place = cast("str | None", seeker.found.peer)
            if place is not None:
                self.room[place] -= size
            self.went.append((session, place or ""))

        self.tasks[session] = asyncio.create_task(go())
        await asyncio.sleep(0)

    async def gone(self, *sessions: str) -> None:
        """Waits until these have got their places."""
        await asyncio.gather(*(self.tasks[each] for each in sessions))

    async def leave(self) -> None:
        """All that still wait leave."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert len(self.line) == 0


async def test_who_finds_room_goes_at_once() -> None:
    """Nothing is waited for, not even a turn of the loop."""
    here = Places({"a": 1, "b": 0})
    seeker = here.line.turn(0, lambda held: here.found(1, {"a", "b"}, held))
    with pytest.raises(StopIteration) as end:
        seeker.send(None)
    assert end.value.value.found.peer == "a"
    assert (end.value.value.is_late, len(here.line)) == (False, 0)


async def test_room_goes_to_who_came_first_of_the_smallest_priority() -> None:
    """One after the other, each to the place that is free first."""
    here = Places({"a": 0, "b": 0})
    for session, priority in (("third", 5), ("first", 0), ("second", 0), ("fourth", 5)):
        await here.come(session, priority=priority)
    assert len(here.line) == 4
    for session, place in (("first", "b"), ("second", "a"), ("third", "a"), ("fourth", "b")):
        here.room[place] = 1
        await here.gone(session)
    assert here.went == [("first", "b"), ("second", "a"), ("third", "a"), ("fourth", "b")]


async def test_no_session_overtakes_one_that_needs_more() -> None:
    """Else large ones would wait as long as small ones come."""
    here = Places({"a": 2, "b": 1})
    await here.come("large", size=5)
    await here.come("small")
    assert here.went == []
    here.room["b"] = 5
    await here.gone("large", "small")
    assert [session for session, _ in here.went] == ["large", "small"]


async def test_who_can_only_go_to_a_full_place_keeps_none_from_another() -> None:
    """A place with room has no reason to idle."""
    here = Places({"a": 0, "b": 1})
    await here.come("bound", names="a")
    await here.come("free")
    await here.gone("free")
    assert here.went == [("free", "b")]
    await here.leave()


async def test_who_leaves_keeps_none_waiting() -> None:
    """Its client has gone: the line goes on without it."""
    here = Places({"a": 2, "b": 0})
    await here.come("large", size=5)
    await here.come("small", size=2)
    here.tasks["large"].cancel()
    await here.gone("small")
    assert here.went == [("small", "a")]


async def test_where_no_place_is_left_the_line_ends() -> None:
    """What is wrong is said elsewhere, or a place that comes back is waited for there."""
    here = Places({"a": 0, "b": 0})
    for session in ("one", "two", "three"):
        await here.come(session)
    here.room.clear()
    await here.gone("one", "two", "three")
    assert here.went == [("one", ""), ("two", ""), ("three", "")]


async def test_the_first_one_goes_to_a_full_place_after_a_while() -> None:
    """Figures may be wrong for ever; the next one has a while of its own."""
    here = Places({"a": 0, "b": 0})
    here.line.patience_s = 0.0
    await here.come("first")
    await here.come("second")
    await here.gone("first", "second")
    assert [session for session, _ in here.went] == ["first", "second"]
    assert min(here.room.values()) < 0


events = st.lists(
    st.tuples(st.sampled_from(["come", "come", "leave", "free"]), st.sampled_from(["ab", "abc", "b", "c"])),
    max_size=30,
)


@given(events)
def test_none_waits_while_a_place_with_room_idles(happenings: list[tuple[str, str]]) -> None:
    """However sessions come, leave and end, and wherever each may go: when all is quiet no one who waits fits."""

    async def world() -> None:
        here, names = Places({"a": 1, "b": 0, "c": 0}), dict[str, str]()
        here.line.patience_s = 1e9
        for number, (kind, open_to) in enumerate(happenings):
            if kind == "come":
                names[str(number)] = open_to
                await here.come(str(number), names=open_to)
            elif kind == "leave" and here.tasks:
                [*here.tasks.values()][number % len(here.tasks)].cancel()
            elif kind == "free":
                here.room[open_to[0]] += 1
            assert min(here.room.values()) >= 0

        def is_quiet() -> bool:
            waiting = [names[each] for each, task in here.tasks.items() if not task.done()]
            return not any(here.room[name] for each in waiting for name in each)

        await eventually(is_quiet)
        went = {session for session, _ in here.went}
        for each in names:
            # Of two who may go to the same places, the one who came first is never the one who waits.
            assert here.tasks[each].done() or not any(
                names[one] == names[each] and int(one) > int(each) for one in went
            )
        await here.leave()

    asyncio.run(world())
