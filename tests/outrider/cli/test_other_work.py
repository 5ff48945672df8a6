"""What other processes take of the machine while something is timed."""

import os
import subprocess
import sys

import pytest

from outrider.cli.other_work import CpuTimes, cpu_times, others_said

CHILD = "import time\nwhile time.process_time() < 0.35: pass\nprint(end='.', flush=True)\ninput()"


@pytest.mark.parametrize(
    ("idle", "own", "others", "said"),
    [
        (0.0, 1.9, 0.1, ""),
        (0.1, 1.0, 0.9, "other processes took 0.9 of its 2 CPUs"),
        (1.1, 0.0, 0.9, ""),
    ],
)
def test_others_count_where_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, idle: float, own: float, others: float, said: str
) -> None:
    """A tenth of a CPU is nothing, and neither is what runs on CPUs that were idle."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    before = CpuTimes(100.0, 50.0, 10.0)
    after = CpuTimes(100.0 + 5 * (own + others), 50.0 + 5 * idle, 10.0 + 5 * own)
    assert others_said(before, after) == said
    assert others_said(None, after) == others_said(before, None) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell these times")
def test_what_this_process_starts_is_its_own() -> None:
    """A child that still runs, too; the clock of the system counts hundredths of a second."""
    before = cpu_times()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"."
        after = cpu_times()
        child.communicate(b"\n")
    assert before is not None
    assert after is not None
    assert after.own_s - before.own_s >= 0.3
    assert after.busy_s - before.busy_s >= after.own_s - before.own_s - 0.1
