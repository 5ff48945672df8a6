"""What other processes take of this machine while something is timed, so that no figure is of their work."""

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
# From so many CPUs on, where less than one is idle, others have a part in every figure.
NOTICED_CPUS, SPARE_CPUS = 0.15, 1.0


class CpuTimes(NamedTuple):
    """Seconds since the system began, of all CPUs together."""

    busy_s: float
    idle_s: float
    own_s: float
    """Busy seconds of this process and of all below it."""


def cpu_times() -> CpuTimes | None:
    """Times until now, None where the system does not say; time that a hypervisor took is busy."""
    if not (PROC / "stat").exists():
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, waiting, *others = map(int, (PROC / "stat").read_text().split("\n")[0].split()[1:9])
    children, spent = defaultdict[int, list[int]](list), dict[int, int]()
    for place in PROC.glob("[0-9]*/stat"):
        # A process may end before it is read.
        with suppress(OSError):
            # The name before it may have anything in it.
            words = place.read_text().rpartition(")")[2].split()
            number = int(place.parent.name)
            children[int(words[1])].append(number)
            spent[number] = int(words[11]) + int(words[12])
    family = [os.getpid()]
    for each in family:
        family += children[each]
    own = sum(spent.get(each, 0) for each in family)
    return CpuTimes((user + nice + system + sum(others)) / ticks, (idle + waiting) / ticks, own / ticks)


def others_said(before: CpuTimes | None, after: CpuTimes | None) -> str:
    """What other processes took meanwhile, as the end of a sentence; empty where it was nothing that counts."""
    if before is None or after is None:
        return ""
    busy_s, idle_s, own_s = (late - early for early, late in zip(before, after, strict=True))
    cpus = os.cpu_count() or 1
    elapsed_s = max(busy_s + idle_s, 1e-3) / cpus
    others, idle = (busy_s - own_s) / elapsed_s, idle_s / elapsed_s
    if others < NOTICED_CPUS or idle >= SPARE_CPUS:
        return ""
    return f"other processes took {others:.1f} of its {cpus} CPUs"
