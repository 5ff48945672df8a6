"""Names what a report was measured on and with. Measures nothing."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
REPOSITORY = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("outrider", "torch", "numpy", "grpcio", "protobuf")


def describe() -> str:
    """Processor and number of CPUs, as far as the system tells."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def versions() -> dict[str, str]:
    """Versions of the interpreter, of the system and of what computes and carries."""
    return {"python": platform.python_version(), "system": platform.platform(), **_distributions()}


def revision() -> str | None:
    """The commit of the working tree, with "+" when files of it have changed; None where git knows nothing of it."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def command() -> list[str]:
    """This process's command line."""
    return list(sys.orig_argv)


def _distributions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_lines() -> list[str]:
    return CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
