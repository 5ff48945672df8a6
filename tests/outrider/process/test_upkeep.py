"""Work that must not end: whatever it raises or returns, it goes on, is counted, and is seen while it is not well."""

import asyncio
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from support.basics import eventually

from outrider.process.upkeep import Upkeep

ERRORS = (RuntimeError("a bug"), OSError(28, "No space left on device"), asyncio.CancelledError(), TimeoutError(), None)


def counts(upkeep: Upkeep) -> dict[str, float]:
    """Failures by work."""
    [family] = upkeep.collect()
    return {sample.labels["work"]: sample.value for sample in family.samples}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_work_goes_on(error: BaseException | None) -> None:
    """Also where it is cancelled by what it waited for, and where it just ends; the log has the first of a row."""
    upkeep, faults, works = Upkeep(), iter([error, error]), asyncio.Event()

    async def work() -> None:
        for fault in faults:
            if fault is not None:
                raise fault
            return
        works.set()
        await asyncio.Event().wait()

    with capture_logs() as logs:
        keeping = asyncio.create_task(upkeep.keep("work", work))
        await eventually(lambda: upkeep.failing == ("work",))
        await works.wait()
        assert upkeep.failing == ("work",)
        await eventually(lambda: not upkeep.failing)
    assert counts(upkeep) == {"work": 2}
    assert [line["event"] for line in logs] == ["background work failed", "background work goes on"]
    keeping.cancel()
    await asyncio.wait({keeping})
    assert keeping.cancelled()


async def test_work_that_is_paused_can_be_ended() -> None:
    """At once, as any."""

    def faults() -> Iterator[Exception]:
        while True:
            yield RuntimeError("a bug")

    async def work() -> None:
        raise next(endless)

    upkeep, endless = Upkeep(), faults()
    keeping = asyncio.create_task(upkeep.keep("work", work))
    await eventually(lambda: bool(upkeep.failing))
    keeping.cancel()
    await asyncio.wait({keeping})
    assert keeping.cancelled()
