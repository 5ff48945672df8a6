"""What doctor makes of versions, threads, clocks, memory and the engine: judgements of invented facts."""

import pytest

from outrider.cli.doctor import clock, engine, memory, threads, versions
from outrider.cli.doctor.clock import Instant
from outrider.cli.doctor.engine import Engine
from outrider.cli.doctor.findings import Finding, Status, exit_code, failed, ok, warning
from outrider.cli.doctor.threads import Cpus
from outrider.cli.doctor.versions import Installed

NEEDS = ("grpcio<2,>=1.85.1", 'torch<3,>=2.8; extra == "engine"', 'pytest<10,>=9; extra == "dev"')
KERNELS = {"kernels": "native-v3", "processor_levels": ["native-v3"], "cuda": [], "numerics_id": "cpu-x"}
EQUAL = {"name": "a row alone and in a batch", "rows": 72, "equal_rows": 72}


def statuses(findings: list[Finding]) -> list[Status]:
    return [each.status for each in findings]


def test_the_first_failure_names_the_exit_code() -> None:
    """Later checks often fail because of it; a warning is no failure."""
    findings = [ok("a", ""), warning("b", "", ""), failed("c", "", "", 69), failed("d", "", "", 78)]
    assert exit_code(findings) == 69
    assert exit_code(findings[:2]) == 0


def test_fitting_versions() -> None:
    """One line with all of them; what only developers need is not missed."""
    installed = Installed("3.11.7", {"outrider": "0.1.0", "grpcio": "1.85.1", "torch": "2.13.0+cpu"}, NEEDS)
    [finding] = versions.judge(installed)
    assert finding.status is Status.OK
    assert "grpcio 1.85.1" in finding.sentence


def test_versions_that_do_not_fit_name_the_command() -> None:
    """What is too old fails; a missing engine only keeps a machine from serving models."""
    old = versions.judge(Installed("3.11.7", {"grpcio": "1.60.0", "torch": None}, NEEDS))
    assert statuses(old) == [Status.OK, Status.FAILED, Status.WARNING]
    assert (old[1].exit_code, old[1].fix) == (78, "pip install 'grpcio<2,>=1.85.1'")
    assert old[2].fix == "pip install 'outrider[engine]'"
    missing = versions.judge(Installed("3.11.7", {"grpcio": None, "torch": "2.8"}, NEEDS))
    assert statuses(missing) == [Status.OK, Status.FAILED]


def test_this_installation_is_whole() -> None:
    """The real metadata of the environment that runs the tests."""
    assert statuses(versions.judge(versions.gather())) == [Status.OK]


@pytest.mark.parametrize(
    ("quota", "wanted", "status"), [(None, 4, Status.OK), (None, 5, Status.WARNING), (1.5, 2, Status.WARNING)]
)
def test_threads_against_cpus(quota: float | None, wanted: int, status: Status) -> None:
    """More threads than CPUs, or than a container may use, wait for each other."""
    finding = threads.judge(Cpus(8, 4, quota, {}), wanted, 1)[0]
    assert finding.status is status
    if quota:
        assert finding.fix == "outrider up --threads 1"


def test_quotas_of_control_groups() -> None:
    """Microseconds of each period, or no limit."""
    assert threads.parse_quota("150000 100000\n") == 1.5
    assert [threads.parse_quota(text) for text in ("max 100000", "", "1 0")] == [None, None, None]


@pytest.mark.parametrize(
    ("name", "value", "is_bad"),
    [
        ("OMP_WAIT_POLICY", "ACTIVE", True),
        ("OMP_WAIT_POLICY", "passive", False),
        ("GOMP_SPINCOUNT", "infinity", True),
        ("GOMP_SPINCOUNT", "30000000000", True),
        ("GOMP_SPINCOUNT", "0", False),
        ("KMP_BLOCKTIME", "200", True),
        ("KMP_BLOCKTIME", "infinite", True),
        ("KMP_BLOCKTIME", "0", False),
        ("MKL_NUM_THREADS", "8", False),
    ],
)
def test_what_makes_idle_threads_spin(name: str, value: str, is_bad: bool) -> None:
    """The warning names the variable and how to be rid of it."""
    finding = threads.judge(Cpus(2, 2, None, {name: value}), 1, 1)[1]
    assert (finding.status is Status.WARNING) is is_bad
    assert finding.fix == (f"unset {name}" if is_bad else "")


