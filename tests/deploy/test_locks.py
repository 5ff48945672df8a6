"""The hash-locked requirements of the images."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def pins(path: Path) -> dict[str, str]:
    """The version of each package that a file pins."""
    return {canonicalize_name(name): version for name, version in PIN.findall(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("image", ["gateway", "engine"])
def test_a_lock_has_what_the_project_asks_for(image: str) -> None:
    """Every requirement of pyproject.toml but torch, in the version that constraints.txt pins, each with hashes."""
    lock, constraints = ROOT / "deploy" / f"{image}.lock", pins(ROOT / "constraints.txt")
    locked = pins(lock)
    command = [sys.executable, ROOT / "deploy" / "requirements.py", image]
    asked = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in asked:
        requirement = Requirement(line)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), "make lock"
    assert locked == {name: constraints[name] for name in locked}, "make lock"
    entries = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip())
    assert all("--hash=sha256:" in entry for entry in entries)
    assert len(entries) == len(locked)
    assert "torch" not in locked
