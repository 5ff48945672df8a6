"""The GPU benchmark: that it runs from end to end, what its report says, and what has to be carried for it."""

import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from bench.gpu.plan import SECTIONS
from bench.gpu.records import RECORDS, Recorder, measured, read_records
from bench.gpu.report import read_expectations, write_report
from bench.gpu.wheels import CARRIED, PRESENT, pinned

ROOT = Path(__file__).resolve().parents[2]
# Everything that runs on the machine: the benchmark itself, what its tests import, and the processes of a stack.
ENTRIES = (
    "bench.gpu.__main__",
    "bench.gpu.child",
    "support.services.stepped_target",
    "support.heads.heads",
    "support.models.tiny_models",
    "outrider.cli.app",
    "outrider.cli.up",
    "outrider.cli.bench.command",
    "outrider.engine.models.gguf",
    "target_service.__main__",
    "draft_service.__main__",
    "gateway.server",
    "gateway.rest.app",
)
CLOSURE = """
import importlib, json, os, sys
from importlib.metadata import distributions
for name in sys.argv[1:]:
    importlib.import_module(name)
owners = {
    os.path.realpath(each.locate_file(file)): each.metadata["Name"]
    for each in distributions() for file in each.files or () if file.suffix in {".py", ".so"}
}
files = {os.path.realpath(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
print(json.dumps(sorted({owners[file] for file in files if file in owners})))
"""
# A module that Python itself imports first in every process.
HIDING = """
import sys

class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(name.partition(".")[0] + " is not there", name=name)

sys.meta_path.insert(0, Hiding())
"""
# Plugins that are installed here name themselves, and are not all there.
PLUGINS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_asyncio.plugin,pytest_timeout,xdist.plugin",
}
# Packages that import these here do without them there, in the versions that the machine has.
OPTIONAL = {"grpcio-tools", "greenlet", "sniffio", "zstandard", "httpx2", "httpcore2", "truststore"}


@pytest.mark.slow
def test_wheels_and_image_have_all_that_is_imported() -> None:
    """By the modules that are loaded when everything is imported which runs there."""
    command = [sys.executable, "-c", CLOSURE, *ENTRIES]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'models'}"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=path).stdout
    imported = {canonicalize_name(name) for name in json.loads(printed)} - {"outrider"}
    assert {"pydantic", "grpcio", "torch"} <= imported
    assert imported <= {*CARRIED, *PRESENT.split(), *OPTIONAL}


def test_wheels_have_the_versions_of_the_constraints() -> None:
    """Each of them is pinned; none of the large ones is among them."""
    assert len(pinned()) == len(CARRIED)
    assert all("==" in each for each in pinned())
    assert not {"torch", "triton", "numpy"} & set(CARRIED)


def test_every_number_stands_beside_its_prediction_and_gate(tmp_path: Path) -> None:
    """Shares are those of an earlier number; a failure is shown with its last line, and passes nothing."""
    expected = [
        {"pattern": "a/*/eager", "predicted": 0.5, "at_least": 0.4, "share_of": "a/read"},
        {"pattern": "a/same*", "predicted": True, "equals": True},
        {"pattern": "a/us*", "at_most": 3.0},
    ]
    (tmp_path / "expected.json").write_text(json.dumps({"expected": expected}))
    recorder = Recorder(tmp_path, "a")
    recorder.add("read", 1000.0, "GB/s")
    recorder.add("qkv/eager", 450.0, "GB/s", us=7.0)
    recorder.add("down/eager", 390.0, "GB/s")
    recorder.add("same bits", False)
    recorder.add("us", 2.5, "us")
    with recorder.case("us too"):
        raise RuntimeError("no memory")
    table = write_report(tmp_path, tmp_path / "expected.json")
    report = (tmp_path / "report.md").read_text()
    assert "| qkv/eager | 450 GB/s | 0.5 of a/read | ≥ 0.4 of a/read | ok | share 0.45; us 7 |" in report
    assert "MISSED a/down/eager: 390 GB/s, wanted ≥ 0.4 of a/read" in table
    assert "MISSED a/same bits: no, wanted = yes" in table
    assert "FAILED a/us too: RuntimeError: no memory" in table
    assert [line.split() for line in table.splitlines() if line.startswith("a ")] == [["a", "6", "1", "2/4"]]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """What was killed while it wrote has lost that line only."""
    Recorder(tmp_path, "a").add("read", 3.0)
    with (tmp_path / RECORDS).open("a") as file:
        file.write('{"section": "a", "wh')
    assert [record.key for record in read_records(tmp_path)] == ["a/read"]
    assert measured(tmp_path, "a/read") == 3.0
    assert measured(tmp_path, "a/copy") is None


def test_a_device_that_fails_ends_its_section(tmp_path: Path) -> None:
    """After a CUDA error nothing in that process can be believed."""
    with pytest.raises(SystemExit), Recorder(tmp_path, "a").case("x"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert len(read_records(tmp_path)) == 1


def dry_run(folder: Path, *options: str, missing: str = "") -> subprocess.CompletedProcess[str]:
    """The benchmark where no package can be imported that its machine has not, nor one that is missing."""
    there = {*CARRIED, *PRESENT.split(), *OPTIONAL, "outrider"} - {missing}
    modules = packages_distributions().items()
    hidden = {name for name, owners in modules if not there & {canonicalize_name(owner) for owner in owners}}
    (folder / "sitecustomize.py").write_text(HIDING.format(hidden=hidden))
    command = [ROOT / "bench" / "gpu.sh", "--dry", "--out", folder, *options]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(folder), **PLUGINS}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["typer", "structlog"])
def test_a_package_that_is_not_carried_is_missed(tmp_path: Path, missing: str) -> None:
    """Planted: the benchmark itself needs one of them, and its first section the other."""
    ended = dry_run(tmp_path, "--sections", "card", missing=missing)
    errors = [each.error for each in read_records(tmp_path) if each.error]
    assert f"{missing} is not there" in ended.stderr + "".join(errors)


@pytest.mark.slow
def test_a_dry_run_answers_everything(tmp_path: Path) -> None:
    """On the CPU, with small shapes and its machine's packages: no section fails, and each writes records."""
    ended = dry_run(tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert ended.returncode == 0, ended.stderr
    records = read_records(tmp_path)
    assert [each for each in records if each.error] == [], log
    assert {each.section for each in records} == {each.name for each in SECTIONS}
    values = {each.key: each.value for each in records}
    assert values["tests/passed"] > 0
    differing = [value for key, value in values.items() if "texts that differ" in key]
    assert differing == [0] * len(differing) != []


def test_expectations_can_be_read() -> None:
    """Each has a reason, and something that is expected."""
    expectations = read_expectations(ROOT / "bench" / "gpu_expected.json")
    assert all(each.why and (each.predicted is not None or each.equals is not None) for each in expectations)
    patterns = [each.pattern for each in expectations]
    assert len(set(patterns)) == len(patterns)
