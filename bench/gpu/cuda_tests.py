"""Section `tests`: the tests that are marked `cuda`, each one's outcome a record."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/outrider/engine"
RESULTS = "tests.xml"
MESSAGE = 4000


def run(recorder: Recorder, _sizes: Sizes, device: torch.device) -> None:
    """Runs them in one process of pytest; on a CPU those of the same files that need no card."""
    kind = "cuda" if device.type == "cuda" else "not cuda and not slow"
    results = recorder.folder / RESULTS
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / TESTS).rglob("test_cuda*.py"))]
    options = ("-q", "-p", "no:cacheprovider", "--timeout=30", f"--junitxml={results}", "-o", "junit_family=xunit2")
    ended = subprocess.run([sys.executable, "-m", "pytest", "-m", kind, *options, *files], cwd=ROOT, check=False)
    if not results.exists():
        recorder.fail("pytest", f"pytest ended with {ended.returncode} and wrote no results; its output says why")
        return
    cases = list(ElementTree.parse(results).iter("testcase"))
    outcomes = {"passed": 0, "failed": 0, "skipped": 0}
    for case in cases:
        fault = next((each for each in case if each.tag in {"failure", "error"}), None)
        is_skipped = case.find("skipped") is not None
        outcomes["failed" if fault is not None else "skipped" if is_skipped else "passed"] += 1
        if fault is not None:
            name = f"{case.get('classname', '').split('.')[-1]}/{case.get('name')}"
            recorder.fail(name, f"{fault.get('message', '')}\n{fault.text or ''}"[-MESSAGE:])
    for outcome, count in outcomes.items():
        recorder.add(outcome, count, "tests")
