"""Counts the points at which a coroutine waits, so that each of them can be the one at which it is cancelled."""

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any


class AwaitPoints:
    """Awaits something, and calls `on_await` with a count from 0 whenever that is about to wait."""

    def __init__(self, inner: Awaitable[Any], on_await: Callable[[int], None]) -> None:
        self._inner = inner
        self._on_await = on_await
        self._num_awaits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        """The result of what is awaited."""
        steps = self._inner.__await__()
        step: Callable[[], Any] = partial(steps.send, None)
        while True:
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            self._on_await(self._num_awaits)
            self._num_awaits += 1
            try:
                step = partial(steps.send, (yield waited_for))
            except BaseException as error:  # noqa: BLE001 - what is thrown in belongs to what is awaited
                step = partial(steps.throw, error)
