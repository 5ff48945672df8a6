"""Names the machine that a report was measured on. Measures nothing."""

import os
import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def describe() -> str:
    """Processor and number of CPUs, as far as the system tells."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def _cpu_lines() -> list[str]:
    return CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
