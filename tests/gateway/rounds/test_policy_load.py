"""The choice of K for many sessions on devices whose costs are known; simulated, see bench.policy.devices."""

import pytest

from bench.policy.devices import Law, Simulation, World
from bench.policy.oracle import FixedChoice, speed
from bench.policy.texts import TextKind
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT, NOTHING, Round, Verdict


def staircase(rows: int) -> float:
    """A CPU: steps of five rows, and twice the cost for ten."""
    return 11_000 * (0.55 + 0.45 * -(-rows // 5)) if rows > 1 else 11_000


def small_staircase(rows: int) -> float:
    """Cost of its draft by rows."""
    return 40 + 160 * -(-rows // 5)


def flat(rows: int) -> float:
    """An accelerator: weights first, and after 300 rows arithmetic."""
    return max(5_100, 16 * rows + 300)


def small_flat(rows: int) -> float:
    """Cost of its draft by rows."""
    return max(800, 2 * rows + 200)


CPU = World("cpu", staircase, (Law(ANY_DRAFT, small_staircase),), (TextKind(rates=(0.64,)),), 1500)
ACCELERATOR = World("accelerator", flat, (Law(ANY_DRAFT, small_flat),), (TextKind(rates=(0.75,)),), 600)


def chosen_speed(world: World, num_sessions: int) -> float:
    """Tokens a second when everything has been learnt."""
    simulation = Simulation(world)
    simulation.load(num_sessions)
    simulation.run(3)
    return simulation.run(3)


def test_sessions_count_from_the_moment_they_begin() -> None:
    """Not from the target's next verdict: many that come at once would all guess as if each were alone."""
    policy, verdict = SpeculationPolicy(), Verdict(5, (), 1, None, 0, 900, 1, 6, session_count=6)
    policy.costs.begin({rows: 1_000.0 * rows for rows in (1, 2, 4, 8, 16)}, {})
    sessions = [policy.session() for _ in range(4)]
    loads, prices = [], []
    for session in sessions:
        policy.enter(session)
        loads.append(policy.costs.load)
        prices.append(policy.candidates(ANY_DRAFT, 4)[1].cost_us)
    assert loads == [1, 2, 3, 4]
    assert prices == sorted(set(prices))
    # The target has two of other gateways, which stay when ours leave.
    policy.observe(Round(NOTHING, verdict, (1,), (), 1_000), sessions[0], unasked=True)
    assert policy.costs.load == 6
    for session in sessions:
        policy.leave(session)
        loads.append(policy.costs.load)
    assert loads[4:] == [5, 4, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [1, 4, 16, 32])
@pytest.mark.parametrize("world", [CPU, ACCELERATOR], ids=["cpu", "accelerator"])
def test_it_is_never_much_slower_than_any_fixed_count(world: World, num_sessions: int) -> None:
    """Nor than plain decoding, whether guesses pay at this load or not."""
    chosen = chosen_speed(world, num_sessions)
    fixed = {count: fixed_speed(world, count, num_sessions) for count in (0, 2, 4, 6)}
    assert chosen > 0.97 * fixed[0]
    assert chosen > 0.93 * max(fixed.values())


def fixed_speed(world: World, draft_count: int, num_sessions: int) -> float:
    """Tokens a second of a fixed K."""
    setting = FixedChoice(ANY_DRAFT, draft_count) if draft_count else FixedChoice()
    return speed(world, setting, num_sessions, 3)


@pytest.mark.grid
def test_guesses_pay_until_the_device_is_full() -> None:
    """On an accelerator they win at 64 sessions, and at 256 rows have become dear."""
    assert chosen_speed(ACCELERATOR, 64) > 1.15 * fixed_speed(ACCELERATOR, 0, 64)
    assert chosen_speed(ACCELERATOR, 256) > 0.97 * fixed_speed(ACCELERATOR, 0, 256)


def test_probes_are_never_taken_by_all_at_once() -> None:
    """While plain decoding is best, at most a few of 32 sessions look for something better at a time."""
    simulation = Simulation(CPU)
    simulation.load(32)
    simulation.run(3)
    simulation.keeps_rounds = True
    simulation.run(3)
    drafting = [at_s for at_s, _, committed in simulation.rounds if committed.draft_count]
    # In any 50 ms, in which a session has one round.
    most = max((sum(at_us <= each < at_us + 50_000 for each in drafting) for at_us in drafting), default=0)
    assert most <= 4


def test_a_load_that_jumps_is_followed_within_half_a_second() -> None:
    """From one session to 32 and back; what was learnt of a load is not learnt again."""
    simulation = Simulation(CPU)
    for num_sessions, is_drafting in ((1, True), (32, False), (1, True), (32, False)):
        simulation.load(num_sessions)
        simulation.run(0.5)
        simulation.keeps_rounds = True
        simulation.rounds.clear()
        simulation.run(1)
        counts = [committed.draft_count for _, _, committed in simulation.rounds]
        share = sum(count > 0 for count in counts) / len(counts)
        assert share > 0.8 if is_drafting else share < 0.1, (num_sessions, share)
