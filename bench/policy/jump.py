"""A jump of the load, from one session to many and back, as a plot: how long the choice of guesses takes to follow.

Tokens and guesses are means over some runs, in windows of 50 ms, beside plain decoding and the best fixed settings.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from bench.policy.devices import Law, Simulation, World
from bench.policy.oracle import FixedChoice, FixedPlanner, best
from bench.policy.texts import TextKind
from bench.policy.worlds import HOSTED, TABLES, table
from outrider.cli.bench.chart import COLOURS, document, path, text
from outrider.model_service.settings import available_cpus

LOADS, PHASE_S, WINDOW_S, RUNS = (1, 32, 1), 3.0, 0.05, 6
SHOWN_S = (PHASE_S - 1.0, 3 * PHASE_S - 1.0)
"""Time that is drawn: before, nothing happens but that costs are learnt."""
NEAR, LASTS = 0.9, 6
"""Share of the best speed at which it is reached, and windows for which that must be so in the mean."""
AUTO, PLAIN, BEST = "auto", "plain", "best fixed"
WIDTH, HEIGHT, LEFT, TOP = 640, 170, 70, 66


@dataclass(frozen=True, slots=True)
class Course:
    """What happened in each window: tokens a second, and guesses a round."""

    tokens: list[float]
    guesses: list[float]


def jumping() -> World:
    """A model of 200M on two cores with a drafter in its process: guesses pay for one session, and not for 32."""
    drafters, kinds = (Law(HOSTED, lambda rows: 900.0 + 100.0 * rows),), (TextKind(rates=(0.75,)),)
    phases = tuple((PHASE_S, load) for load in LOADS)
    name = "200M on two cores, with a drafter in its process"
    return World(name, table(TABLES["200m bfloat16"]), drafters, kinds, round_us=300.0, phases=phases)


def course(tops: Sequence[FixedChoice], seed: int) -> Course:
    """One run of a world, with fixed settings for each load, or with the policy where there are none."""
    world, now = jumping(), [FixedChoice()]
    simulation = Simulation(world, seed, (lambda: FixedPlanner(lambda: now[0])) if tops else None)
    simulation.keeps_rounds = True
    for index, (phase_s, load) in enumerate(world.phases):
        now[:] = tops[index : index + 1]
        simulation.load(load)
        simulation.run(phase_s)
    count = round(len(LOADS) * PHASE_S / WINDOW_S)
    tokens, guesses, rounds = [0] * count, [0] * count, [0] * count
    for at_us, _, committed in simulation.rounds:
        window = min(int(at_us / 1e6 / WINDOW_S), count - 1)
        tokens[window] += len(committed.token_ids)
        guesses[window] += committed.draft_count
        rounds[window] += 1
    return Course([each / WINDOW_S for each in tokens], [g / max(r, 1) for g, r in zip(guesses, rounds, strict=True)])


def mean_course(courses: Sequence[Course]) -> Course:
    """Means of each window."""
    tokens = zip(*(each.tokens for each in courses), strict=True)
    guesses = zip(*(each.guesses for each in courses), strict=True)
    return Course([sum(each) / len(courses) for each in tokens], [sum(each) / len(courses) for each in guesses])


def followed_s(auto: Sequence[float], fastest: Sequence[float]) -> float:
    """Seconds until the speed of windows is near that of the fastest, for good measure of several ones."""
    reached = [
        sum(auto[start : start + LASTS]) >= NEAR * sum(fastest[start : start + LASTS]) for start in range(len(auto))
    ]
    return WINDOW_S * reached.index(True) if True in reached else WINDOW_S * len(auto)


def follow() -> tuple[dict[str, Course], list[float]]:
    """Courses of a world by setting, and the seconds that each change of its load took to be followed."""
    world = jumping()
    known = {load: best(world, load, PHASE_S) for load in set(LOADS)}
    tops = [known[load] for load in LOADS]
    settings = {PLAIN: [FixedChoice()] * len(tops), BEST: tops, AUTO: []}
    with ProcessPoolExecutor(available_cpus()) as pool:
        courses = {
            name: mean_course(list(pool.map(partial(course, each), range(RUNS)))) for name, each in settings.items()
        }
    size = round(PHASE_S / WINDOW_S)
    spans = [slice(start, start + size) for start in range(size, len(LOADS) * size, size)]
    return courses, [followed_s(courses[AUTO].tokens[each], courses[BEST].tokens[each]) for each in spans]


def panel(row: int, title: str, courses: dict[str, Course], values: Callable[[Course], list[float]]) -> str:
    """SVG elements of a panel in a row, with a line for each setting."""
    left, top = LEFT, TOP + row * (HEIGHT + 44)
    first, last = (round(each / WINDOW_S) for each in SHOWN_S)
    highest = 1.05 * max(max(values(each)[first:last]) for each in courses.values())

    digits = 0 if highest > 20 else 1

    def place(window: float, value: float) -> tuple[float, float]:
        return left + WIDTH * (window - first) / (last - first), top + HEIGHT * (1 - value / highest)

    drawn = [text(left + WIDTH / 2, top - 8, title), path([(left, top), (left, top + HEIGHT)], "#777", 1)]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(first, part * highest)
        drawn += [path([(x, y), (x + WIDTH, y)], "#ddd", 1), text(x - 6, y + 4, f"{part * highest:.{digits}f}", "end")]
    for second in range(round(SHOWN_S[0]), round(SHOWN_S[1]) + 1):
        x, y = place(second / WINDOW_S, 0)
        drawn += [path([(x, y), (x, y + 4)], "#777", 1), text(x, y + 18, f"{second - PHASE_S:g} s")]
    for jump in (PHASE_S, 2 * PHASE_S):
        x, _ = place(jump / WINDOW_S, 0)
        drawn.append(path([(x, top), (x, top + HEIGHT)], "#777", 1))
    for colour, each in zip(COLOURS[2::-1], courses.values(), strict=True):
        line = [place(first + index + 0.5, value) for index, value in enumerate(values(each)[first:last])]
        drawn.append(path(line, colour, 1.5))
    return "".join(drawn)


def draw() -> tuple[str, str]:
    """The plot as an SVG document, and in words how long the policy took to follow."""
    courses, times = follow()
    took = f"{', '.join(f'{each:.2f} s' for each in times)} until auto is within {1 - NEAR:.0%} of the best"
    width, height = WIDTH + LEFT + 30, TOP + 2 * HEIGHT + 100
    drawn = [
        text(width / 2, 38, f"{jumping().name}: {took}"),
        panel(0, "tokens/s", courses, lambda each: each.tokens),
        panel(1, "guesses a round", courses, lambda each: each.guesses),
    ]
    title = f"SIMULATED: {', '.join(map(str, LOADS))} sessions, windows of {1000 * WINDOW_S:g} ms, mean of {RUNS} runs"
    drawn.append(text(width / 2, 18, title, extra='font-weight="bold"'))
    for index, (name, colour) in enumerate(zip((PLAIN, BEST, AUTO), COLOURS[2::-1], strict=True)):
        extra = f'fill="{colour}" font-weight="bold"'
        drawn.append(text(width / 2 + 110 * (index - 1), height - 10, name, extra=extra))
    return document(width, height, drawn, font_size=12), f"{jumping().name}: {took}"
