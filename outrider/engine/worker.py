"""The one thread that touches a device: it runs what others ask for between two forwards, and then the next forward.

Knows nothing about models, sessions or messages. Whatever belongs to the device (sessions, blocks, sampling) is only
touched by jobs and by `advance`, both of which run here one after the other, so nothing of it needs a lock and nothing
is freed under a running forward. Tasks that arrive during a forward join the next one (Yu et al., 2022, Orca).
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from outrider.errors import NotReady, OutriderError

log = structlog.get_logger()

T = TypeVar("T")
Value = TypeVar("Value")


class Task(Protocol):
    """Work of several steps."""

    @property
    def done(self) -> bool:
        """Whether its last step has been made."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether nobody wants it any more; it leaves before the next step, without an answer."""
        ...

    def fail(self, error: OutriderError) -> None:
        """Ends the task with an error."""
        ...


TaskT = TypeVar("TaskT", bound=Task)


class DeviceWorker(Generic[TaskT]):
    """A thread that calls `advance` with all active tasks, over and over while there are any.

    `advance` makes one step of each task and handles the faults of single ones. When it raises, all of its tasks fail.
    """

    def __init__(
        self, advance: Callable[[Sequence[TaskT]], None], setup: Callable[[], None] | None = None, name: str = "device"
    ) -> None:
        """Starts the thread, which first calls `setup`."""
        self.progress = 0
        """Counts iterations; stands still while there is nothing to do, or when the device hangs."""
        self._advance = advance
        self._active: list[TaskT] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(setup,), name=name, daemon=True)
        self._thread.start()

    @property
    def num_active(self) -> int:
        """Tasks that take part in the next forward."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for the end of the running step or job."""
        return self._jobs.qsize()

    def call(self, fn: Callable[[], T]) -> asyncio.Future[T]:
        """Queues `fn` at once, behind what is queued already; the future has its result or its exception.

        `fn` runs even when the future is cancelled. Raises NotReady after `close`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = fn()
            except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
                _deliver(loop, future, future.set_exception, error)
            else:
                _deliver(loop, future, future.set_result, result)

        self._put(job)
        return future

    def submit(self, task: TaskT) -> None:
        """Lets a task take part from the next forward on; from any thread. Raises NotReady after `close`."""
        self._put(lambda: self._active.append(task))

    async def close(self) -> None:
        """Ends the thread behind the jobs that are queued; active tasks fail. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _put(self, job: Callable[[], None]) -> None:
        if self._closed:
            raise NotReady("the service is stopping")
        self._jobs.put(job)

    def _run(self, setup: Callable[[], None] | None) -> None:
        if setup is not None:
            setup()
        while self._run_jobs():
            self._active = [task for task in self._active if not (task.done or task.stopped)]
            if self._active:
                self._step(list(self._active))
            self.progress += 1
        self._fail(self._active, NotReady("the service is stopping"))

    def _run_jobs(self) -> bool:
        """Runs what is queued, waiting for the first job when there is no task; tells whether to go on."""
        may_wait = not self._active
        while True:
            try:
                job = self._jobs.get(block=may_wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            job()
            may_wait = False

    def _step(self, tasks: Sequence[TaskT]) -> None:
        try:
            self._advance(tasks)
        except Exception:
            # The thread serves every session: it outlives whatever a batch does to itself.
            log.exception("a batch failed", num_tasks=len(tasks))
            self._fail(tasks, OutriderError("the computation of a batch failed"))

    def _fail(self, tasks: Sequence[TaskT], error: OutriderError) -> None:
        for task in tasks:
            if not (task.done or task.stopped):
                task.fail(error)
        self._active = []


def _deliver(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], settle: Callable[[Value], None], value: Value
) -> None:
    """Settles a future on its loop; a loop that has been closed has nobody left who waits."""

    def deliver() -> None:
        # Whoever gave up waiting has cancelled it.
        if not future.done():
            settle(value)

    if not loop.is_closed():
        loop.call_soon_threadsafe(deliver)
