"""Stands where the device worker stands, without a thread: jobs and steps are callbacks of a virtual loop.

Time on the device is virtual too. A step ends after a while that the dice say, and what is queued meanwhile waits for
its end, as it does on a device. Knows no models.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from simulation.loop import VirtualLoop, context_of

from outrider.engine.device_thread import Task, own_fault
from outrider.errors import NotReady

T = TypeVar("T")


class InlineDevice:
    """The interface of outrider.engine.device_thread.DeviceWorker on a virtual loop."""

    def __init__(
        self,
        loop: VirtualLoop,
        host: str,
        advance: Callable[[Sequence[Any]], None],
        step_s: Callable[[], float],
        on_fault: Callable[[BaseException], None],
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`step_s` says how long the next step takes; `on_fault` hears of an advance that raises; `rest` as there."""
        self.progress = 0
        self._loop = loop
        self._context = context_of(host)
        self._advance = advance
        self._step_s = step_s
        self._on_fault = on_fault
        self._rest = rest
        self._active: list[Task] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._futures: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._is_busy = False
        self._hung_since_s: float | None = None

    @property
    def num_active(self) -> int:
        """Tasks that take part in the next step."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for the end of the running step."""
        return len(self._jobs)

    @property
    def stalled_us(self) -> int:
        """Microseconds for which a device with something to do has finished nothing."""
        if self._hung_since_s is None or not (self._jobs or self._active):
            return 0
        return int(1e6 * (self._loop.time() - self._hung_since_s))

    def call(self, fn: Callable[[], T]) -> "asyncio.Future[T]":
        """Queues `fn`; the future has its result or its exception. Raises NotReady after `close`."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

        def job() -> None:
            try:
                result = fn()
            except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
                self._loop.call_soon(partial(_settle, future, future.set_exception, error))
            else:
                self._loop.call_soon(partial(_settle, future, future.set_result, result))

        self.post(job)
        return future

    def submit(self, task: Task) -> None:
        """Lets a task take part from the next step on. Raises NotReady after `close`."""
        self.post(lambda: self._active.append(task))

    def post(self, fn: Callable[[], None]) -> None:
        """Queues `fn`, for whose end no caller waits. Raises NotReady after `close`."""
        if self._closed:
            raise NotReady("the service is stopping")
        self._jobs.append(fn)
        self._wake()

    async def close(self) -> None:
        """Runs what is queued, and fails active tasks. Idempotent."""
        if not self._closed:
            self._closed = True
            self._run_jobs()
            for task in self._active:
                if not (task.done or task.stopped):
                    task.fail(NotReady("the service is stopping"))
            self._active = []
            self._rest()

    def kill(self) -> None:
        """The process is gone: nothing that was queued happens, and who waits for it is interrupted."""
        self._closed = True
        for future in list(self._futures):
            future.cancel()
        self._jobs.clear()
        self._active = []

    def hang(self) -> None:
        """The running step does not end until `recover`."""
        self._hung_since_s = self._loop.time() if self._hung_since_s is None else self._hung_since_s

    def recover(self) -> None:
        """Goes on where it hung."""
        self._hung_since_s = None
        self._wake()

    def _wake(self) -> None:
        if not self._is_busy and self._hung_since_s is None:
            self._is_busy = True
            self._loop.call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        self._run_jobs()
        self._active = [task for task in self._active if not (task.done or task.stopped)]
        self._is_busy = bool(self._active) and not self._closed
        self.progress += 1
        if self._is_busy:
            self._loop.call_later(self._step_s(), self._step, context=self._context)

    def _run_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()
        self._rest()

    def _step(self) -> None:
        if self._closed or self._hung_since_s is not None:
            self._is_busy = False
            return
        # The worker passes on a list of its own as well, because tasks come and go during a step.
        tasks = list(self._active)
        try:
            self._advance(tasks)
        except Exception as error:  # noqa: BLE001 - the device outlives what a batch does to itself
            self._on_fault(error)
            for task in tasks:
                if not (task.done or task.stopped):
                    with own_fault(task):
                        self._advance([task])
        self._turn()


def _settle(future: "asyncio.Future[Any]", settle: Callable[[Any], None], value: object) -> None:
    if not future.done():
        settle(value)
