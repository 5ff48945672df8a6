"""What the compiler makes of the kernels for cards that are not here: whether it fits, and by which instructions."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.kernels import KernelOps

from outrider.engine.ops.triton_ops import TritonOps, stages_that_fit

ROOT = Path(__file__).resolve().parents[5]
# Compute capabilities: A100, 30 and 40 series with L4, H100 and H200, B200, 50 series; and KB that a program may have.
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Bytes that do not fit into registers, of the largest tiles; products of float32 are made of single multiplications.
STACK = {"linear_units": 16, "sum_shared_chunks": 96}
STEPS = {"linear_units", "sum_shared_chunks", "sum_own_chunks"}
MATRIX = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """Every signature for a capability; in a process whose kernels are not the interpreter's."""
    folder = str(tmp_path_factory.mktemp("triton"))

    @cache
    def found(capability: int) -> list[dict[str, Any]]:
        paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-m", "support.devices.ahead", str(capability)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
        assert ended.returncode == 0, ended.stderr
        return [json.loads(line) for line in ended.stdout.splitlines()]

    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KB)
def test_every_kernel_fits_a_card(compiled: Callable[[int], list[dict[str, Any]]], capability: int) -> None:
    """Of every model's shape, in no more shared memory than there is, and by instructions that round as we say."""
    signatures = compiled(capability)
    kernels = {each["kernel"] for each in signatures}
    assert {*STEPS, "embed", "add_and_norm", "split_heads", "store_rows", "multiply_silu", "settle"} <= kernels
    for each in signatures:
        assert each["shared"] <= SHARED_KB[capability] << 10, each
        assert each["stack"] <= (256 if each.get("WIDE") else STACK.get(each["kernel"], 0)), each
        assert not {"tf32", "fma.rn.f64", "div.full"} & set(each["has"]), each
        if each["kernel"] in STEPS:
            # 16 bytes at a time.
            assert {"cp.async.cg", "ld.global.v4"} & set(each["has"]), each
        if each["kernel"] == "linear_units" and not each["WIDE"]:
            assert MATRIX[capability] in each["has"], each


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
