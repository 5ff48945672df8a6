"""Runs the suites of kernels and heads as processors with other instructions compute: `make test-slow`.

A library chooses its code by the processor, and results differ in their last digits. Every row has what torch, its
libraries and our kernels see that there is; a row above this processor is left out, and said to be.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.ops.library import CPU_INFO, V3_FLAGS, V4_FLAGS

SUITES = (
    "tests/outrider/engine/ops",
    "tests/outrider/engine/heads",
    "tests/outrider/engine/models/test_transformer.py",
    "tests/outrider/engine/models/test_fused.py",
    "tests/outrider/engine/sampling",
    "tests/target_service/drafting/test_kangaroo.py",
    "tests/models/test_heads.py",
)


@dataclass(frozen=True)
class Instructions:
    """Flags of a processor, and variables that keep libraries to it.

    MKL obeys the first variable on Intel's processors alone, the second on all.
    """

    flags: frozenset[str]
    variables: Mapping[str, str]


ROWS = {
    "without vectors of ours": Instructions(
        frozenset(),
        {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "MKL_CBWR": "COMPATIBLE",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
        },
    ),
    "AVX2": Instructions(
        V3_FLAGS, {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    ),
    "AVX-512": Instructions(
        V4_FLAGS,
        {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    ),
}


# Of which any makes a processor compute with more than AVX2.
BEYOND = ("avx512", "avx_vnni", "amx")


def say(line: str) -> None:
    """Writes a line before those of the tests that follow."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Runs every row that this processor can; the exit code is 1 when one of them fails."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    failed = []
    for name, row in ROWS.items():
        if not row.flags <= flags:
            say(f"NOT RUN: {name}, which this processor has not: {', '.join(sorted(row.flags - flags))}")
            continue
        if row.flags == V3_FLAGS and not any(flag.startswith(BEYOND) for flag in flags):
            say(f"NOT RUN: {name}, which is all that this processor has, and so what `make test` computes with.")
            continue
        say(f"As a processor computes with {name}:")
        with tempfile.TemporaryDirectory() as folder:
            cpu_info = Path(folder, "cpuinfo")
            cpu_info.write_text(f"flags : {' '.join(row.flags)}\n")
            environment = os.environ | row.variables | {"OUTRIDER_TESTS_CPU_INFO": str(cpu_info)}
            command = [sys.executable, "-m", "pytest", "-q", "-m", "not grid", *sys.argv[1:], *SUITES]
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(name)
    if failed:
        say(f"FAILED with {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
