"""What holds for every test: the pair, signals of its children, and how long it may take."""

import importlib
import os
import signal
import zlib
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings

from outrider.cli.pairs import PAIR_VARIABLE, Pair
from outrider.process.imports import uncollected

# The embedded pair is quick, has known acceptance, and needs nothing from elsewhere.
os.environ.setdefault(PAIR_VARIABLE, Pair.TALES)

# What our kernels take for the processor's features: tests/instructions.py names those of a lesser one.
CPU_INFO_VARIABLE = "OUTRIDER_TESTS_CPU_INFO"
if CPU_INFO_VARIABLE in os.environ:
    # Imported for this alone: most tests need no torch.
    library = importlib.import_module("outrider.engine.ops.library")
    library.CPU_INFO = Path(os.environ[CPU_INFO_VARIABLE])  # type: ignore[attr-defined]

# A thread of torch that waits for its part sleeps: two workers and their services share the processors.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Kernels for CUDA run in Triton's interpreter where no driver has a card; they ask for it when they are defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# An example that takes long on a busy machine is none that fails.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Signals that the whole run ignores, for its worker processes, which do not inherit that any more.
IGNORED_VARIABLE = "OUTRIDER_TESTS_IGNORE"
# Ignored by Python itself, which gives them back to its children.
PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}


def keep_ignoring(_number: int, _frame: FrameType | None) -> None:
    """Nothing happens."""


def ignore_without_children() -> None:
    """Gives children all signals, whatever this process was started with: nohup, `&` in a script, a supervisor.

    What is ignored or blocked is so for children too, and a test that sends one to a child would wait in vain. What has
    a handler is not: so what was ignored gets one that does nothing.
    """
    signals = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    named = {int(number) for number in os.environ.get(IGNORED_VARIABLE, "").split()}
    ignored = (signals | named) - PYTHON_IGNORES
    for number in ignored:
        signal.signal(number, keep_ignoring)
    os.environ[IGNORED_VARIABLE] = " ".join(str(int(number)) for number in ignored)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


ignore_without_children()


def pytest_runtest_setup() -> None:
    """What the run ignores stays so: a test of code that takes signals leaves Python's own handlers behind."""
    for number in os.environ[IGNORED_VARIABLE].split():
        signal.signal(int(number), keep_ignoring)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: the collector does not look through them, neither now nor in each test."""
    with uncollected():
        return (yield)


# A test that hangs is ended after some minutes (pyproject.toml), with the stacks of all threads. Marked ones may take
# this long: a single one of them trains a model, runs a benchmark or hundreds of prompts, or drives real clients.
LONG_S = 900
LONG = ("slow", "grid", "surface", "harness", "agents", "assistant", "page", "docker")


# "2/3" for the second of three shares of the files, where a machine has no time for all of them: see .ci/run.
SHARE_VARIABLE = "OUTRIDER_TEST_SHARE"


def share_of(path: Path, num_shares: int) -> int:
    """Share that a file is in, from 1; the same on every machine."""
    return zlib.crc32(str(path.relative_to(Path(__file__).parent)).encode()) % num_shares + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves other shares out, begins with early files, and gives long tests their bound, unless they or the command
    line name another.
    """
    if SHARE_VARIABLE in os.environ:
        share, num_shares = map(int, os.environ[SHARE_VARIABLE].split("/"))
        files = {path for path in {item.path for item in items} if share_of(path, num_shares) == share}
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]
    early = {item.path for item in items if item.get_closest_marker("early")}
    items.sort(key=lambda item: item.path not in early)
    if config.getoption("timeout") is not None or "PYTEST_TIMEOUT" in os.environ:
        return
    for item in items:
        if item.get_closest_marker("timeout") is None and any(item.get_closest_marker(name) for name in LONG):
            item.add_marker(pytest.mark.timeout(LONG_S))
