"""Tests of outrider.model_service.leases: leases, owners, and who goes first."""

from dataclasses import dataclass, field

import pytest
import structlog

from outrider.errors import CacheFull, Overloaded
from outrider.model_service.leases import LeaseTable
from outrider.rpc.fencing import Fence


@dataclass
class Clock:
    """A clock that stands still until it is moved on."""

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
    task: object = None

    def stop_job(self) -> bool:
        """Counts the stops."""
        self.stopped += 1
        return False

    def closed(self) -> None:
        """Has nothing to say at its end."""

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
    return LeaseTable(10.0, clock, idle_s=10.0)


def test_a_lease_ends_when_its_time_has_come(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Not before, and only for leased sessions."""
    for name in ("a", "b", "c"):
        taken(table, beds, name, owner=name)
    table.leave("a")
    clock.now += 4
    table.leave("b")
    table.hear(b"c", "c")
    clock.now += 5.9
    table.sweep()
    assert table.num_expired == 0
    clock.now += 0.1
    table.sweep()
    assert table.num_expired == 1
    assert beds == ["b", "c"]
    assert (len(table), table.num_leased) == (2, 1)


def test_a_session_that_is_idle_is_leased(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """As if its link had ended, unless a job is under way; its next message takes it up again, and not another's."""
    for name in ("idle", "busy", "talking"):
        taken(table, beds, name, owner="link")
    busy = table.get(b"busy")
    assert busy is not None
    busy.task = object()
    clock.now += 8
    table.hear(b"talking", "link")
    assert table.sweep() == pytest.approx(2, abs=1e-3)
    clock.now += 2
    table.sweep()
    assert table.num_leased == 1
    table.hear(b"idle", "another link")
    assert table.num_leased == 1
    table.hear(b"idle", "link")
    assert table.num_leased == 0
    clock.now += 10
    table.sweep()
    assert table.num_leased == 2
    clock.now += 10
    assert table.sweep() is not None
    assert beds == ["busy"]
    table.clear()
    assert table.sweep() is None


def test_a_session_taken_up_again_is_not_swept(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Attaching ends the lease."""
    taken(table, beds, "a", owner="link")
    table.leave("link")
    table.attach(b"a")
    table.hear(b"a", "link")
    clock.now += 9
    table.sweep()
    assert (beds, table.num_leased) == (["a"], 0)


def test_leaving_counts_for_the_owner_alone(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """A link leases and stops all of its sessions, and none that another one has taken over."""
    mine = [taken(table, beds, name, owner="link") for name in ("a", "b")]
    overtaken = taken(table, beds, "c", owner="new link")
    assert [table.owns_any(owner) for owner in ("link", "new link", "old link")] == [True, True, False]
    assert table.leave("old link") == 0
    assert (table.num_leased, [lodger.stopped for lodger in (*mine, overtaken)]) == (0, [0, 0, 0])
    assert table.leave("link") == 2
    assert (table.num_leased, [lodger.stopped for lodger in (*mine, overtaken)]) == (2, [1, 1, 0])
    assert beds == ["a", "b", "c"]


def test_a_close_of_an_older_epoch_has_no_say(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """The session belongs to the link that opened it last."""
    taken(table, beds, "a", owner="link").epoch = 3
    table.close(Fence(b"a", 2, 1), "link")
    table.close(Fence(b"a", 3, 1), "another link")
    assert beds == ["a"]
    table.close(Fence(b"a", 3, 1), "link")
    table.close(Fence(b"a", 3, 1), "link")
    assert beds == []


def test_room_is_made_by_the_longest_leases(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """Leased sessions go one by one, oldest lease first; sessions with a link never do."""
    for name in ("a", "b", "c"):
        taken(table, beds, name, owner=name)
    table.leave("c")
    table.leave("a")

    def bed() -> str:
        if len(beds) > 1:
            raise CacheFull("no bed")
        return "bed"

    assert table.with_room(bed) == "bed"
    assert beds == ["b"]


def test_only_as_many_as_needed_are_evicted(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """The others keep their cache."""
    for name in ("a", "b"):
        taken(table, beds, name, owner="link")
    table.leave("link")

    def bed() -> None:
        if len(beds) > 1:
            raise CacheFull("no bed")

    table.with_room(bed)
    assert beds == ["b"]


def test_a_full_pool_without_leases_is_full(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """The error reaches the one who asked, and none is evicted."""
    taken(table, beds, "a")

    def bed() -> None:
        raise CacheFull("no bed")

    with pytest.raises(CacheFull):
        table.with_room(bed)
    assert beds == ["a"]


def test_clearing_frees_everybody(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """Leased or not."""
    taken(table, beds, "a")
    taken(table, beds, "b", owner="link")
    table.leave("link")
    table.clear()
    assert (beds, len(table), table.num_leased) == ([], 0, 0)


def test_an_id_is_held_once(table: LeaseTable[Lodger], beds: list[str]) -> None:
    """A second session of an id is a bug of the caller."""
    taken(table, beds, "a")
    with pytest.raises(ValueError, match="held already"):
        table.add(b"a", Lodger(beds))


def test_how_leases_end_is_counted(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Early for want of room, late because no gateway came; one that is taken up or closed counts as neither."""
    for name in ("evicted", "expired", "taken up", "closed"):
        taken(table, beds, name, owner=name)
        table.leave(name)
        clock.now += 1
    table.evict_oldest()
    table.attach(b"taken up")
    table.close(Fence(b"closed", 1, 1), "closed")
    clock.now += 8
    table.hear(b"taken up", "taken up")
    table.sweep()
    table.num_preempted += 1
    assert (table.num_evicted, table.num_expired, table.num_preempted) == (1, 1, 1)
    assert beds == ["taken up"]


def test_leases_give_way_when_there_are_too_many_sessions(beds: list[str], clock: Clock) -> None:
    """The longest lease first, whatever room its session takes; without a lease, none, and no further one is held."""
    table = LeaseTable[Lodger](10.0, clock, max_sessions=3)
    for name in ("a", "b", "c"):
        taken(table, beds, name, owner=name)
    table.leave("b")
    table.leave("a")
    taken(table, beds, "d")
    assert beds == ["a", "c", "d"]
    taken(table, beds, "e")
    with pytest.raises(Overloaded, match="3 sessions are held already") as caught:
        table.add(b"f", Lodger(beds, name="f"))
    assert caught.value.metadata == {"limit": "3"}
    assert beds == ["c", "d", "e"]
    assert (len(table), table.get(b"f"), table.num_evicted) == (3, None, 2)


def test_leases_and_their_ends_are_logged(table: LeaseTable[Lodger], beds: list[str], clock: Clock) -> None:
    """Each with enough of the session's id to find it in other logs, and never all of it."""
    name = "0123456789abcdef"
    with structlog.testing.capture_logs() as lines:
        taken(table, beds, name, owner="link")
        table.leave("link")
        table.attach(name.encode())
        table.leave("link")
        clock.now += 10
        table.sweep()
        taken(table, beds, name, owner="link")
        table.leave("link")
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
