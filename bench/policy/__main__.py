"""`python -m bench.policy`: how far the choice of guesses is from the best one, in simulated worlds that are all known.

Every world is run with the policy, with plain decoding, and with the best of fixed settings for each of its loads,
which is the oracle. All figures are of a simulation, of everything after a world's first second.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.policy.devices import Simulation, World
from bench.policy.former import files_of, former_simulation
from bench.policy.jump import draw
from bench.policy.oracle import FixedChoice, FixedPlanner, best
from bench.policy.parts import PARTS
from bench.policy.worlds import h100, with_experts, world
from gateway.rounds.choice import LOOKING, Case
from outrider.cli.bench.common import markdown, parse_numbers, writable
from outrider.cli.bench.load.summary import percentile
from outrider.errors import InvalidRequest
from outrider.model_service.settings import available_cpus
from outrider.process.options import between, grouped, run_app, service_app

EXPLORING = LOOKING | {Case.PLAIN_LOOK}
FIRST_S = 1.0
WORST_SHOWN = 10

app = service_app()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a world: tokens a second of the policy, of plain decoding and of the best settings."""

    name: str
    chosen: float
    plain: float
    best: float
    explored: float
    """Share of the sessions' time in rounds that were to find something out; 0 where that is not known."""
    settings: str
    gap: float = 1.0
    """The time between two messages of a session that 99 of 100 do not exceed, over that of plain decoding."""

    @property
    def regret(self) -> float:
        """Share of the best speed that was missed; below 0 where changing settings is better than any."""
        return 1 - self.chosen / self.best

    @property
    def over_plain(self) -> float:
        return self.chosen / self.plain


def speeds(simulation: Simulation, settings: Sequence[FixedChoice], now: list[FixedChoice]) -> float:
    """Tokens a second of a world from its first second on, where `now` has a setting at a time."""
    tokens = seconds = 0.0
    for setting, (phase_s, num_sessions) in zip(settings, simulation.world.phases, strict=True):
        now[:] = [setting]
        simulation.load(num_sessions)
        left_s = phase_s
        if not seconds:
            simulation.run(FIRST_S)
            simulation.session_us.clear()
            simulation.gaps_us.clear()
            left_s -= FIRST_S
        tokens += left_s * simulation.run(left_s)
        seconds += left_s
    return tokens / seconds


def fixed_speed(simulated: World, settings: Sequence[FixedChoice]) -> tuple[float, float]:
    """Tokens a second of fixed settings, one for each load, and their p99 gap."""
    now: list[FixedChoice] = []
    simulation = Simulation(simulated, 0, lambda: FixedPlanner(lambda: now[0]))
    return speeds(simulation, settings, now), percentile(simulation.gaps_us, 0.99)


