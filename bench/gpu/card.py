"""Section `card`: versions, the card and its clocks, and the rates that count as 100 % in all other sections."""

import platform
import shutil
import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.timing import time_launches

PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "grpcio", "protobuf", "pydantic", "pytest")
QUERIES = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu",
    "memory.total", "memory.used",
)  # fmt: skip


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Reads versions and clocks, then measures bandwidth and products, and reads the clocks again."""
    with recorder.case("versions"):
        recorder.add("versions", f"Python {platform.python_version()}", **{name: _version(name) for name in PACKAGES})
    with recorder.case("card"):
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(device)
            free, total = torch.cuda.mem_get_info(device)
            recorder.add(
                "card",
                facts.name,
                capability=f"{facts.major}.{facts.minor}",
                multiprocessors=facts.multi_processor_count,
                cuda=torch.version.cuda,
                total_gib=total / 2**30,
                l2_mib=facts.L2_cache_size / 2**20,
            )
            recorder.add("free memory", free / 2**30, "GiB")
        else:
            recorder.add("card", platform.processor() or platform.machine(), threads=torch.get_num_threads())
    _clocks(recorder, "clocks before")
    with recorder.case("bandwidth"):
        # Copies, and reads alone: a sum of as many bytes.
        source = torch.empty(sizes.memory_bytes // 4, device=device).normal_()
        target = torch.empty_like(source)
        copied = time_launches(device, [partial(target.copy_, source)] * 4, captured=False)
        recorder.add("copy", 2 * sizes.memory_bytes / copied.us / 1e3, "GB/s", spread=copied.spread)
        read = time_launches(device, [source.sum] * 4, captured=False)
        recorder.add("read", sizes.memory_bytes / read.us / 1e3, "GB/s", spread=read.spread)
        del source, target
    with recorder.case("matmul"):
        size = sizes.matmul
        a, b = (torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
        timing = time_launches(device, [lambda: a @ b] * 5, captured=False)
        recorder.add("matmul bfloat16", 2 * size**3 / timing.us / 1e6, "TFLOP/s", spread=timing.spread)
    _clocks(recorder, "clocks after")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _clocks(recorder: Recorder, what: str) -> None:
    """Reads what nvidia-smi says; changes nothing."""
    if shutil.which("nvidia-smi") is None:
        return
    with recorder.case(what):
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        values = [each.strip() for each in answer.splitlines()[0].split(",")]
        recorder.add(what, values[QUERIES.index("clocks.sm")], **dict(zip(QUERIES, values, strict=True)))
