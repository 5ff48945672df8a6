"""A service's device, held by a test between two forwards. Knows nothing of requests."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from helpers import PATIENCE_S

from outrider.model_service.server import RunningModelService


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
        """Ends it."""
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