def run_world(
    number: int, makers: Sequence[Callable[[World], Simulation]], made: Callable[[int], World] = world
) -> list[Outcome]:
    """Runs the world that is made of a number with each of these choices."""
    simulated = made(number)
    tops = [best(simulated, num_sessions, phase_s) for phase_s, num_sessions in simulated.phases]
    plain = [FixedChoice()] * len(tops)
    named = "; ".join(f"{num_sessions}: {top}" for (_, num_sessions), top in zip(simulated.phases, tops, strict=True))
    slow, slow_gap_us = fixed_speed(simulated, plain)
    fast = slow if tops == plain else max(slow, fixed_speed(simulated, tops)[0])
    outcomes = []
    for maker in makers:
        simulation = maker(simulated)
        chosen, times = speeds(simulation, plain, []), simulation.session_us
        explored = sum(times[case] for case in EXPLORING) / max(sum(times.values()), 1.0)
        gap = percentile(simulation.gaps_us, 0.99) / slow_gap_us
        outcomes.append(Outcome(simulated.name, chosen, slow, fast, explored, named, gap))
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Figures of all worlds: regret, worlds below plain and the worst one, time explored, mean and worst p99 gap."""
    regrets = [each.regret for each in outcomes]
    explored = statistics.mean(each.explored for each in outcomes)
    return [
        f"{statistics.mean(regrets):.2%}",
        f"{statistics.median(regrets):.2%}",
        f"{sum(each.over_plain < 0.95 for each in outcomes)} of {len(outcomes)}",
        f"{min(each.over_plain for each in outcomes):.3f}",
        f"{statistics.mean(each.over_plain for each in outcomes):.2f}",
        f"{explored:.2%}" if explored else "-",
        f"{statistics.mean(each.gap for each in outcomes):.2f}",
        f"{max(each.gap for each in outcomes):.2f}",
    ]


def run_all(
    numbers: Sequence[int], makers: Mapping[str, Callable[[World], Simulation]], made: Callable[[int], World]
) -> dict[str, Sequence[Outcome]]:
    """Outcomes of worlds that are made of numbers, by choice."""
    with ProcessPoolExecutor(available_cpus()) as pool:
        found = list(pool.map(partial(run_world, makers=tuple(makers.values()), made=made), numbers, chunksize=1))
    return dict(zip(makers, zip(*found, strict=True), strict=True))


def seeded(found: Mapping[str, Sequence[Outcome]]) -> str:
    """A line for each choice, of all worlds together; the worst ones are written to standard error."""
    for name, outcomes in found.items():
        for each in sorted(outcomes, key=lambda each: each.over_plain)[:WORST_SHOWN]:
            note = f"{each.over_plain:.3f} of plain, regret {each.regret:.1%}: {each.name} | {each.settings}"
            sys.stderr.write(f"{name}: {note}\n")
    columns = ["choice", "mean regret", "median", "below 0.95 of plain", "worst over plain", "mean over plain"]
    columns += ["explored", "mean p99 gap over plain", "worst"]
    return markdown(columns, [[name, *summary(outcomes)] for name, outcomes in found.items()])


def by_streams(found: Mapping[str, Sequence[Outcome]]) -> str:
    """A line for each number of streams and choice."""
    columns = ("streams", "choice", "plain, tokens/s", "over plain", "best over plain", "best", "p99 gap over plain")
    rows = []
    for outcomes in zip(*found.values(), strict=True):
        for name, each in zip(found, outcomes, strict=True):
            streams, _, best = each.settings.partition(": ")
            figures = (f"{each.plain:.0f}", f"{each.over_plain:.2f}", f"{each.best / each.plain:.2f}")
            rows.append([streams, name, *figures, best, f"{each.gap:.2f}"])
    return markdown(columns, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """Options: worlds that are made of seeds."""

    worlds: Annotated[int, typer.Option(help="Worlds to run.", callback=between(1, 1_000_000))] = 100
    first: Annotated[int, typer.Option(help="Seed of the first world.", callback=between(0, 1_000_000))] = 0
    experts: Annotated[bool, typer.Option("--experts", help="The same worlds with targets that have experts.")] = False

    def run(self, makers: Mapping[str, Callable[[World], Simulation]]) -> str:
        """The report of all of them."""
        made = with_experts if self.experts else world
        found = run_all(range(self.first, self.first + self.worlds), makers, made)
        kind = " with experts" if self.experts else ""
        return f"SIMULATED: worlds {self.first} to {self.first + self.worlds - 1}{kind}.\n\n{seeded(found)}"


@app.command()
@grouped
def policy(
    *,
    seeds: Seeds,
    without: Annotated[str, typer.Option(help=f"Parts that are left out, by turns: {', '.join(PARTS)[2:]}.")] = "",
    old: Annotated[str, typer.Option(help="A commit whose choice is run beside this one.", metavar="COMMIT")] = "",
    streams: Annotated[
        str, typer.Option(help="Instead of seeds: an 8B model on an H100 with so many sessions.", metavar="N,...")
    ] = "",
    gateway_us: Annotated[
        float, typer.Option(help="Of --streams: the gateway's time a round.", callback=between(0, 10_000))
    ] = 230.0,
    branches: Annotated[
        int, typer.Option(help="Of --streams: most branches of a session.", callback=between(0, 64))
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(help="Instead of seeds: a jump of the load as SVG.", metavar="FILE", callback=writable),
    ] = None,
) -> None:
    """Compares the choice of guesses with the best one and with plain decoding."""
    unknown = next((part for part in without.split(",") if part not in PARTS), None)
    if unknown is not None:
        raise InvalidRequest("--without", unknown, f"of {', '.join(PARTS)[2:]}, with commas between")
    makers = {"whole": PARTS[""]} | {f"without {part}": PARTS[part] for part in without.split(",") if part}
    if old:
        files_of(old)
        makers[old] = partial(former_simulation, old)
    if plot is not None:
        picture, followed = draw()
        plot.write_text(picture, encoding="utf-8")
        print(f"SIMULATED: {followed}.")
        return
    if streams:
        loads = parse_numbers("--streams", streams, int, 1, 1024)
        found = run_all(loads, makers, partial(h100, gateway_us=gateway_us, branches=branches))
        print(f"SIMULATED: an 8B model on an H100, {gateway_us:g} us of the gateway a round.\n\n{by_streams(found)}")
        return
    print(seeds.run(makers))


if __name__ == "__main__":
    run_app(app)
