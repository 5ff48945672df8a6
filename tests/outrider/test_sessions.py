"""Tests of outrider.sessions: leases, owners and who goes first when room is needed."""

from dataclasses import dataclass, field

import pytest

from outrider.errors import CacheFull
from outrider.fencing import Fence
from outrider.sessions import SessionTable


@dataclass
class Clock:
    """A clock that stands still until it is told to go on."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Lodger:
    """A session that takes one of a few beds."""

    beds: list[str]
    epoch: int = 1
    owner: object = None
    name: str = ""
    stopped: int = field(default=0)

    def stop_job(self) -> bool:
        """Counts."""
        self.stopped += 1
        return False

    def free(self) -> None:
        """Leaves the bed."""
        self.beds.remove(self.name)


def taken(table: SessionTable[Lodger], beds: list[str], name: str, owner: object = None) -> Lodger:
    """Puts a lodger into a bed and into the table."""
    lodger = Lodger(beds, name=name, owner=owner)
    beds.append(name)
    table.add(name.encode(), lodger)
    return lodger


@pytest.fixture
def beds() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SessionTable[Lodger]:
    return SessionTable(10.0, clock)


def test_a_lease_ends_when_its_time_has_come(table: SessionTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Not before, and only for leased sessions."""
    for name in ("a", "b", "c"):
        taken(table, beds, name)
    table.lease(b"a")
    clock.now += 4
    table.lease(b"b")
    clock.now += 5.9
    assert table.sweep() == 0
    clock.now += 0.1
    assert table.sweep() == 1
    assert beds == ["b", "c"]
    assert (len(table), table.num_leased) == (2, 1)


def test_a_session_taken_up_again_is_not_swept(table: SessionTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Attaching ends the lease."""
    taken(table, beds, "a")
    table.lease(b"a")
    table.attach(b"a")
    clock.now += 100
    assert table.sweep() == 0
    assert beds == ["a"]


def test_leaving_counts_for_the_owner_alone(table: SessionTable[Lodger], beds: list[str]) -> None:
    """A stream that was overtaken by another one neither leases nor stops its session."""
    lodger = taken(table, beds, "a", owner="new stream")
    assert not table.leave(b"a", "old stream")
    assert not table.leave(b"unknown", "new stream")
    assert (table.num_leased, lodger.stopped) == (0, 0)
    assert table.leave(b"a", "new stream")
    assert (table.num_leased, lodger.stopped) == (1, 1)


def test_a_close_of_an_older_epoch_has_no_say(table: SessionTable[Lodger], beds: list[str]) -> None:
    """The session belongs to whoever opened it last."""
    taken(table, beds, "a", owner="stream").epoch = 3
    table.close(Fence(b"a", 2, 1), "stream")
    table.close(Fence(b"a", 3, 1), "another stream")
    assert beds == ["a"]
    table.close(Fence(b"a", 3, 1), "stream")
    table.close(Fence(b"a", 3, 1), "stream")
    assert beds == []


def test_room_is_made_by_the_longest_leases(table: SessionTable[Lodger], beds: list[str]) -> None:
    """Leased sessions go one by one, oldest lease first; sessions with a stream never do."""
    for name in ("a", "b", "c"):
        taken(table, beds, name)
    table.lease(b"c")
    table.lease(b"a")

    def bed() -> str:
        if len(beds) > 1:
            raise CacheFull("no bed")
        return "bed"

    assert table.with_room(bed) == "bed"
    assert beds == ["b"]


def test_only_as_many_as_needed_are_evicted(table: SessionTable[Lodger], beds: list[str]) -> None:
    """The others keep their cache."""
    for name in ("a", "b"):
        taken(table, beds, name)
        table.lease(name.encode())

    def bed() -> None:
        if len(beds) > 1:
            raise CacheFull("no bed")

    table.with_room(bed)
    assert beds == ["b"]


def test_a_full_pool_without_leases_is_full(table: SessionTable[Lodger], beds: list[str]) -> None:
    """The error reaches the one who asked, and nobody is evicted."""
    taken(table, beds, "a")

    def bed() -> None:
        raise CacheFull("no bed")

    with pytest.raises(CacheFull):
        table.with_room(bed)
    assert beds == ["a"]


def test_clearing_frees_everybody(table: SessionTable[Lodger], beds: list[str]) -> None:
    """Leased or not."""
    taken(table, beds, "a")
    taken(table, beds, "b")
    table.lease(b"b")
    table.clear()
    assert (beds, len(table), table.num_leased) == ([], 0, 0)


def test_an_id_is_held_once(table: SessionTable[Lodger], beds: list[str]) -> None:
    """A second session of an id is a bug of the caller."""
    taken(table, beds, "a")
    with pytest.raises(ValueError, match="held already"):
        table.add(b"a", Lodger(beds))
