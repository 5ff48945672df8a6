"""`python -m bench.fleet.trace`: its conversations, its targets, and what its report says of the smallest fleet."""

from dataclasses import replace

import pytest

from bench.fleet.clock import LateWay, VirtualClock
from bench.fleet.gateways import POLICIES
from bench.fleet.simulated import SimulatedFleet
from bench.fleet.targets import BlockCache
from bench.fleet.texts import TraceOptions, cacheable, trace_of
from bench.fleet.trace import SimulationOptions, cells_of, figures_of, report

OPTIONS = TraceOptions(shared=0.5, turns_a_s=40.0, live=40, count=200)
WANTED = SimulationOptions(targets=2, gateways="2", loads="50", shared="75", cache=32_768, turns=120)


def test_a_trace_is_a_function_of_its_options() -> None:
    """Turns go on from those before them, in the order in which they are due; more is shared where that is wanted."""
    turns = trace_of(OPTIONS)
    assert [turn.at_s for turn in turns] == [turn.at_s for turn in trace_of(OPTIONS)]
    assert [turn.at_s for turn in turns] == sorted(turn.at_s for turn in turns)
    later = [turn for turn in turns if turn.before is not None]
    assert len(later) > 100
    assert all(
        turn.before and turn.prompt.names[: len(turn.before.whole.names)] == turn.before.whole.names for turn in later
    )
    alone = trace_of(replace(OPTIONS, shared=0.0))
    assert cacheable(turns, 80) > cacheable(alone, 80) + 0.05


def test_messages_come_in_order_and_never_after_a_cut() -> None:
    """However long each of them takes."""
    clock, heard, delays = VirtualClock(), list[tuple[int, float]](), iter([0.5, 0.1, 0.3])
    way = LateWay(clock, lambda: next(delays))

    def send(number: int) -> None:
        way.send(lambda: heard.append((number, clock.now_s)))

    send(0)
    send(1)
    while clock.step():
        pass
    send(2)
    way.is_cut = True
    while clock.step():
        pass
    assert heard == [(0, 0.5), (1, 0.5)]


def test_a_cache_keeps_what_ended_until_room_is_needed() -> None:
    """The block that was held longest ago goes first, and of a text its last one."""
    cache = BlockCache(4)
    cache.hold([1, 2])
    cache.hold([3])
    cache.release([1, 2])
    cache.release([3])
    assert (cache.num_free, cache.hit_blocks([1, 2, 9])) == (4, 2)
    cache.take(2)
    assert [each in cache for each in (1, 2, 3)] == [True, False, True]


@pytest.mark.parametrize("choice", POLICIES)
def test_every_turn_is_answered_whoever_chooses(choice: str) -> None:
    """And nothing is left at the targets."""
    policy, pushes = POLICIES[choice]
    fleet = SimulatedFleet(2, 2, policy, 512, pushes=pushes)
    figures = fleet.run(trace_of(OPTIONS))
    assert len(figures.firsts_s) == 120
    assert 0 < figures.hits < 1
    assert all(not target.num_waiting for target in fleet.targets)


def test_the_report_says_that_all_is_simulated() -> None:
    """And compares each choice with the oracle and with round robin."""
    cells = [cell for cell in cells_of(WANTED) if cell.choice in {"ours", "round robin", "oracle"}]
    found = [figures_of(cell, WANTED) for cell in cells]
    shown = report(WANTED, cells, found)
    assert "All SIMULATED" in shown
    lines = {line.split(" | ")[3]: line.split(" | ") for line in shown.splitlines() if line.startswith("| 50 %")}
    assert lines["oracle"][6] == "1.000"
    assert lines["round robin"][10] == "1.00"
    assert float(lines["ours"][5]) > float(lines["round robin"][5])
