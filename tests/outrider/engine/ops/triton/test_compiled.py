"""What the compiler makes of the kernels for cards that are not here: whether it fits, and by which instructions."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.kernels import KernelOps

from outrider.engine.ops.triton_ops import TritonOps, stages_that_fit

pytestmark = pytest.mark.early

ROOT = Path(__file__).resolve().parents[5]
# Compute capabilities: A100, 30 and 40 series with L4, H100 and H200, B200, 50 series; and KB that a program may have.
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Bytes that do not fit into registers, of the largest tiles; products of float32 are made of single multiplications.
STACK = {"linear_units": 16, "sum_shared_chunks": 96}
SLIPS = [
    ("triton_ops.py", '"num_stages": 3', '"num_stages": 8'),
    ("triton_ops.py", '{"enable_fp_fusion": False}', '{"enable_fp_fusion": True}'),
    ("triton/linear.py", 'input_precision="ieee"', 'input_precision="tf32"'),
    ("triton/attention.py", "tl.div_rn(joined, total)", "joined / total"),
]
STEPS = {"linear_units", "sum_shared_chunks", "sum_own_chunks"}
MATRIX = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


def compiled(capability: int, folder: Path, code: Path, *models: str) -> list[dict[str, Any]]:
    """Signatures for a capability, in a process whose kernels are not the interpreter's; our code lies there."""
    paths = f"{code}{os.pathsep}{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "support.devices.ahead", str(capability), *models]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def faults(signatures: Sequence[Mapping[str, Any]], capability: int) -> Iterator[tuple[str, str]]:
    """Kernels and what is wrong with them: too much memory, or instructions that round otherwise than we say."""
    for each in signatures:
        kernel, has = each["kernel"], set(each["has"])
        if each["shared"] > SHARED_KB[capability] << 10:
            yield kernel, "shared"
        if each["stack"] > (256 if each.get("WIDE") else STACK.get(kernel, 0)):
            yield kernel, "stack"
        for odd in has & {"tf32", "fma.rn.f64", "div.full"}:
            yield kernel, odd
        # 16 bytes at a time.
        if kernel in STEPS and not has & {"cp.async.cg", "ld.global.v4"}:
            yield kernel, "loads"
        if kernel == "linear_units" and not each["WIDE"] and MATRIX[capability] not in has:
            yield kernel, MATRIX[capability]


@pytest.mark.parametrize(
    ("capability", "models"),
    [
        pytest.param(120, ("smollm2",), marks=pytest.mark.slow),
        *(pytest.param(each, (), marks=pytest.mark.grid) for each in SHARED_KB),
    ],
)
def test_every_kernel_fits_a_card(tmp_path: Path, capability: int, models: Sequence[str]) -> None:
    """Of every model's shape; of one model where the card has the least room."""
    signatures = compiled(capability, tmp_path, ROOT, *models)
    kernels = {each["kernel"] for each in signatures}
    assert {
        *STEPS,
        "embed",
        "add_and_norm",
        "split_heads",
        "store_rows",
        "multiply_silu",
        "settle",
        "go_down",
    } <= kernels
    assert [*faults(signatures, capability)] == []


@pytest.mark.slow
def test_planted_faults_are_found(tmp_path: Path) -> None:
    """Each an easy slip, in a kernel of its own."""
    code = tmp_path / "code"
    shutil.copytree(ROOT / "outrider", code / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in SLIPS:
        path = code / "outrider" / "engine" / "ops" / name
        source = path.read_text(encoding="utf-8")
        assert old in source
        path.write_text(source.replace(old, new), encoding="utf-8")
    assert set(faults(compiled(120, tmp_path, code, "smollm2"), 120)) == {
        ("sum_shared_chunks", "shared"),
        ("sum_own_chunks", "shared"),
        ("add_noise", "fma.rn.f64"),
        ("linear_units", "tf32"),
        ("join_shared_chunks", "div.full"),
        ("join_own_chunks", "div.full"),
    }


def test_fewer_steps_are_under_way_where_a_card_has_less_room() -> None:
    """Five of 16 rows on a large card, three of 64 on a small one, and never none."""
    small, large, half = 99 << 10, 227 << 10, torch.bfloat16
    assert [stages_that_fit(5, (64, rows, 128), half, large) for rows in (16, 32, 64)] == [5, 5, 5]
    assert [stages_that_fit(5, (64, rows, 128), half, 163 << 10) for rows in (16, 32, 64)] == [5, 5, 5]
    assert [stages_that_fit(5, (64, rows, 128), half, small) for rows in (16, 32, 64)] == [4, 4, 3]
    assert stages_that_fit(3, (128, 128, 64), half, small) == 3
    assert stages_that_fit(5, (32, 16, 32), torch.float32, small) == 5
    assert stages_that_fit(5, (64, 64, 128), half, 1024) == 1


def test_a_card_says_how_much_room_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no bound."""
    asked = []

    class Properties:
        shared_memory_per_block_optin = 99 << 10

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or Properties)
    assert KernelOps().shared_bytes > 227 << 10
    ops = TritonOps(torch.device("cuda", 1))
    ops.is_interpreted = False
    assert ops.shared_bytes == 99 << 10
    assert asked == [torch.device("cuda", 1)]
