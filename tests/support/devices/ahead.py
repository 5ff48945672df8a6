"""`python -m support.devices.ahead 90 [MODEL]`: compiles kernels for a card that is not there and prints what came out.

A program of its own, because kernels are defined either for the interpreter or for the compiler. It launches everything
that models of these shapes launch, on tensors that hold nothing, and compiles where a card would be asked to run.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from outrider.engine.batching import RowPlan
from outrider.engine.models.graphed import TILES, WIDE_TILES
from outrider.engine.ops.triton import layers
from outrider.engine.ops.triton_ops import OPTIONS, TritonOps, norm_options

META = torch.device("meta")
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
COMPILER = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
# What a card lets one program have, in KB, and whether kernels of a chain overlap there.
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
MNEMONICS = (
    "wgmma.mma_async",
    "mma.sync",
    "tcgen05.mma",
    "cp.async.cg",
    "ld.global.v4",
    "tf32",
    "fma.rn.f64",
    "div.full",
)
# Hidden size, MLP, heads, groups, head dimension, norms of heads: Llama 3.1 8B, Llama 3.2 1B, Qwen 3 4B, SmolLM2 135M.
MODELS = {
    "8b": (4096, 14336, 32, 8, 128, False),
    "1b": (2048, 8192, 32, 8, 64, False),
    "qwen3": (2560, 9728, 32, 8, 128, True),
    "smollm2": (576, 1536, 9, 3, 64, False),
}


class Compiler:
    """Compiles each signature once for a card."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.found: dict[str, dict[str, Any]] = {}

    def run(self, kernel: JITFunction[Any], *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in COMPILER if name in named}
        values = dict(zip((each.name for each in kernel.params), args, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
                signature[parameter.name], constants[place,] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[place,] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[place,] = [["tt.divisibility", 16]]
        key = f"{kernel.__name__} {signature} {constants} {attributes} {options}"
        if key not in self.found:
            source = ASTSource(kernel, signature, constants, attributes)
            made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
            chosen = {name: value for name, value in values.items() if name.isupper()}
            about = {"kernel": kernel.__name__, "types": " ".join(signature.values()), **chosen, **options}
            self.found[key] = (
                about
                | usage(made.asm["cubin"])
                | {
                    "shared": made.metadata.shared,
                    "has": [each for each in MNEMONICS if each in made.asm["ptx"]],
                }
            )


def usage(code: bytes) -> dict[str, int]:
    """Registers and stack of compiled code."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        told = subprocess.run([program, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return {"registers": int(found[1]), "stack": int(found[2])}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def launch(ops: TritonOps, dtype: torch.dtype, shape: tuple[int, int, int, int, int, bool], num_rows: int) -> None:
    """All kernels of a forward of so many rows, by few kernels and by operations."""
    size, mlp, heads, groups, head_dim, has_norm = shape
    work, norm, rows = empty(100, dtype=torch.int32), empty(size), (num_rows,)
    x, hidden = empty(num_rows, size), empty(num_rows, size, dtype=dtype)
    query, attended = empty(num_rows, heads, head_dim, dtype=dtype), empty(num_rows, heads * head_dim, dtype=dtype)
    cache = empty(64, groups, head_dim, dtype=dtype)
    layers.embed[rows](hidden, work, norm, x, hidden, size, 1e-5, **norm_options(size), **ops.overlap)
    parts = ops.parts_of_product(hidden, empty((heads + 2 * groups) * head_dim, size, dtype=dtype))
    flags = {
        "NUM_PARTS": len(parts),
        "HAS_BIAS": False,
        "HAS_NORM": has_norm,
        "HEAD_DIM": head_dim,
        "TURNING": head_dim,
    }
    blocks = {"BLOCK": triton.next_power_of_2(head_dim), "HALF": triton.next_power_of_2(head_dim // 2)}
    tables = norm, norm, empty(9, head_dim // 2), empty(9, head_dim // 2)
    numbers = num_rows, heads, groups, head_dim, 1e-5
    layers.split_heads[num_rows, heads + 2 * groups](
        parts, parts, *tables, work, query, cache, cache, *numbers, **flags, **blocks, num_warps=1, **ops.options
    )
    room = ops.room_for_chunks(num_rows, heads, head_dim)
    tiles = WIDE_TILES if dtype is torch.float32 else TILES
    for tile in {max(1, tile // triton.next_power_of_2(heads // groups)) for tile in tiles}:
        ops.attend_together(query, work, tile, cache, cache, 0.1, room, attended)
    for inputs, width in ((attended, heads * head_dim), (empty(num_rows, mlp, dtype=dtype), mlp)):
        parts = ops.parts_of_product(inputs, empty(size, width, dtype=dtype))
        flags = {"NUM_PARTS": len(parts), "HAS_BIAS": False}
        numbers = num_rows, size, 1e-5
        layers.add_and_norm[rows](x, parts, parts, norm, hidden, *numbers, **flags, **norm_options(size), **ops.overlap)
    parts = ops.parts_of_product(hidden, empty(2 * mlp, size, dtype=dtype))
    flags = {"NUM_PARTS": len(parts), "HAS_BIAS": False, "BLOCK": 1024}
    layers.multiply_silu[num_rows, 9](
        parts, parts, empty(num_rows, mlp, dtype=dtype), num_rows, mlp, **flags, **ops.options
    )
    layers.go_down[rows](work, empty(num_rows, dtype=torch.int64), 1, **OPTIONS)
    layers.store_rows[num_rows, 4](x, work, hidden, size, 0, size, BLOCK=1024, **ops.options)
    one_by_one(ops, x, query.float(), cache, mlp)


def one_by_one(ops: TritonOps, x: Tensor, query: Tensor, cache: Tensor, mlp: int) -> None:
    """The operations that a forward in few kernels has not."""
    num_rows, longs, work = len(x), empty(len(x), dtype=torch.int64), empty(100, dtype=torch.int32)
    key, table = empty(num_rows, *cache.shape[1:]), empty(9, cache.shape[2] // 2)
    plan = RowPlan(longs, longs, longs, work, longs, work[:num_rows], 300)
    ops.rotate_and_store(query, key, key, plan, table, table, cache, cache)
    ops.attention(query, plan, cache, cache, 0.1)
    ops.rms_norm(x, empty(x.shape[1]), 1e-5)
    ops.gate_multiply(empty(num_rows, 2 * mlp))
    ops.linear(x, empty(1000, x.shape[1], dtype=cache.dtype), empty(1000))


def kernels(capability: int, *models: str) -> Iterator[dict[str, Any]]:
    """All signatures for a card, of these models or of all, and what they need there."""
    compiler = Compiler(capability)

    def run(kernel: JITFunction[Any], *args: Any, **named: Any) -> None:
        compiler.run(kernel, *args, **named)

    JITFunction.run = run  # type: ignore[method-assign]
    ops = TritonOps(META)
    overlaps = capability >= 90
    ops.is_interpreted, ops.num_processors, ops.capability = False, 132, divmod(capability, 10)
    ops.overlap = {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}
    ops.shared_bytes = SHARED_KB[capability] << 10
    for name in models or MODELS:
        for num_rows in (1, 32, 64, 512) if name == "8b" else (4,):
            launch(ops, torch.bfloat16, MODELS[name], num_rows)
    launch(ops, torch.float32, MODELS[[*models, "8b"][0]], 4)
    ops.choose(empty(4, 128256), empty(4, dtype=torch.float64), empty(4, dtype=torch.int64), 128256)
    yield from compiler.found.values()


if __name__ == "__main__":
    for each in kernels(int(sys.argv[1]), *sys.argv[2:]):
        print(json.dumps({"capability": int(sys.argv[1]), **each}), flush=True)  # noqa: T201
