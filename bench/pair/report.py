"""The report of a grid as Markdown: speeds, what formulas say of them, and what the target and the host did."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median

from bench.pair.campaign import PairRun, cores
from bench.pair.devices import ACCEPTANCE, COMPUTING, DevicePair, PairLoad, hit_rate
from bench.pair.settings import FORMULAS, GuessSetting, PairPlan, SettingKind
from outrider.cli.bench.common import Spread, markdown, spread

SYMBOLS = """\
Tokens/s are of the time in which all streams decode: medians over turns, with quartiles. Of plain, remote and hosted
the fastest setting is shown, with its guesses a round (K; auto is the gateway's choice), and of run-ahead each, with
its branches (B). A ratio is the median of those of the same turn. The formula knows devices and the network's way, and
no host; share is what was reached of it. Idle is the time of a round in which the target's model does not compute: with
a hosted draft that draft's steps too. Hits: of all rounds for which there were to be branches, those that the target
began with one, and what a simulated draft's chances would give behind guesses (behind a plain step it is more); late:
those without, because no branches had come yet. CPUs are what all processes but the proxies kept busy, and in brackets
the busiest: where that is near 1 of a simulated pair, it is the host that was measured. Stretch: how much slower all
devices and ways were meanwhile. Every answer is plain's."""


@dataclass(frozen=True)
class TableCell:
    """All runs of one load."""

    pair: str
    delay_ms: float
    streams: int
    runs: Sequence[PairRun]
    tokens: int

    @property
    def head(self) -> list[str]:
        """Cells in front of a row."""
        return [self.pair, f"{self.delay_ms:g} ms", str(self.streams)]

    def of(self, setting: GuessSetting) -> list[PairRun]:
        """Runs of a setting, one a turn."""
        return [run for run in self.runs if run.setting == setting]

    @cached_property
    def best(self) -> dict[SettingKind, GuessSetting]:
        """The fastest setting of each kind."""
        speeds: dict[GuessSetting, float] = {
            setting: median(run.tokens_per_s for run in self.of(setting))
            for setting in dict.fromkeys(run.setting for run in self.runs)
        }
        kinds = dict.fromkeys(setting.kind for setting in speeds)
        return {kind: max((each for each in speeds if each.kind is kind), key=speeds.__getitem__) for kind in kinds}

    @property
    def shown(self) -> list[GuessSetting]:
        """The fastest setting of each kind, and all that run ahead."""
        ahead = dict.fromkeys(run.setting for run in self.runs if run.setting.kind is SettingKind.RUN_AHEAD)
        return [*(each for kind, each in self.best.items() if kind is not SettingKind.RUN_AHEAD), *ahead]

    def ratio(self, one: SettingKind, *others: SettingKind) -> Spread | None:
        """Tokens/s of the fastest setting of a kind over the fastest of other kinds, by turns; None without one."""
        found = [self.best[each] for each in others if each in self.best]
        if one not in self.best or not found:
            return None
        base = max(found, key=lambda each: median(run.tokens_per_s for run in self.of(each)))
        pairs = zip(self.of(self.best[one]), self.of(base), strict=True)
        return spread(mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in pairs)

    def predicted(self, setting: GuessSetting) -> float | None:
        """Tokens a second by the formula, with texts as long as those of the middle of an answer; None without one."""
        if self.pair in COMPUTING or setting.count is None:
            return None
        load = PairLoad(DevicePair.named(self.pair), self.streams, 30 + self.tokens // 2, self.delay_ms * 1e-3)
        return FORMULAS[setting.kind](load, setting.count, setting.branches)


def cells_of(plan: PairPlan, runs: Sequence[PairRun]) -> list[TableCell]:
    """Loads of a grid, in its order."""
    found = []
    for pair in plan.pairs:
        for delay_ms in plan.delays_ms:
            for streams in plan.streams:
                own = [run for run in runs if (run.pair, run.delay_ms, run.block.streams) == (pair, delay_ms, streams)]
                found.append(TableCell(pair, delay_ms, streams, own, plan.tokens))
    return found


def render(plan: PairPlan, runs: Sequence[PairRun]) -> str:
    """Tables of a grid, and what their figures mean."""
    cells = cells_of(plan, runs)
    kinds = [kind for kind in SettingKind if kind in cells[0].best]
    others: list[SettingKind] = [kind for kind in kinds if kind is not SettingKind.RUN_AHEAD]
    head = ["pair", "one way", "streams"]
    ratios: dict[str, list[SettingKind]] = {}
    if SettingKind.RUN_AHEAD in kinds:
        ratios = {"over the best other": others, "over remote": [SettingKind.REMOTE]}
    speeds = []
    for cell in cells:
        found = [cell.ratio(SettingKind.RUN_AHEAD, *each) for each in ratios.values()]
        fastest = [f"{speed(cell, cell.best[kind])}, {cell.best[kind].shown}" for kind in kinds]
        speeds.append([*cell.head, *fastest, *("-" if each is None else each.show(".2f") for each in found)])
    parts = ("setting", "formula, tokens/s", "share", "tokens a round", "idle, ms", "hits", "late", "CPUs", "stretch")
    rows = [[*cell.head, *details(cell, setting)] for cell in cells for setting in cell.shown]
    first = markdown([*head, *(f"{kind}, tokens/s" for kind in kinds), *ratios], speeds)
    return "\n\n".join((first, markdown([*head, *parts], rows), f"{devices_of(plan)} {SYMBOLS}"))


def devices_of(plan: PairPlan) -> str:
    """Which pairs are simulated, and where the others compute."""
    computing = [name for name in plan.pairs if name in COMPUTING]
    simulated = [name for name in plan.pairs if name not in COMPUTING]
    found = []
    if simulated:
        names = ", ".join(simulated)
        found.append(f"SIMULATED are the devices of {names}, and so is each figure of them; all processes are real.")
    if computing:
        target, draft = cores()
        found.append(
            f"Nothing of {', '.join(computing)} is simulated: its target computes on core {target} alone and its draft "
            f"on core {draft}, gateways run where there is room, and no formula is of it."
        )
    return " ".join(found)


def speed(cell: TableCell, setting: GuessSetting) -> str:
    """Tokens a second over turns."""
    return spread(run.tokens_per_s for run in cell.of(setting)).show(".0f")


def details(cell: TableCell, setting: GuessSetting) -> Iterator[str]:
    """What the formula says of a setting under a load, and what the target, the draft and the host did."""
    runs, predicted = cell.of(setting), cell.predicted(setting)
    yield setting.name
    yield f"{predicted:.0f}" if predicted else "-"
    yield f"{median(run.tokens_per_s for run in runs) / predicted:.2f}" if predicted else "-"
    yield f"{mean(burst.tokens for run in runs for _, burst in run.steps):.2f}"
    yield f"{median(run.idle_ms for run in runs):.2f}"
    possible = f" of {hit_rate(ACCEPTANCE, setting.count, setting.branches):.2f}" if predicted and setting.count else ""
    hits, late = (median(run.came(what) for run in runs) for what in ("hit", "late"))
    yield f"{hits:.2f}{possible}" if setting.branches else "-"
    yield f"{late:.2f}" if setting.branches else "-"
    busy = max((run.cpus for run in runs), key=lambda cpus: sum(cpus.values()))
    name = max(busy, key=busy.__getitem__)
    yield f"{sum(busy.values()):.2f} ({name} {busy[name]:.2f})"
    yield f"{runs[0].stretch:g}"
