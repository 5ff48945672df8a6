"""The one thread that touches a device: it runs what others ask for between two forwards, and then the next forward.

Whatever belongs to the device (sessions, blocks, sampling) is only touched by jobs and by `advance`, both of which run
here one after the other, so nothing of it needs a lock and nothing is freed under a running forward. Tasks that arrive
during a forward join the next one (Yu et al., 2022, Orca).
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import structlog
import torch

from outrider.errors import DeviceFull, NotReady, OutriderError

log = structlog.get_logger()

NO_WAIT_S = 0.0
# What tasks wait for is another session's next message, which is a job, or its end, which may come without one.
SHORT_WAIT_S = 0.001
# Longer than any limit.
DEAD_US = 1 << 50

FULL = (
    "the device has no memory left for this step alone: try again when other requests have ended, or with a shorter "
    "prompt; its operator can leave forwards more with a smaller --kv-memory-share or --kv-tokens"
)

T = TypeVar("T")


class Task(Protocol):
    """Work of several steps."""

    done: bool
    """Whether its last step has been made."""
    stopped: bool
    """Whether it is not wanted any more; it leaves before the next step, without an answer."""

    def fail(self, error: OutriderError) -> None:
        """Ends the task with an error."""


TaskT = TypeVar("TaskT", bound=Task)


@dataclass(slots=True, eq=False, kw_only=True)
class EndingTask:
    """A task that says how it has ended."""

    on_done: Callable[[Any], None]
    """Called with the task."""
    on_failure: Callable[[OutriderError], None]
    done: bool = False
    stopped: bool = False

    def finish(self) -> None:
        """Ends the task with what there is."""
        self.done = True
        self.on_done(self)

    def fail(self, error: OutriderError) -> None:
        self.done = True
        self.on_failure(error)


class own_fault:  # noqa: N801 - a context manager, read as a phrase
    """Ends a task with the unexpected error that is raised inside; no other task's step is touched by it."""

    # Not of contextlib, whose generators take longer than most of what stands inside.
    __slots__ = ("_task",)

    def __init__(self, task: Task) -> None:
        self._task = task

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        # The thread serves every session, and what a bug says is for the log and not for a client.
        log.error("a step failed", exc_info=error)
        if not (self._task.done or self._task.stopped):
            is_full = isinstance(error, torch.OutOfMemoryError)
            self._task.fail(DeviceFull(FULL) if is_full else OutriderError("the computation of a step failed"))
        return True


class DeviceWorker(Generic[TaskT]):
    """A thread that calls `advance` with all active tasks, over and over while there are any.

    `advance` makes one step of each task, handles the faults of single ones, and returns whether it could do anything;
    if not, the tasks wait for a job, or for a moment. It may raise only as long as none of its tasks has made the step:
    then each of them is advanced alone, so that only those end whose own step fails.
    """

    def __init__(
        self,
        advance: Callable[[Sequence[TaskT]], bool],
        setup: Callable[[], None] | None = None,
        name: str = "device",
        rest: Callable[[], None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Starts the thread, which first calls `setup`, and `rest` after each step and after the jobs between two."""
        self._advance = advance
        self._rest = rest
        self._clock_ns = clock_ns
        self._unfinished_since_ns: int | None = None
        self._active: list[TaskT] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = self._has_died = False
        self._thread = threading.Thread(target=self._live, args=(setup,), name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for the end of the running step or job."""
        return self._jobs.qsize()

    @property
    def stalled_us(self) -> int:
        """Microseconds for which there has been work and no piece of it, a job or a step, was finished; 0 when idle.

        DEAD_US of a thread that has died.
        """
        if self._has_died:
            return DEAD_US
        since_ns = self._unfinished_since_ns
        return 0 if since_ns is None else max(0, self._clock_ns() - since_ns) // 1000

    def post(self, job: Callable[[], None]) -> None:
        """Queues a job that no caller waits for; it must not raise. Raises NotReady after `close`."""
        if self._closed:
            raise NotReady("the service is stopping")
        if self._unfinished_since_ns is None:
            # The thread sets this too when it wakes up; a thread that never does must not look idle.
            self._unfinished_since_ns = self._clock_ns()
        self._jobs.put(job)

    def call(self, fn: Callable[[], T]) -> asyncio.Future[T]:
        """Queues `fn` at once, after what is queued already; the future has its result or its exception.

        `fn` runs even when the future is cancelled. Raises NotReady after `close`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            settle: Callable[[], None]
            try:
                settle = partial(future.set_result, fn())
            except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
                settle = partial(future.set_exception, error)
            # A loop that has been closed has no waiting task left; one that gave up waiting has cancelled the future.
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        self.post(job)
        return future

    def submit(self, task: TaskT) -> None:
        """Lets a task take part from the next forward on; from any thread. Raises NotReady after `close`."""
        if threading.current_thread() is not self._thread:
            self.post(lambda: self._active.append(task))
        elif self._closed:
            raise NotReady("the service is stopping")
        else:
            self._active.append(task)

    async def close(self) -> None:
        """Ends the thread after the jobs that are queued; active tasks fail. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _live(self, setup: Callable[[], None] | None) -> None:
        try:
            if setup is not None:
                setup()
            could_step = True
            while self._run_jobs(NO_WAIT_S if could_step else SHORT_WAIT_S):
                self._rest()
                self._active = [task for task in self._active if not (task.done or task.stopped)]
                if self._active:
                    could_step = self._step(list(self._active))
                    self._rest()
                    self._unfinished_since_ns = self._clock_ns()
            for task in self._active:
                if not (task.done or task.stopped):
                    task.fail(NotReady("the service is stopping"))
            self._active = []
            self._rest()
        except BaseException:
            # Also what would end a thread without a word. Nothing runs any more, which the service's watchdog notices.
            self._has_died = True
            log.exception("the device thread has died")

    def _run_jobs(self, wait_s: float) -> bool:
        """Runs what is queued, waiting for the first job as long as there is no task; returns whether to go on.

        With tasks, it waits for wait_s at most.
        """
        timeout_s: float | None = wait_s
        if not self._active:
            self._unfinished_since_ns, timeout_s = None, None
        while True:
            try:
                job = self._jobs.get(block=timeout_s != NO_WAIT_S, timeout=timeout_s)
            except queue.Empty:
                return True
            self._unfinished_since_ns = self._clock_ns()
            if job is None:
                return False
            try:
                job()
            except Exception:
                # The thread serves every session: it outlives a job that breaks its promise not to raise.
                log.exception("a job failed")
            timeout_s = NO_WAIT_S

    def _step(self, tasks: Sequence[TaskT]) -> bool:
        if len(tasks) == 1:
            return self._step_alone(tasks[0])
        try:
            return self._advance(tasks)
        except Exception:
            # One of them may be at fault, or none, because it was too much at once: the others must not pay for that.
            log.exception("a batch failed", num_tasks=len(tasks))
        could_step = [self._step_alone(task) for task in tasks]
        return any(could_step)

    def _step_alone(self, task: TaskT) -> bool:
        """Makes one step of one task, unless it has ended by now; when that raises, the task fails."""
        if task.done or task.stopped:
            return False
        # Each is a piece of work, and all of them together may take as long as a stall.
        self._unfinished_since_ns = self._clock_ns()
        with own_fault(task):
            return self._advance([task])
        return True
