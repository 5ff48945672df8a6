"""What is measured: ways to serve a pair, and the grid of loads under which each of them is asked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from bench.pair.devices import COMPUTING, Formula, hosted, plain, remote, run_ahead
from outrider.cli.bench.common import AUTO
from outrider.cli.local_stack import Flags
from outrider.client import Speculation


class SettingKind(StrEnum):
    """A way to serve a pair."""

    PLAIN = "plain"
    REMOTE = "remote"  # draft, wire and target follow one another
    HOSTED = "hosted"  # the draft is in the target's process, on its device
    RUN_AHEAD = "run-ahead"  # branches are pushed while the target verifies


FORMULAS: Mapping[SettingKind, Formula] = {
    SettingKind.PLAIN: plain,
    SettingKind.REMOTE: remote,
    SettingKind.HOSTED: hosted,
    SettingKind.RUN_AHEAD: run_ahead,
}
DRAFTERS = {SettingKind.REMOTE: "model", SettingKind.HOSTED: "hosted", SettingKind.RUN_AHEAD: "model"}


@dataclass(frozen=True, slots=True)
class GuessSetting:
    """One way to serve a pair: what a request asks for, and with which options its gateway runs."""

    kind: SettingKind
    count: int | None = 0
    """Guesses a round; 0 is plain, and None leaves it to the gateway."""
    branches: int = 0

    @property
    def shown(self) -> str:
        """Numbers of guesses and branches in a few words."""
        shown = AUTO if self.count is None else f"K = {self.count}" if self.count else "no guesses"
        return f"{shown}, B = {self.branches}" if self.branches else shown

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.shown}"

    @property
    def speculation(self) -> Speculation:
        if self.kind is SettingKind.PLAIN:
            return Speculation(enabled=False)
        return Speculation(draft_count=self.count, drafter=DRAFTERS[self.kind])

    @property
    def gateway_flags(self) -> Flags:
        return {"--branches": self.branches} if self.branches else {}


def settings_of(
    kinds: Iterable[SettingKind], counts: Iterable[int | None], branches: Iterable[int]
) -> list[GuessSetting]:
    """All settings of some kinds; run-ahead with each number of branches."""
    found = []
    for kind in kinds:
        if kind is SettingKind.PLAIN:
            found.append(GuessSetting(kind))
        elif kind is not SettingKind.RUN_AHEAD:
            found += [GuessSetting(kind, count) for count in counts]
        else:
            found += [GuessSetting(kind, count, each) for count in counts for each in branches]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """A grid: every setting under every load, `turns` times."""

    pairs: tuple[str, ...]
    delays_ms: tuple[float, ...]
    """Milliseconds that each way between the gateway and a service takes longer."""
    streams: tuple[int, ...]
    settings: tuple[GuessSetting, ...]
    tokens: int
    requests: int
    turns: int
    temperature: float
    stretch_per_stream: float
    """What all times are multiplied by for each stream, where that makes them longer."""

    def stretch(self, pair: str, streams: int) -> float:
        """Factor of all times of devices and network under a load; figures are divided by it. What computes has 1."""
        return 1.0 if pair in COMPUTING else max(1.0, streams * self.stretch_per_stream)
