"""Small things that many tests of services need: waiting, specs, and a device that runs only when it is told to."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from outrider.engine.block_pool import BlockPool
from outrider.parameters import SamplingParameters, SessionSpec

PATIENCE_S = 20.0


async def eventually(condition: Callable[[], bool | Awaitable[bool]], patience_s: float = PATIENCE_S) -> None:
    """Waits until a condition holds, asking it or awaiting its answer; fails when that takes longer than patience_s.

    The only place where a test sleeps: what is waited for happens in another thread or process and has no event.
    """
    async with asyncio.timeout(patience_s):
        while True:
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
            await asyncio.sleep(0.002)


def check_empty(pool: BlockPool) -> None:
    """Fails unless the pool's books balance and no session holds a block."""
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks


def spec_of(
    token_ids: Sequence[int],
    max_len: int = 64,
    *,
    seed: int = 7,
    eos: Sequence[int] = (0,),
    stops: Sequence[int] = (),
    prompt_len: int | None = None,
    **sampling: Any,
) -> SessionSpec:
    """A session's spec; greedy unless sampling parameters are given."""
    return SessionSpec(
        token_ids=tuple(token_ids),
        prompt_len=len(token_ids) if prompt_len is None else prompt_len,
        sampling=SamplingParameters(**(sampling or {"temperature": 0.0})),
        seed=seed,
        max_len=max_len,
        eos_token_ids=frozenset(eos),
        stop_token_ids=frozenset(stops),
    )


class SteppedTask(Protocol):
    """A task as a device sees it."""

    done: bool
    stopped: bool


TaskT = TypeVar("TaskT", bound=SteppedTask)


class SteppedDevice(Generic[TaskT]):
    """Stands where the device worker stands, without a thread: tasks advance when a test says so."""

    def __init__(self) -> None:
        self.tasks: list[TaskT] = []

    def submit(self, task: TaskT) -> None:
        """Takes a task."""
        self.tasks.append(task)

    def step(self, advance: Callable[[Sequence[TaskT]], None]) -> bool:
        """Makes one step of all tasks that are neither done nor stopped; tells whether there were any."""
        self.tasks = [task for task in self.tasks if not (task.done or task.stopped)]
        if self.tasks:
            advance(self.tasks)
        return bool(self.tasks)

    def run(self, advance: Callable[[Sequence[TaskT]], None]) -> None:
        """Makes steps until there is nothing to do."""
        while self.step(advance):
            pass