@pytest.mark.parametrize(
    ("after", "resolution", "word"),
    [
        (Instant(2e9 + 10, 110), 1e-9, "agree"),
        (Instant(2e9 + 17, 110), 1e-9, "went on by 17.00 s while 10.00 s"),
        (Instant(2e9 + 10, 110), 0.015, "steps of 15 ms"),
        (Instant(0, 110), 1e-9, "1970"),
    ],
)
def test_clocks(after: Instant, resolution: float, word: str) -> None:
    """A clock that jumps, one that is coarse and one that was never set are told apart."""
    assert word in clock.judge(Instant(2e9, 100), after, resolution).sentence


def test_memory_of_a_pair() -> None:
    """Too little for both is a warning while one fits, and a failure when none does; unknown is skipped."""
    needs = {"target": 4 << 30, "draft": 1 << 30}
    found = [memory.judge(needs, available).status for available in (8 << 30, 3 << 30, 1 << 30, None)]
    assert found == [Status.OK, Status.WARNING, Status.FAILED, Status.SKIPPED]
    assert memory.parse_available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n") == 2 << 20


def test_an_engine_that_keeps_its_promise() -> None:
    """Kernels, no device, rows equal."""
    findings = engine.judge(Engine({**KERNELS, "comparisons": [EQUAL]}), "/usr/bin/cc", "cpu")
    assert statuses(findings) == [Status.OK, Status.SKIPPED, Status.OK]


def test_unequal_rows_fail_on_a_cpu_and_warn_on_a_device() -> None:
    """No promise of equal bits holds on an accelerator."""
    facts = {**KERNELS, "cuda": [{"name": "X", "memory_bytes": 1 << 30}], "comparisons": [{**EQUAL, "equal_rows": 70}]}
    [*_, on_cpu] = engine.judge(Engine(facts), None, "cpu")
    assert (on_cpu.status, on_cpu.exit_code) == (Status.FAILED, 70)
    assert "2 of 72" in on_cpu.sentence
    [*_, on_device] = engine.judge(Engine(facts), None, "cuda:0")
    assert on_device.status is Status.WARNING


@pytest.mark.parametrize(
    ("kernels", "levels", "compiler", "words"),
    [
        (None, ["native-v3"], None, "apt install gcc"),
        (None, ["native-v3"], "/usr/bin/cc", "pip install"),
        (None, [], None, "AVX2"),
        ("native-v3", ["native-v4", "native-v3"], None, "pip install"),
    ],
)
def test_slow_kernels_are_told_with_the_fix(
    kernels: str | None, levels: list[str], compiler: str | None, words: str
) -> None:
    """Not built, not buildable, not for this processor, or not the best for it."""
    facts = {**KERNELS, "kernels": kernels, "processor_levels": levels}
    finding = engine.judge(Engine(facts), compiler, "cpu")[0]
    assert finding.status is Status.WARNING
    assert words in finding.fix


def test_a_probe_that_fails_is_told_by_its_last_words() -> None:
    """A refused model is configuration, a traceback is a fault, no torch is neither."""
    refused = engine.judge(engine.parse("", "a log\nIt is a Mamba.\n\n", 78), None, "cpu")
    assert [(each.sentence, each.exit_code) for each in refused] == [("It is a Mamba.", 78)]
    assert engine.judge(engine.parse("", "Traceback\nOSError: disk", 1), None, "cpu")[0].exit_code == 70
    gone = engine.parse("", "ModuleNotFoundError: No module named 'torch'", 1)
    assert engine.judge(gone, None, "cpu")[0].status is Status.SKIPPED
