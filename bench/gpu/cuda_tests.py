"""Section `tests`: the tests that are marked `cuda`; each failure is a record at once."""

from pathlib import Path

import pytest
import torch

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "outrider" / "engine"
MESSAGE = 4000
# Each has its own context on the card, so that a fault of the card costs one of them its tests.
WORKERS = 4
FEW = "refused or bfloat16_is_near"


class Outcomes:
    """Counts tests, and records those that fail."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test."""
        if report.failed:
            self._recorder.fail(report.nodeid.split("/")[-1], report.longreprtext[-MESSAGE:])
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1


def run(recorder: Recorder, _sizes: Sizes, device: torch.device) -> None:
    """Runs them side by side; on a CPU a few of the same files, because `make test` runs all that need no card."""
    kind, chosen = ("cuda", ("-n", str(WORKERS))) if device.type == "cuda" else ("not cuda", ("-k", FEW))
    outcomes = Outcomes(recorder)
    files = sorted(map(str, FOLDER.rglob("test_cuda*.py")))
    options = ("-q", "-m", kind, "-p", "no:cacheprovider", "--timeout=60", f"--rootdir={ROOT}", *chosen)
    with torch.inference_mode(False):
        status = pytest.main([*options, *files], plugins=[outcomes])
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        recorder.fail("pytest", f"pytest ended with {status!r}; log.txt says why")
    for outcome, count in outcomes.counts.items():
        recorder.add(outcome, count, "tests")
