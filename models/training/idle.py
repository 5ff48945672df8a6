"""When the machine has nothing better to do than to train, as far as the system counts what its processes take."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from training.learn import Blocks

STAT = Path("/proc/stat")
LOOK_S = 2.0


@dataclass(slots=True)
class IdleMachine:
    """Waits while processes that are not niced, as ours is, take more of the CPUs than a share."""

    busy_share: float
    stat: Path = STAT
    pause: Callable[[float], object] = time.sleep
    _seen: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self._look()

    def wait(self) -> None:
        """Returns when others took no more than the share since the last look; at once where no system says so."""
        while self.busy_share < 1:
            past_busy, past_total = self._seen
            busy, total = self._seen = self._look()
            if (busy - past_busy) / max(1, total - past_total) <= self.busy_share:
                return
            self.pause(LOOK_S)

    def _look(self) -> tuple[int, int]:
        """Ticks of work that is not niced, and of everything, since the system began."""
        if not self.stat.exists():
            return 0, 0
        times = list(map(int, self.stat.read_text(encoding="utf-8").splitlines()[0].split()[1:9]))
        user, nice, system, idle, waiting, *interrupts = times
        return user + system + sum(interrupts), user + nice + system + idle + waiting + sum(interrupts)


@dataclass(frozen=True, slots=True)
class BlocksWhenIdle:
    """Blocks that are there only when the machine is idle, so that every step of a stage waits for it."""

    blocks: Blocks
    machine: IdleMachine

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, once the machine is idle; see Blocks."""
        self.machine.wait()
        return self.blocks.at(step)
