"""The report of a grid as Markdown: speeds, what the formulas say of them, and what the target and the host did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median

from bench.pair.campaign import Run
from bench.pair.devices import Load, Pair
from bench.pair.settings import FORMULAS, Kind, PairPlan, Setting
from outrider.cli.bench.common import Spread, markdown, spread

SYMBOLS = """\
All devices are SIMULATED, and so is every figure; services, gateway, wire and their CPU are real. Tokens/s are of the
time in which all streams decode: medians over turns, with quartiles. Of each kind the fastest setting is shown, with
its guesses a round (K) and branches (B). A ratio is the median of those of the same turn. The formula knows devices and
the network's way, and no host; share is what was reached of it. Idle is the time of a round in which the target's model
does not compute: with a hosted draft that draft's steps too. Hits: of all rounds, those with guesses for which nobody
waited. CPUs are what all processes but the proxies kept busy, and
in brackets the busiest of them; where that is near 1, it is the host that was measured. Every answer is plain's."""


@dataclass(frozen=True)
class Cell:
    """All runs of one load."""

    pair: str
    delay_ms: float
    streams: int
    runs: Sequence[Run]
    tokens: int

    @property
    def head(self) -> list[str]:
        """Cells in front of a row."""
        return [self.pair, f"{self.delay_ms:g} ms", str(self.streams)]

    def of(self, setting: Setting) -> list[Run]:
        """Runs of a setting, one a turn."""
        return [run for run in self.runs if run.setting == setting]

    @cached_property
    def best(self) -> dict[Kind, Setting]:
        """The fastest setting of each kind."""
        speeds: dict[Setting, float] = {
            setting: median(run.tokens_per_s for run in self.of(setting))
            for setting in dict.fromkeys(run.setting for run in self.runs)
        }
        kinds = dict.fromkeys(setting.kind for setting in speeds)
        return {kind: max((each for each in speeds if each.kind is kind), key=speeds.__getitem__) for kind in kinds}

    def ratio(self, one: Kind, *others: Kind) -> Spread | None:
        """Tokens/s of the fastest setting of a kind over the fastest of other kinds, by turns; None without one."""
        found = [self.best[each] for each in others if each in self.best]
        if one not in self.best or not found:
            return None
        base = max(found, key=lambda each: median(run.tokens_per_s for run in self.of(each)))
        pairs = zip(self.of(self.best[one]), self.of(base), strict=True)
        return spread(mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in pairs)

    def predicted(self, setting: Setting) -> float:
        """Tokens a second by the formula, with texts as long as those of the middle of an answer."""
        load = Load(Pair.named(self.pair), self.streams, 30 + self.tokens // 2, self.delay_ms * 1e-3)
        return FORMULAS[setting.kind](load, setting.count, setting.branches)


def cells_of(plan: PairPlan, runs: Sequence[Run]) -> list[Cell]:
    """Loads of a grid, in its order."""
    found = []
    for pair in plan.pairs:
        for delay_ms in plan.delays_ms:
            for streams in plan.streams:
                own = [run for run in runs if (run.pair, run.delay_ms, run.block.streams) == (pair, delay_ms, streams)]
                found.append(Cell(pair, delay_ms, streams, own, plan.tokens))
    return found


def render(plan: PairPlan, runs: Sequence[Run]) -> str:
    """Tables of a grid, and what their figures mean."""
    cells = cells_of(plan, runs)
    kinds = [kind for kind in Kind if kind in cells[0].best]
    before = [kind for kind in kinds if kind is not Kind.RUN_AHEAD]
    head = ["pair", "one way", "streams"]
    ahead = (
        ("over the best other", lambda cell: cell.ratio(Kind.RUN_AHEAD, *before)),
        ("over remote", lambda cell: cell.ratio(Kind.RUN_AHEAD, Kind.REMOTE)),
    )
    ratios: tuple[tuple[str, Callable[[Cell], Spread | None]], ...] = ahead if Kind.RUN_AHEAD in kinds else ()
    speeds = markdown(
        [*head, *(f"{kind}, tokens/s" for kind in kinds), *(name for name, _ in ratios)],
        [
            [
                *cell.head,
                *(f"{fastest(cell, kind)}: {speed(cell, cell.best[kind]).show('.0f')}" for kind in kinds),
                *("-" if (ratio := of(cell)) is None else ratio.show(".2f") for _, of in ratios),
            ]
            for cell in cells
        ],
    )
    formulas = markdown(
        [*head, *(f"{kind}, by formula and share" for kind in kinds)],
        [[*cell.head, *(share(cell, cell.best[kind]) for kind in kinds)] for cell in cells],
    )
    costs = markdown(
        [*head, *(f"{kind}, idle and tokens a round" for kind in kinds), "CPUs", "stretch"],
        [
            [
                *cell.head,
                *(idle(cell, cell.best[kind]) for kind in kinds),
                host(cell),
                f"{plan.stretch(cell.streams):g}",
            ]
            for cell in cells
        ],
    )
    return "\n\n".join((speeds, formulas, costs, SYMBOLS))


def fastest(cell: Cell, kind: Kind) -> str:
    """What the fastest setting of a kind asks for."""
    return cell.best[kind].name.removeprefix(kind).removeprefix(", ") or "no guesses"


def speed(cell: Cell, setting: Setting) -> Spread:
    """Tokens a second over turns."""
    return spread(run.tokens_per_s for run in cell.of(setting))


def share(cell: Cell, setting: Setting) -> str:
    """The formula's tokens a second, and the share of it that was reached."""
    predicted = cell.predicted(setting)
    return f"{predicted:.0f}, {speed(cell, setting).median / predicted:.2f}"


def idle(cell: Cell, setting: Setting) -> str:
    """Milliseconds in which the target waits, what a round brings, and how often guesses were there before it."""
    runs = cell.of(setting)
    tokens = mean(burst.tokens for run in runs for _, burst in run.steps)
    hits = f", hits {median(run.hit_rate for run in runs):.2f}" if setting.branches else ""
    return f"{median(run.idle_ms for run in runs):.2f} ms, {tokens:.2f}{hits}"


def host(cell: Cell) -> str:
    """CPUs of all processes and of the busiest, the most that any run had."""
    busy = max(cell.runs, key=lambda run: sum(run.cpus.values())).cpus
    name = max(busy, key=busy.__getitem__)
    return f"{sum(busy.values()):.2f} ({name} {busy[name]:.2f})"
