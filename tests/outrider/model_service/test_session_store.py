"""Tests of outrider.model_service.session_store: leases, owners and who goes first when room is needed."""

from dataclasses import dataclass, field

import pytest
import structlog

from outrider.errors import CacheFull
from outrider.model_service.session_store import LeaseTable
from outrider.rpc.fencing import Fence


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


def taken(table: LeaseTable[Lodger], beds: list[str], name: str, owner: object = None) -> Lodger:
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
def table(clock: Clock) -> LeaseTable[Lodger]:
    return LeaseTable(10.0, clock)


def test_a_lease_ends_when_its_time_has_come(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
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


def test_a_shorter_lease_ends_earlier(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Though it began later; a lease of no time ends at once."""
    for name in ("a", "b", "c"):
        taken(table, beds, name, owner="stream")
    table.leave(b"a", "stream")
    table.leave(b"b", "stream", 3.0)
    table.leave(b"c", "stream", 0.0)
    assert table.sweep() == 1
    clock.now += 3
    assert table.sweep() == 1
    assert beds == ["a"]


def test_a_session_taken_up_again_is_not_swept(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Attaching ends the lease."""
    taken(table, beds, "a")
    table.lease(b"a")
    table.attach(b"a")
    clock.now += 100
    assert table.sweep() == 0
    assert beds == ["a"]


def test_leaving_counts_for_the_owner_alone(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """A stream that was overtaken by another one neither leases nor stops its session."""
    lodger = taken(table, beds, "a", owner="new stream")
    assert not table.leave(b"a", "old stream")
    assert not table.leave(b"unknown", "new stream")
    assert (table.num_leased, lodger.stopped) == (0, 0)
    assert table.leave(b"a", "new stream")
    assert (table.num_leased, lodger.stopped) == (1, 1)


def test_a_close_of_an_older_epoch_has_no_say(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """The session belongs to whoever opened it last."""
    taken(table, beds, "a", owner="stream").epoch = 3
    table.close(Fence(b"a", 2, 1), "stream")
    table.close(Fence(b"a", 3, 1), "another stream")
    assert beds == ["a"]
    table.close(Fence(b"a", 3, 1), "stream")
    table.close(Fence(b"a", 3, 1), "stream")
    assert beds == []


def test_room_is_made_by_the_longest_leases(table: LeaseTable[Lodger], beds: list[str]) -> None:
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


def test_only_as_many_as_needed_are_evicted(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """The others keep their cache."""
    for name in ("a", "b"):
        taken(table, beds, name)
        table.lease(name.encode())

    def bed() -> None:
        if len(beds) > 1:
            raise CacheFull("no bed")

    table.with_room(bed)
    assert beds == ["b"]


def test_a_full_pool_without_leases_is_full(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """The error reaches the one who asked, and nobody is evicted."""
    taken(table, beds, "a")

    def bed() -> None:
        raise CacheFull("no bed")

    with pytest.raises(CacheFull):
        table.with_room(bed)
    assert beds == ["a"]


def test_clearing_frees_everybody(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """Leased or not."""
    taken(table, beds, "a")
    taken(table, beds, "b")
    table.lease(b"b")
    table.clear()
    assert (beds, len(table), table.num_leased) == ([], 0, 0)


def test_an_id_is_held_once(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """A second session of an id is a bug of the caller."""
    taken(table, beds, "a")
    with pytest.raises(ValueError, match="held already"):
        table.add(b"a", Lodger(beds))


def test_how_leases_end_is_counted(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Early for want of room, late because nobody came; one that is taken up or closed counts as neither."""
    for name in ("evicted", "expired", "taken up", "closed"):
        taken(table, beds, name, owner="stream")
        table.leave(name.encode(), "stream")
        clock.now += 1
    table.evict_oldest()
    table.attach(b"taken up")
    table.close(Fence(b"closed", 1, 1), "stream")
    clock.now += 100
    table.sweep()
    table.num_preempted += 1
    assert (table.num_evicted, table.num_expired, table.num_preempted) == (1, 1, 1)
    assert beds == ["taken up"]


def test_leases_give_way_when_there_are_too_many_sessions(beds: list[str], clock: Clock) -> None:
    """The longest lease first, whatever room its session takes; without a lease, nobody."""
    table = LeaseTable[Lodger](10.0, clock, max_sessions=3)
    for name in ("a", "b", "c"):
        taken(table, beds, name)
    table.lease(b"b")
    table.lease(b"a")
    taken(table, beds, "d")
    assert beds == ["a", "c", "d"]
    taken(table, beds, "e")
    taken(table, beds, "f")
    assert beds == ["c", "d", "e", "f"]
    assert table.num_evicted == 2


def test_leases_and_their_ends_are_logged(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Each with enough of the session's id to find it in other logs, and never all of it."""
    name = "0123456789abcdef"
    with structlog.testing.capture_logs() as lines:
        taken(table, beds, name)
        table.lease(name.encode())
        table.attach(name.encode())
        table.lease(name.encode())
        clock.now += 10
        table.sweep()
        taken(table, beds, name)
        table.lease(name.encode())
        table.evict_oldest()
    events = [line["event"] for line in lines]
    assert events == [
        "lease begun",
        "lease taken up",
        "lease begun",
        "lease expired",
        "lease begun",
        "leased session evicted",
    ]
    assert {line["session"] for line in lines} == {name[:4].encode().hex()}
