"""The hash-locked requirements of the images."""

import re
import subprocess
import sys
from importlib.metadata import requires

import pytest
from deploy.locks import FOR_GPUS, ROOT, pins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@pytest.mark.parametrize("image", ["gateway", "engine", "models"])
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
    text = re.sub("^#.*\n", "", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all("--hash=sha256:" in entry for entry in entries)
    assert len(entries) == len(locked)
    assert "torch" not in locked


def test_what_torch_needs_is_locked() -> None:
    """Whatever the build of it that is installed here asks for, but NVIDIA's packages."""
    needed = {Requirement(line) for line in requires("torch") or ()}
    wanted = {
        canonicalize_name(each.name) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    locked = pins(ROOT / "deploy" / "engine.lock")
    assert {name for name in wanted if not name.startswith(FOR_GPUS)} <= locked.keys()


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0", "3.14.0"])
def test_a_lock_holds_for_each_python(python: str) -> None:
    """What is locked asks for nothing that is not, whichever Python the base image has."""
    locked = pins(ROOT / "deploy" / "gateway.lock") | pins(ROOT / "deploy" / "engine.lock")
    here = {"python_version": python.rpartition(".")[0], "python_full_version": python, "extra": ""}
    missing = set()
    for name in locked.keys() - {"async-timeout"}:
        needed = [Requirement(line) for line in requires(name) or ()]
        wanted = {canonicalize_name(each.name) for each in needed if each.marker is None or each.marker.evaluate(here)}
        missing |= {(name, each) for each in wanted - locked.keys()}
    assert missing == set()
