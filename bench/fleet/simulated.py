"""A simulated fleet under a trace: how long first tokens take, what caches have, and how even targets work."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import fmean, pstdev

from bench.fleet.clock import LateWay, VirtualClock
from bench.fleet.gateways import Policy, SimulatedGateway, TurnRequest
from bench.fleet.targets import SLOWDOWN, SimulatedTarget, TargetLink
from bench.fleet.texts import TalkTurn
from bench.policy.devices import CostModel
from bench.policy.worlds import TABLES, table
from outrider.cli.bench.load.summary import percentile

DELAY_S = 0.0002
WARM_UP = 0.4
"""Share of the turns that only fill the caches."""


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """What came of a trace, after its warm-up."""

    firsts_s: tuple[float, ...]
    """Times to first tokens, the shortest first."""
    hits: float
    """Share of the prompts' tokens that targets found."""
    busy: tuple[float, ...]
    rows: tuple[int, ...]
    """Tokens that each target has read or made."""
    seconds: float

    @property
    def load(self) -> float:
        """Share of the rows that the targets could compute in steps half as long again as their shortest ones."""
        cost_us = h100_8b()
        most_us = SLOWDOWN * cost_us(1)
        most = next(rows for rows in count(1) if cost_us(rows + 1) > most_us)
        return fmean(self.rows) / self.seconds / (1e6 * most / most_us)

    @property
    def busy_spread(self) -> float:
        return pstdev(self.busy) / fmean(self.busy)

    @property
    def work_spread(self) -> float:
        return pstdev(self.rows) / fmean(self.rows)

    def first_ms(self, share: float) -> float:
        """Percentile of the time to a first token."""
        return 1e3 * percentile(self.firsts_s, share)

    def worst_over(self, other: "FleetFigures") -> float:
        """The most that a percentile of the time to a first token is of the same one of another way."""
        return max(self.first_ms(share / 100) / other.first_ms(share / 100) for share in range(1, 100))


def h100_8b() -> CostModel:
    """Costs of a step of an 8B model on an H100."""
    return table(TABLES["8b on an H100"])


class SimulatedFleet:
    """Targets, gateways that do not talk to each other, and the links between them."""

    def __init__(
        self,
        num_targets: int,
        num_gateways: int,
        policy: Policy,
        num_blocks: int,
        *,
        pushes: bool,
        delay_s: Callable[[], float] = lambda: DELAY_S,
    ) -> None:
        self.clock = VirtualClock()
        self._num_blocks, self._pushes, self._delay_s = num_blocks, pushes, delay_s
        self.targets: list[SimulatedTarget] = []
        self.gateways = [SimulatedGateway(number, self.clock, policy, h100_8b()) for number in range(num_gateways)]
        for _ in range(num_targets):
            self.join()

    def join(self) -> SimulatedTarget:
        """One target more, that all gateways meet at once."""
        address = f"10.0.0.{len(self.targets)}:50052"
        target = SimulatedTarget(address, self.clock, h100_8b(), self._num_blocks, pushes=self._pushes)
        self.targets.append(target)
        for gateway in self.gateways:
            link = TargetLink(gateway, target, LateWay(self.clock, self._delay_s), LateWay(self.clock, self._delay_s))
            target.links.append(link)
            gateway.meet(link)
        target.beat()
        return target

    def lose(self, target: SimulatedTarget) -> None:
        """A target is gone, which its gateways hear one by one."""
        target.lose()
        for link, gateway in zip(target.links, self.gateways, strict=True):
            self.clock.after(self._delay_s(), partial(gateway.lost, link))

    def run(self, turns: Sequence[TalkTurn]) -> FleetFigures:
        """Lets all turns come, each through a gateway that chance chooses, and end."""
        dice = random.Random(len(turns))
        requests = {turn: TurnRequest(turn, turn.at_s, turn.number.to_bytes(8)) for turn in turns}
        followers: dict[TalkTurn, list[Callable[[], None]]] = {}

        def come(gateway: SimulatedGateway, request: TurnRequest) -> None:
            before = requests.get(request.turn.before) if request.turn.before else None
            if before is not None and before.ended_s is None:
                followers.setdefault(before.turn, []).append(partial(come, gateway, request))
                return
            request.came_s = self.clock.now_s
            gateway.take(request)

        def end(request: TurnRequest) -> None:
            for follow in followers.pop(request.turn, ()):
                follow()

        for gateway in self.gateways:
            gateway.on_end = end
        for turn, request in requests.items():
            self.clock.at(turn.at_s, partial(come, dice.choice(self.gateways), request))
        warm = list(requests.values())[int(WARM_UP * len(requests)) :]
        before = self._after(warm[0].turn.at_s)
        after = self._after(turns[-1].at_s)
        while any(each.ended_s is None for each in warm):
            self.clock.step()
        seconds = turns[-1].at_s - warm[0].turn.at_s
        counted = [[new - old for new, old in zip(*each, strict=True)] for each in zip(after, before, strict=True)]
        return FleetFigures(
            tuple(sorted(each.first_s - each.came_s for each in warm if each.first_s is not None)),
            sum(each[1] for each in counted) / sum(each[2] for each in counted),
            tuple(each[0] / seconds for each in counted),
            tuple(int(each[3]) for each in counted),
            seconds,
        )

    def _after(self, when_s: float) -> list[tuple[float, ...]]:
        """What the targets have counted by then."""
        while self.clock.now_s < when_s:
            self.clock.step()
        return [
            (each.busy_s, each.hit_tokens, each.asked_tokens, each.read_tokens + each.made_tokens)
            for each in self.targets
        ]
