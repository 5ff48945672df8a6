"""The inline device: jobs between steps, hangs, ends."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from simulation.device import InlineDevice
from simulation.loop import VirtualLoop, run

from outrider.errors import NotReady, OutriderError


@dataclass(eq=False)
class Count:
    """A task of some steps."""

    left: int
    stopped: bool = False
    error: OutriderError | None = None

    @property
    def done(self) -> bool:
        """No step is left."""
        return self.left == 0

    def fail(self, error: OutriderError) -> None:
        """Notes the error."""
        self.left, self.error = 0, error


def device_of(loop: VirtualLoop) -> InlineDevice:
    """A device whose steps take a second and count."""

    def advance(tasks: Sequence[Count]) -> None:
        for task in tasks:
            task.left -= 1

    def complain(error: BaseException) -> None:
        raise error

    return InlineDevice(loop, "device", advance, lambda: 1.0, complain)


def test_a_job_waits_for_the_end_of_a_step_and_a_hanging_step_has_none() -> None:
    """Steps take virtual time, jobs run between them, and a hang stops both until it is over."""
    loop = VirtualLoop(0)

    async def live() -> None:
        device, task = device_of(loop), Count(3)
        device.submit(task)
        await asyncio.sleep(0.5)
        assert await device.call(lambda: task.left) == 2
        assert 1.0 <= loop.time() < 1.1
        device.hang()
        waiting = device.call(lambda: task.left)
        await asyncio.sleep(60)
        assert not waiting.done()
        assert device.stalled_us >= 60_000_000
        device.recover()
        assert await waiting == 2
        await asyncio.sleep(10)
        assert (task.left, device.num_active, device.stalled_us) == (0, 0, 0)

    run(live(), loop)


def test_a_closed_device_takes_nothing_and_fails_what_it_had() -> None:
    """As the worker says."""
    loop = VirtualLoop(0)

    async def live() -> None:
        device, task = device_of(loop), Count(3)
        device.submit(task)
        await device.close()
        assert isinstance(task.error, NotReady)
        with pytest.raises(NotReady):
            device.call(lambda: None)

    run(live(), loop)
