"""The policy in worlds that are all known: against plain decoding, the best settings, and itself without a part."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from bench.policy.__main__ import Outcome, by_streams, run_world, speeds, summary
from bench.policy.devices import Law, Planner, Simulation, World, grown
from bench.policy.oracle import FixedChoice, FixedPlanner, best, speed
from bench.policy.parts import PARTS
from bench.policy.texts import TextKind
from bench.policy.worlds import HOSTED, TABLES, h100, of_experts, staircase, table, union, with_experts, world
from gateway.rounds.round import ANY_DRAFT, DrafterId, Makes

pytestmark = pytest.mark.early

QUICK = (6, 8, 12, 13, 16, 20, 24, 33)
"""Seeds of worlds of several devices, places and loads that take a second each."""
QUICK_EXPERTS = (6, 13)
"""The same of worlds whose targets have experts."""


def over_plain(simulated: World, part: str = "") -> float:
    """Tokens of the policy after the first second, over those of plain decoding."""
    plain = [FixedChoice()] * len(simulated.phases)
    from_fixed = speeds(Simulation(simulated, 0, plain_planner), plain, [])
    return speeds(PARTS[part](simulated), plain, []) / from_fixed


def plain_planner() -> Planner:
    """Planner that never asks for guesses."""
    return FixedPlanner(FixedChoice)


WORLDS = [(world, seed) for seed in QUICK] + [(with_experts, seed) for seed in QUICK_EXPERTS]


@pytest.mark.parametrize(("made", "seed"), WORLDS)
def test_no_world_is_much_slower_than_plain_decoding(made: Callable[[int], World], seed: int) -> None:
    """After its first second."""
    assert over_plain(made(seed)) >= 0.95


def test_what_services_have_measured_is_worth_it() -> None:
    """Without it much of the first second is lost to finding out what does not pay, so this bench can fail."""
    tokens = dict.fromkeys(("", "measured"), 0.0)
    for part in tokens:
        simulation = PARTS[part](world(13))
        simulation.load(8)
        tokens[part] = simulation.run(1)
    assert tokens["measured"] < 0.9 * tokens[""]


BUSY = (6.0, 4.0)


@pytest.mark.parametrize("num_sessions", [1, 4])
def test_what_was_measured_on_a_busy_machine_is_forgotten(num_sessions: int) -> None:
    """Twenty seconds after it has become quiet, the choice is as good as one that never saw it busy."""
    costs = table(TABLES["135m bfloat16"])
    quiet = World("busy at first", costs, (Law(HOSTED, lambda rows: 0.05 * costs(rows)),), (TextKind(rates=(0.6,)),))
    tokens = []
    for simulated, seed in product((quiet, replace(quiet, busy=BUSY)), range(3)):
        simulation = Simulation(simulated, seed)
        simulation.load(num_sessions)
        simulation.run(BUSY[0] + 20)
        tokens.append(simulation.run(10))
    assert min(tokens[3:]) >= 0.95 * min(tokens[:3])


CPU = table(TABLES["135m bfloat16"])


@pytest.mark.parametrize(("drafter", "after_us"), [(HOSTED, 2e3), (HOSTED, 6e3), (ANY_DRAFT, 2e3), (ANY_DRAFT, 6e3)])
def test_guesses_that_slow_all_down_in_a_way_that_no_forward_shows_end(drafter: DrafterId, after_us: float) -> None:
    """Each takes time of the target that it does not report; all together say hardly fewer tokens than without any."""
    simulated = slowed(drafter, after_us)
    assert lasting_speed(simulated) > 0.95 * speed(simulated, FixedChoice(), 4, 5.0)


def test_only_the_account_sees_what_a_draft_services_guesses_cost_so() -> None:
    """Waiting for the forwards of others is no cost of theirs; for a hosted drafter the time of its rounds shows it."""
    simulated = slowed(ANY_DRAFT, 20e3)
    assert lasting_speed(simulated, "account") < 0.85 * speed(simulated, FixedChoice(), 4, 5.0)


def slowed(drafter: DrafterId, after_us: float) -> World:
    """A world in which each guess of a drafter takes so much time after the forward."""
    law = Law(drafter, lambda rows: 500)
    return World("late", table(TABLES["200m bfloat16"]), (law,), (TextKind(rates=(0.85,)),), after_us=after_us)


def lasting_speed(simulated: World, part: str = "") -> float:
    """Tokens a second of four sessions after the first one, with all parts of the choice or without one.

    The mean of four seeds: how early a loss is noticed is chance.
    """
    found = []
    for seed in range(4):
        simulation = PARTS[part](simulated, seed)
        simulation.load(4)
        simulation.run(1.0)
        found.append(simulation.run(15.0))
    return statistics.mean(found)


HARMED = {
    "price": (World("copies", CPU, (), (TextKind(copies=0.03, copied=0.85, found=0.4, right=0.25),)), 16, 1.0, 4.0, 3),
    "pool": (
        World(
            "short answers",
            lambda rows: 5_000 + 200 * rows,
            (Law(HOSTED, lambda rows: 900),),
            (TextKind(rates=(0.95,)),),
            lengths=(12, 40),
            looks=False,
        ),
        4,
        2.0,
        4.0,
        3,
    ),
    "sessions": (
        World(
            "two kinds",
            lambda rows: 5_000 + 700 * rows,
            (Law(HOSTED, lambda rows: 400),),
            (TextKind(rates=(0.92,)), TextKind(rates=(0.15,))),
            looks=False,
        ),
        4,
        2.0,
        4.0,
        3,
    ),
    "doubt": (world(104), 4, 1.0, 4.0, 2),
    "plain": (world(64), 4, 0.1, 5.3, 6),
}
"""Worlds that a missing part harms, with sessions, seconds before and of the measurement, and seeds."""


@pytest.mark.parametrize("part", HARMED)
def test_each_part_is_worth_something(part: str) -> None:
    """Without it a world that needs it is slower, so this bench can fail."""
    harmed, num_sessions, before_s, seconds, seeds = HARMED[part]
    tokens = dict.fromkeys(("", part), 0.0)
    for choice, seed in product(tokens, range(seeds)):
        simulation = PARTS[choice](harmed, seed)
        simulation.load(num_sessions)
        simulation.run(before_s)
        tokens[choice] += simulation.run(seconds)
    assert tokens[part] < 0.99 * tokens[""]


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_regret_is_small() -> None:
    """Over two dozen worlds at most three hundredths in the mean; in some a second decides, so few say nothing."""
    outcomes = [run_world(seed, [Simulation])[0] for seed in range(24)]
    assert statistics.mean(each.regret for each in outcomes) <= 0.03


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_regret_is_small_where_rows_read_experts() -> None:
    """With the same bound: at few rows each guess costs almost a token, and at many, which have read all, nothing."""
    outcomes = [run_world(seed, [Simulation], with_experts)[0] for seed in (1, 4, 6, 10, 13, 17, 18)]
    assert statistics.mean(each.regret for each in outcomes) <= 0.03


def test_rows_read_the_union_of_their_experts() -> None:
    """By hand: of 8 with 2 a row, two rows read 3.5 and many all; of the cost of a row experts are a half here."""
    assert [union(8, 2, rows) for rows in (1, 2, 1000)] == pytest.approx([2.0, 3.5, 8.0])
    law = of_experts(1000.0, 8, 2, share=0.5, row_share=0.0)
    assert [law(rows) for rows in (1, 2, 1000)] == pytest.approx([1000.0, 1375.0, 2500.0])


def test_a_table_goes_through_its_points() -> None:
    """In lines between and beyond them; a staircase costs what its stairs do."""
    law = table(TABLES["135m bfloat16"])
    assert [law(rows) for rows in (1, 4, 6, 64, 128)] == [13_000, 17_000, 22_500, 195_000, 385_000]
    assert [staircase(100, 10, 4)(rows) for rows in (1, 4, 5)] == [110, 110, 120]


def test_the_oracle_knows_when_guesses_pay() -> None:
    """Those of a sure drafter on a flat device, and none where each row costs what a token does."""
    sure = (TextKind(rates=(0.9,)),)
    flat = World("flat", lambda rows: 5_000, (Law(HOSTED, lambda rows: 100),), sure)
    steep = World("steep", lambda rows: 5_000 * rows, (Law(HOSTED, lambda rows: 100),), sure)
    assert best(flat, 4, 1.0) == FixedChoice(HOSTED, 8)
    assert best(steep, 4, 1.0) == FixedChoice()


def test_plain_decoding_makes_a_token_a_session_and_forward() -> None:
    """By hand: four sessions at 10 ms a forward."""
    steady = World("steady", lambda rows: 10_000, (), noise=0.0)
    assert speed(steady, FixedChoice(), 4, 2.0) == pytest.approx(400, rel=0.01)


def test_a_copied_passage_is_found_by_a_lookup() -> None:
    """And makes several tokens of a forward."""
    copies = World("copies", lambda rows: 10_000, (), (TextKind(copies=0.2, copied=0.95),), noise=0.0)
    assert speed(copies, FixedChoice(floor=0.1), 1, 4.0) > 1.5 * speed(copies, FixedChoice(), 1, 4.0)


def test_processors_that_are_shared_slow_each_other_down() -> None:
    """A gateway at work beside the target makes both slower."""
    apart = World("apart", lambda rows: 10_000, (), noise=0.0, round_us=2_000)
    shared = replace(apart, sharing=1.0)
    assert speed(shared, FixedChoice(), 4, 2.0) < 0.95 * speed(apart, FixedChoice(), 4, 2.0)


def test_a_summary_has_the_worst() -> None:
    """Mean regret, worlds below plain, the share of time that was explored, and gaps."""
    outcomes = [
        Outcome("one", 90.0, 100.0, 100.0, 0.02, "1: plain"),
        Outcome("two", 200.0, 100.0, 200.0, 0.0, "1: draft 4", 2.0),
    ]
    assert summary(outcomes) == ["5.00%", "5.00%", "1 of 2", "0.900", "1.45", "1.00%", "1.50", "2.00"]


def test_gaps_are_those_between_messages() -> None:
    """Plain decoding at 10 ms a forward has one token each 10 ms, and none between."""
    steady = World("steady", lambda rows: 10_000, (), noise=0.0)
    simulation = Simulation(steady, 0, plain_planner)
    simulation.load(1)
    simulation.run(2.0)
    assert statistics.median(simulation.gaps_us) == pytest.approx(10_000, rel=0.01)


def test_a_tree_has_the_most_valuable_rows() -> None:
    """Of two choices a depth: the path of first choices, and second ones where they are worth more than deeper ones."""
    tree = grown((0.5, 0.4), (0.5, 0.4), 4, 2)
    assert [round(value, 2) for value in tree.values] == [0.5, 0.4, 0.25, 0.2]
    assert (tree.token_ids, max(tree.depths)) == ((1, 2, 1, 2), 2)
    assert len(grown((0.5, 0.4), (0.5, 0.4), 32, 2)) == 6


def test_trees_keep_what_they_promise() -> None:
    """On a flat device they are the best choice, and their values what the target keeps."""
    drafter = HOSTED._replace(makes=Makes.TREE)
    kind = TextKind(rates=(0.6,), spread=0.3)
    flat = World("flat", lambda rows: 5_000, (Law(drafter, lambda rows: 100),), (kind,), looks=False)
    assert best(flat, 4, 1.0).depth
    simulation = Simulation(flat)
    simulation.keeps_rounds = True
    simulation.load(8)
    simulation.run(1.0)
    trees = [(session, each) for _, session, each in simulation.rounds if each.proposal.tree.values]
    promised = sum(session.jitter * sum(each.proposal.tree.values) for session, each in trees)
    assert sum(each.accepted_count for _, each in trees) == pytest.approx(promised, rel=0.08)


def test_an_h100_decodes_as_fast_as_its_preset_says() -> None:
    """One session: some 6.4 ms a step, and what a message takes of the gateway is hidden by none."""
    assert speed(h100(1), FixedChoice(), 1, 2.0) == pytest.approx(1e6 / h100(1).target_us(1), rel=0.1)


def test_streams_have_a_line_for_each_choice() -> None:
    """With the best fixed setting of their load."""
    fast, slow = (Outcome("64", tokens, 100.0, 130.0, 0.0, "64: draft 4", 1.25) for tokens in (120.0, 90.0))
    assert by_streams({"whole": [fast], "old": [slow]}).splitlines()[2:] == [
        "| 64 | whole | 100 | 1.20 | 1.30 | draft 4 | 1.25 |",
        "| 64 | old | 100 | 0.90 | 1.30 | draft 4 | 1.25 |",
    ]
