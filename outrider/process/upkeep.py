"""Work that must not end while a process runs: what fails is started again, counted, and seen in its health."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import structlog
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger()

# Pauses before work is started again.
FIRST_S, LONGEST_S = 0.1, 10.0


class Upkeep(Collector):
    """The work of a process in the background; as a collector it reports how often each piece has failed."""

    def __init__(self) -> None:
        self._failing: dict[str, None] = {}
        self._failures: Counter[str] = Counter()

    @property
    def failing(self) -> tuple[str, ...]:
        """Work that has failed and has not been well since for as long as it was paused."""
        return tuple(self._failing)

    async def keep(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Does work that has no end, until it is cancelled: again after a pause, whatever it raises or returns.

        Then its figures have gone with it.
        """
        loop, pause_s = asyncio.get_running_loop(), FIRST_S
        proven: asyncio.TimerHandle | None = None
        task = asyncio.current_task()
        try:
            while True:
                began_s = loop.time()
                try:
                    await work()
                    error: BaseException = RuntimeError("it has ended")
                except Exception as raised:  # noqa: BLE001 - whatever it is, the work goes on
                    error = raised
                except asyncio.CancelledError as raised:
                    # Raised too by what this task waited for, and then it is no end.
                    if task is None or task.cancelling():
                        raise
                    error = raised
                finally:
                    if proven is not None:
                        proven.cancel()
                self.failed(name, error)
                if loop.time() - began_s > LONGEST_S:
                    pause_s = FIRST_S
                await asyncio.sleep(pause_s)
                proven = loop.call_later(pause_s, self.works, name)
                pause_s = min(2 * pause_s, LONGEST_S)
        finally:
            self._failing.pop(name, None)
            self._failures.pop(name, None)

    def failed(self, name: str, error: BaseException) -> None:
        """Takes note of a failure, and logs the first in a row; from any thread."""
        self._failures[name] += 1
        if name not in self._failing:
            self._failing[name] = None
            log.error("background work failed", work=name, exc_info=error)

    def works(self, name: str) -> None:
        """Takes note that some work is well."""
        if name in self._failing:
            del self._failing[name]
            log.warning("background work goes on", work=name)

    def collect(self) -> Iterable[Metric]:
        """Number of failures, as one family; from any thread."""
        meaning = "Times that work in the background failed and was started again."
        family = CounterMetricFamily("outrider_work_failures", meaning, labels=["work"])
        for name, count in [*self._failures.items()]:
            family.add_metric([name], count)
        yield family
