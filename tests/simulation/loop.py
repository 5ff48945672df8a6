"""An event loop without a clock and without I/O: time jumps to the next timer as soon as nothing is ready.

Everything that happens in it is a function of the seed. Each simulated process is a *host*, named by a context variable
that tasks and callbacks inherit; each keeps asyncio's order among its own callbacks, as a process of its own would,
while the hosts are interleaved at random, so that the rule of first come, first served is never broken where code may
rely on it. A frozen host is a process under SIGSTOP: what becomes ready in it waits.
"""

import asyncio
import contextvars
import random
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

HOST: contextvars.ContextVar[str] = contextvars.ContextVar("host", default="")
MAX_TURNS = 400_000
TURN_S = 1e-6  # a clock that stood still between two turns would be one that no process has
POSTPONED = 0.2  # share of the turns that a host with something to do does not get


class Deadlock(Exception):
    """Something is waited for, and nothing will ever happen."""


class Livelock(Exception):
    """Things go on happening without an end."""


def context_of(host: str) -> contextvars.Context:
    """A context in which tasks and callbacks belong to a host."""
    context = contextvars.copy_context()
    context.run(HOST.set, host)
    return context


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in an order that the seed decides, at times that it makes up."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.faults: list[str] = []
        """What asyncio reported because no other code could: exceptions of callbacks and of forgotten tasks."""
        self._dice = random.Random(seed)
        self._now_s = 0.0
        self._num_turns = 0
        self._frozen: set[str] = set()
        self._host_of: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        self._withheld: list[Any] = []
        self._selector = self  # the base class asks its selector for I/O, and there is none
        self.set_exception_handler(self._note)

    def create_task(self, coro: Any, *, name: Any = None, context: contextvars.Context | None = None) -> Any:
        """Makes a task like asyncio's, but notes the task's host."""
        task = super().create_task(coro, name=name, context=context)
        self._host_of[task] = (context or contextvars.copy_context()).get(HOST, "")
        return task

    def tasks_of(self, host: str) -> list["asyncio.Task[Any]"]:
        """The tasks of a host that have not ended."""
        return [task for task, where in self._host_of.items() if where == host and not task.done()]

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self._now_s

    def freeze(self, hosts: Iterable[str]) -> None:
        """Nothing happens in these hosts until `thaw`."""
        self._frozen |= set(hosts)

    def thaw(self, hosts: Iterable[str]) -> None:
        """They go on where they were."""
        self._frozen -= set(hosts)

    def wind_up(self) -> None:
        """Cancels all tasks, again and again, until none is left, and hears no more complaints.

        There are some after a broken invariant, and those of a process that was killed.
        """
        self.set_exception_handler(lambda loop, context: None)
        self._frozen.clear()
        self._num_turns = 0
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.sleep(1.0))

    def select(self, timeout: float | None) -> list[Any]:
        """Called once a turn: chooses what runs in it, or lets time pass. Raises Deadlock and Livelock."""
        self._num_turns += 1
        if self._num_turns > MAX_TURNS:
            raise Livelock(f"{MAX_TURNS} turns, {self._now_s:.1f} s")
        self._now_s += TURN_S
        self._choose()
        if not self._ready and timeout is None and not self._stopping:
            raise Deadlock(f"nothing will happen any more at {self._now_s:.3f} s")
        if not self._ready and timeout:
            self._now_s += timeout
        return []

    def _choose(self) -> None:
        """Leaves in `_ready` what runs now: some hosts' callbacks, each host's in their order."""
        if not self._withheld and not self._frozen and len(self._ready) < 2:
            return
        waiting, queues = [*self._withheld, *self._ready], {}
        self._ready.clear()
        for handle in waiting:
            queues.setdefault(handle._context.get(HOST, ""), []).append(handle)
        able = sorted(host for host in queues if host not in self._frozen)
        chosen = [host for host in able if self._dice.random() >= POSTPONED] or able[:1]
        self._withheld = [handle for handle in waiting if handle._context.get(HOST, "") not in chosen]
        turns = [host for host in chosen for _ in queues[host]]
        self._dice.shuffle(turns)
        iterators = {host: iter(queues[host]) for host in chosen}
        self._ready.extend(next(iterators[host]) for host in turns)

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken: there is one thread."""

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Runs to the end of `main`, ends what is left, and closes the loop."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.wind_up()
        loop.close()
