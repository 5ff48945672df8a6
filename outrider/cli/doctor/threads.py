"""How many CPUs there are for how many threads, and settings that make waiting threads burn them. Starts no thread."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.cli.doctor.findings import Finding, ok, told, warning
from outrider.model_service.settings import available_cpus

CHECK = "threads"
SPINNING = "spinning"
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
# What says how an OpenMP thread waits for work: GNU's runtime, which torch's own builds bring, and Intel's.
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Cpus:
    """What threads may run on; `quota` is the share that a container may use, None without a limit."""

    present: int
    allowed: int
    quota: float | None
    variables: Mapping[str, str]


def gather() -> Cpus:
    """Reads affinity, control group and environment."""
    text = CPU_MAX.read_text() if CPU_MAX.is_file() else ""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return Cpus(os.cpu_count() or 1, available_cpus(), parse_quota(text), variables)


def parse_quota(text: str) -> float | None:
    """CPUs out of a control group's cpu.max, "QUOTA PERIOD" in microseconds, or "max PERIOD" for no limit."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def judge(cpus: Cpus, threads: int, draft_threads: int) -> list[Finding]:
    """Threads against CPUs, then how they wait."""
    return [_count(cpus, threads, draft_threads), _spinning(cpus.variables)]


def _count(cpus: Cpus, threads: int, draft_threads: int) -> Finding:
    usable = cpus.allowed if cpus.quota is None else min(float(cpus.allowed), cpus.quota)
    limit = "" if cpus.quota is None else f", and the control group allows {cpus.quota:g} of them"
    sentence = (
        f"{told(cpus.allowed, 'CPU')} of {cpus.present} may be used{limit}; the target computes with "
        f"{told(threads, 'thread')}, the draft with {draft_threads}."
    )
    most = max(threads, draft_threads)
    if most > max(1.0, usable):
        count = max(1, int(usable))
        fix = f"outrider up --threads {count}" + (f" --draft-threads {count}" if draft_threads > usable else "")
        return warning(CHECK, f"{sentence} Threads that share a CPU wait for each other in every step.", fix)
    return ok(CHECK, sentence)


def _spinning(variables: Mapping[str, str]) -> Finding:
    """Two processes with threads that spin while they wait take the CPUs from each other."""
    guilty = [f"{name}={value}" for name, value in variables.items() if spins(name, value)]
    if guilty:
        names = " ".join(each.partition("=")[0] for each in guilty)
        sentence = f"{' and '.join(guilty)} keeps idle threads of one service busy, on the CPUs of the other."
        return warning(SPINNING, sentence, f"unset {names}")
    counts = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in variables]
    note = f" {' and '.join(counts)} has no effect on a service, which has --threads." if counts else ""
    return ok(SPINNING, f"Idle threads sleep: nothing in the environment makes them spin.{note}")


def spins(name: str, value: str) -> bool:
    """Whether a variable of this value makes idle threads spin for long."""
    given = value.strip().lower()
    match name:
        case "OMP_WAIT_POLICY":
            return given == "active"
        case "GOMP_SPINCOUNT":
            return given in {"infinity", "infinite"} or not given.isdecimal() or int(given) > 10_000
        case "KMP_BLOCKTIME":
            digits = given.removesuffix("ms").removesuffix("us")
            return not digits.isdecimal() or int(digits) > 1
    return False
