"""How many guesses a step of an engine asks for: also where the machine's speed moves, not worse than none."""

import random
from collections.abc import Callable

import pytest

from outrider.drafting.pace import Pace

MOST, STEPS, SEEDS = 4, 300, 12
# How long a step takes at a place of the run, as often as it was at its begin.
MACHINES: dict[str, Callable[[int], float]] = {
    "even": lambda _: 1.0,
    "slow at first": lambda step: 2.0 if step < 20 else 1.0,
    "fast at first": lambda step: 1.0 if step < 20 else 2.0,
    "shared": lambda step: 1.0 if step // 40 % 2 else 2.0,
}


def expected(kept: float, count: int) -> float:
    """Tokens a step of a row with so many guesses, each of which is kept with one chance."""
    return sum(kept**place for place in range(count + 1))


def speed(seed: int, slowness: Callable[[int], float], num_rows: int, slope: float, kept: float) -> float:
    """Tokens a second over those without guesses; a guess makes a step of all rows longer by a slope."""
    dice, pace, tokens, times = random.Random(seed), Pace(MOST), 0.0, 0.0
    for step in range(STEPS):
        count = pace.choose(num_rows)
        # Now and then something else holds a step up.
        bare_s = slowness(step) * dice.lognormvariate(0, 0.1) * (5 if dice.random() < 0.02 else 1)
        rows = []
        for _ in range(num_rows):
            num_kept = next((place for place in range(count) if dice.random() >= kept), count)
            rows.append((count, num_kept))
            tokens += (1 + num_kept) / num_rows
        pace.verified(rows)
        pace.step(num_rows, count, bare_s * (1 + slope * count))
        times += 1 + slope * count
    return tokens / times


def mean_speed(machine: str, num_rows: int, slope: float, kept: float) -> float:
    """Of a few runs."""
    return sum(speed(seed, MACHINES[machine], num_rows, slope, kept) for seed in range(SEEDS)) / SEEDS


@pytest.mark.parametrize("machine", MACHINES)
def test_a_step_that_guesses_make_dear_is_not_slower_than_without_them(machine: str) -> None:
    """Eight rows on few cores, a fifth of the guesses kept: one guess is worth next to nothing, and more cost."""
    assert mean_speed(machine, num_rows=8, slope=0.15, kept=0.2) > 1


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("num_rows", "slope", "kept"), [(1, 0.02, 0.7), (1, 0.05, 0.2), (8, 0.15, 0.6)])
def test_where_guesses_pay_most_of_the_best_speed_is_reached(
    machine: str, num_rows: int, slope: float, kept: float
) -> None:
    """One number for the whole run, and known from its begin, is the best."""
    best = max(expected(kept, count) / (1 + slope * count) for count in range(MOST + 1))
    assert mean_speed(machine, num_rows, slope, kept) > 0.9 * best


def test_the_pace_asks_for_as_many_as_pay() -> None:
    """Many where steps cost the same and guesses are right; none where guesses are wrong, or rows are dear."""

    def settled(chance: float, row_cost: float) -> int:
        pace, dice = Pace(4), random.Random(1)
        chosen = []
        for _ in range(400):
            count = pace.choose(8)
            kept = next((place for place in range(count) if dice.random() > chance), count)
            pace.verified([(count, kept)] * bool(count))
            if count:
                pace.answered(8, 8)
            pace.step(8, count, 1.0 + row_cost * count)
            chosen.append(count)
        return max(set(chosen[-100:]), key=chosen[-100:].count)

    assert settled(0.95, 0.05) == 4
    assert settled(0.05, 0.2) == 0
    assert settled(0.7, 1.0) == 0
    assert settled(0.6, 0.2) in {1, 2, 3}


def test_the_pace_gives_up_a_draft_that_does_not_answer_and_takes_it_back() -> None:
    pace = Pace(4)

    def run(steps: int, answers: bool) -> list[int]:
        chosen = []
        for _ in range(steps):
            count = pace.choose(1)
            if count:
                pace.answered(1, int(answers))
                pace.verified([(count, count)] * answers)
            pace.step(1, count, 1.0 + (0.1 * count if answers else 0.5 * bool(count)))
            chosen.append(count)
        return chosen

    assert run(100, True)[-8:].count(4) >= 7
    assert run(200, False)[-8:].count(0) >= 7
    assert run(400, True)[-8:].count(4) >= 7
