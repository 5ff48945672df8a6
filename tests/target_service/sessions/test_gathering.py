"""Whether a step waits for sessions that are about to come: by what steps cost, and by when they were back before."""

import pytest
from support.basics import spec_of
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target

from outrider.engine.runner import ModelRunner
from outrider.estimates.row_costs import Line
from outrider.rpc.fencing import Fence
from outrider.token_tree import TokenTree
from target_service.gathering import LATE_S, LATE_SHARE, MAX_AWAY_S, MEMORY, Gathering
from target_service.states import Step
from target_service.verifier import Verifier

FLAT = [(rows, 0.010) for rows in (1, 5, 20, 40)]
PROPORTIONAL = [(rows, 0.001 * rows) for rows in (1, 5, 20, 40)]
BOTH = [(rows, 0.004 + 0.0005 * rows) for rows in (1, 5, 20, 40)]


class Named:
    """A session with a name."""


class World:
    """A clock, and sessions that have been away for 20 ms before."""

    def __init__(self, steps: list[tuple[int, float]]) -> None:
        self.now_s = 100.0
        self.gathering = Gathering(lambda: self.now_s)
        for num_rows, seconds in steps:
            self.gathering.costs.add(num_rows, seconds)

    def away(self, due_s: float) -> Named:
        """A session that will be back in so many seconds."""
        session = Named()
        now_s, self.now_s = self.now_s, self.now_s - 1.02 + due_s
        self.gathering.left(session)
        self.gathering.came(session, self.now_s + 0.02)
        self.now_s = now_s - 0.02 + due_s
        self.gathering.left(session)
        self.now_s = now_s
        return session

    def waits(self, num_here: int, num_rows: int | None = None) -> bool:
        """Whether a step of so many sessions that go on by themselves would wait."""
        return self.gathering.is_worth_waiting([Named() for _ in range(num_here)], num_rows or 5 * num_here)


@pytest.mark.parametrize(
    ("steps", "fixed_s", "row_s"), [(FLAT, 0.01, 0), (PROPORTIONAL, 0, 0.001), (BOTH, 0.004, 0.0005)]
)
def test_costs_are_split_into_a_fixed_part_and_rows(
    steps: list[tuple[int, float]], fixed_s: float, row_s: float
) -> None:
    """By what steps of different sizes took."""
    costs = Line(MEMORY)
    for num_rows, seconds in steps:
        costs.add(num_rows, seconds)
    assert costs.parts == pytest.approx((fixed_s, row_s), abs=1e-9)


def test_nothing_is_fixed_while_all_steps_look_alike() -> None:
    """So no step waits before it is known what that would save; nor does a row ever cost less than nothing."""
    costs = Line(MEMORY)
    assert costs.parts == (0, 0)
    for _ in range(9):
        costs.add(5, 0.01)
    assert costs.parts == pytest.approx((0, 0.002))
    costs.add(50, 0.001)
    assert min(costs.parts) >= 0


@pytest.mark.parametrize(("num_away", "due_s", "waits"), [(1, 0.004, True), (1, 0.006, False), (3, 0.007, True)])
def test_it_waits_where_steps_are_dear_and_rows_are_not(num_away: int, due_s: float, waits: bool) -> None:
    """For one session beside one up to half a step, for three longer."""
    world = World(FLAT)
    sessions = [world.away(due_s) for _ in range(num_away)]
    assert world.waits(1) == waits
    for session in sessions:
        world.gathering.came(session, world.now_s)
    assert not world.waits(1 + num_away)


def test_nobody_waits_where_rows_are_dear() -> None:
    """Sessions side by side cost what they cost one after the other."""
    world = World(PROPORTIONAL)
    sessions = [world.away(0.0001) for _ in range(8)]
    assert not world.waits(1)
    assert sessions


def test_many_are_not_held_up_for_one() -> None:
    """Twenty sessions do not wait a quarter of a step for another."""
    world = World(FLAT)
    last = world.away(0.0025)
    assert not world.waits(20)
    assert world.waits(2)
    assert last


def test_two_groups_become_one_where_that_is_faster_for_good() -> None:
    """Three sessions wait 8 of a step's 10 ms for three others, once; the rounds of all are 28 instead of 20 + 20 ms.

    Not beside a session that goes on unasked, which would wait at every token; and where others are away for longer
    than a step, two groups have no longer rounds than one.
    """
    for away_s, stays, joins in ((0.008, False, True), (0.008, True, False), (0.03, False, False)):
        world = World(FLAT)
        here, others = [Named() for _ in range(3)], [Named() for _ in range(3)]
        for session in (*here, *others):
            world.gathering.left(session)
            world.gathering.came(session, world.now_s + away_s)
        if stays:
            world.gathering.stayed(here[0])
        for session in others:
            world.gathering.left(session)
        world.now_s += away_s - 0.008
        assert world.gathering.is_worth_waiting(here, 15) == joins, away_s


def test_a_session_that_is_late_is_not_waited_for() -> None:
    """Its client may be slow, or gone; nor is one that has not come back before."""
    world = World(FLAT)
    late, unknown = world.away(0.002), Named()
    world.gathering.left(unknown)
    assert world.waits(1)
    world.now_s += 0.002 + LATE_SHARE * 0.02 + LATE_S / 2
    assert world.waits(1)
    world.now_s += LATE_S
    assert not world.waits(1)
    world.now_s += MAX_AWAY_S
    assert not world.waits(1)
    assert not world.gathering._left_s
    assert late


def test_a_step_of_the_target_waits(runner: ModelRunner) -> None:
    """A session whose request is there is verified together with one that comes a little later, and both as alone."""
    now_s = 50.0
    target = Target(runner)
    target.verifier = Verifier(runner, target.table, lambda: now_s)
    gathering = target.verifier._gathering
    tokens: dict[bytes, list[int]] = {}

    def step(session_id: bytes, guesses: tuple[int, ...]) -> None:
        held = target.table.get(session_id)
        assert held is not None
        arrived_ns = int(now_s * 1e9)
        fence = Fence(session_id, 1, len(held.session.token_ids))
        target.sessions.step(fence, Step(TokenTree.chain(guesses), 0, arrived_ns), target.answers)

    for session_id in (b"a" * 16, b"b" * 16):
        target.session_id = session_id
        target.open(spec_of(PROMPT, 40))
    target.run()
    for _ in range(2):
        now_s += 0.02
        for session_id in (b"a" * 16, b"b" * 16):
            step(session_id, (1, 2))
        target.run()
    for num_rows, seconds in FLAT:
        gathering.costs.add(num_rows, seconds)
    now_s += 0.018
    step(b"a" * 16, (1, 2))
    before = dict(runner.forward_counts.batch_sizes)
    target.device.step(target.verifier.advance)
    assert runner.forward_counts.batch_sizes == before
    now_s += 0.002
    step(b"b" * 16, (3, 4))
    answers = target.run()
    assert len(answers) == 2
    assert runner.forward_counts.batch_sizes == before | {2: before[2] + 1}
    for session_id in (b"a" * 16, b"b" * 16):
        held = target.table.get(session_id)
        assert held is not None
        tokens[session_id] = held.session.token_ids
    assert tokens[b"a" * 16] == tokens[b"b" * 16]
    assert max(tokens[b"a" * 16]) < VOCABULARY_SIZE
    target.table.clear()
