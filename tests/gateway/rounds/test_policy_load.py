"""The choice of K for many sessions on devices whose cost formulas are known; simulated, see simulation.devices."""

import pytest
from simulation.devices import CostLaw, Devices


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


CPU, ACCELERATOR = (staircase, small_staircase, 1500, 0.64), (flat, small_flat, 600, 0.75)


def speed(
    laws: tuple[CostLaw, CostLaw, float, float], num_sessions: int, draft_count: int | None
) -> tuple[float, Devices]:
    """Tokens a second when everything has been learnt, and the devices."""
    target_us, draft_us, message_us, alpha = laws
    devices = Devices(target_us, draft_us, message_us, alpha)
    devices.begin(num_sessions, draft_count)
    devices.run(3)
    devices.choices.clear()
    return devices.run(3), devices


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [1, 4, 16, 32])
@pytest.mark.parametrize("laws", [CPU, ACCELERATOR], ids=["cpu", "accelerator"])
def test_it_is_never_much_slower_than_any_fixed_count(
    laws: tuple[CostLaw, CostLaw, float, float], num_sessions: int
) -> None:
    """Nor than plain decoding, whether guesses pay at this load or not."""
    chosen, _ = speed(laws, num_sessions, None)
    fixed = {count: speed(laws, num_sessions, count)[0] for count in (0, 2, 4, 6)}
    assert chosen > 0.97 * fixed[0]
    assert chosen > 0.93 * max(fixed.values())


@pytest.mark.grid
def test_guesses_pay_until_the_device_is_full() -> None:
    """On an accelerator they win at 64 sessions, and at 256 rows have become dear."""
    assert speed(ACCELERATOR, 64, None)[0] > 1.15 * speed(ACCELERATOR, 64, 0)[0]
    assert speed(ACCELERATOR, 256, None)[0] > 0.97 * speed(ACCELERATOR, 256, 0)[0]


def test_probes_are_never_taken_by_all_at_once() -> None:
    """While plain decoding is best, at most a few of 32 sessions look for something better at a time."""
    _, devices = speed(CPU, 32, None)
    assert 0 < max(drafting for _, _, drafting in devices.choices) <= 4


def test_a_load_that_jumps_is_followed_within_a_second() -> None:
    """From one session to 32 and back; what was learnt of a load is not learnt again."""
    target_us, draft_us, message_us, alpha = CPU
    devices = Devices(target_us, draft_us, message_us, alpha)
    for num_sessions, is_drafting in ((1, True), (32, False), (1, True), (32, False)):
        devices.begin(num_sessions)
        devices.run(1)
        devices.choices.clear()
        devices.run(1)
        share = sum(count > 0 for _, count, _ in devices.choices) / len(devices.choices)
        assert share > 0.8 if is_drafting else share < 0.1, (num_sessions, share)
