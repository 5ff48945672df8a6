"""What many tests need: waiting, specs, tasks that count their steps, and a device that a test holds or steps."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import pytest

from outrider.engine.cache import BlockPool
from outrider.errors import OutriderError
from outrider.model_service.server import RunningModelService
from outrider.parameters import SamplingParameters, SessionSpec

PATIENCE_S = 120.0
# Before a command: whatever starts it ignores Ctrl-C, as shells do for what a script runs with `&`.
BEHIND_IGNORED_INTERRUPTS = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


def slow(*values: object) -> list[Any]:
    """Values of a parameter that are left to `make test-slow`, where `make test` has others of their kind."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def grid(*values: object) -> list[Any]:
    """Values of a parameter that are left to `make test-grid`, where CI has others of their kind."""
    return [pytest.param(value, marks=pytest.mark.grid) for value in values]


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


def freeze(pid: int) -> None:
    """Stops a child of this process; on a busy machine it would go on for a while after the signal."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


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


class Answers(list[Any]):
    """Stands where the outbox of a link stands: what came, in order."""

    client = ""
    # An outbox is its own owner, whatever is in it.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def put(self, answer: object) -> None:
        """Takes an answer."""
        self.append(answer)


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
        """Takes a task to advance."""
        self.tasks.append(task)

    def step(self, advance: Callable[[Sequence[TaskT]], None]) -> bool:
        """Makes one step of all tasks that are neither done nor stopped; returns whether there were any."""
        self.tasks = [task for task in self.tasks if not (task.done or task.stopped)]
        if self.tasks:
            advance(self.tasks)
        return bool(self.tasks)

    def run(self, advance: Callable[[Sequence[TaskT]], None]) -> None:
        """Makes steps until there is nothing to do."""
        while self.step(advance):
            pass


@dataclass(eq=False)
class Counting:
    """A task of a number of steps."""

    steps: int
    name: str = ""
    done: bool = False
    stopped: bool = False
    made: int = 0
    error: OutriderError | None = None

    def fail(self, error: OutriderError) -> None:
        """Remembers the error."""
        self.done, self.error = True, error


@dataclass
class Machine:
    """Advances tasks and keeps a diary; `before_step` runs on the device thread before each step."""

    diary: list[list[str]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    before_step: Callable[[], None] | None = None

    def advance(self, tasks: Sequence[Counting]) -> bool:
        """One step of every task."""
        self.threads.add(threading.get_ident())
        if self.before_step is not None:
            self.before_step()
        self.diary.append([task.name for task in tasks])
        for task in tasks:
            task.made += 1
            task.done = task.made == task.steps
        return True


@dataclass
class Clock:
    """A clock of nanoseconds that stands still until it is moved on."""

    now_ns: int = 1_000

    def __call__(self) -> int:
        return self.now_ns


class HeldDevice:
    """A device thread that runs its jobs, in order, but makes no forward until it is let go."""

    def __init__(self, service: RunningModelService) -> None:
        self._worker = service.worker
        self._gate, self._waiting = self._hold()

    async def run_jobs(self) -> None:
        """Runs the jobs that wait; the device is held again before it can look for something to compute."""
        gate, waiting = self._gate, self._waiting
        self._gate, self._waiting = self._hold()
        gate.set()
        await waiting

    async def let_go(self) -> None:
        """Ends the hold for good."""
        self._gate.set()
        await self._waiting

    def _hold(self) -> tuple[threading.Event, "asyncio.Future[bool]"]:
        gate = threading.Event()
        return gate, self._worker.call(lambda: gate.wait(PATIENCE_S))


@asynccontextmanager
async def held(service: RunningModelService) -> AsyncIterator[HeldDevice]:
    """Holds a device from wherever it is between two forwards."""
    device = HeldDevice(service)
    await device.run_jobs()
    try:
        yield device
    finally:
        await device.let_go()
