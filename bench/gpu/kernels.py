"""Section `kernels`: what each operation takes by itself, beside the bytes that it has to move."""

from functools import partial

import torch
from torch.nn import functional

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes, matrices
from bench.gpu.subjects import LayerCache, attention_kinds, available_ops, chain_of, random_weights, tree_of
from bench.gpu.timing import Launch, Timing, time_launches
from outrider.engine.ops import Ops, Weight

CHAIN_ROWS = 6
CUBLAS = "cublas"


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Launch gaps, products, choices, small operations, and attention last, which takes the most memory."""
    ops = available_ops(device)
    with recorder.case("graph"):
        # Microseconds of a kernel that does nothing worth the name, in graphs of so many.
        number = torch.zeros(1, device=device)
        for count in sizes.graph_kernels:
            timing = time_launches(device, [partial(number.add_, 1)] * count)
            recorder.add(f"graph/kernels={count}", timing.us, "us", **_facts(timing))
    for model in sizes.shapes:
        for name, size in matrices(sizes.shapes[model], sizes.vocab_size).items():
            with recorder.case(f"linear/{model}/{name}"):
                _linear(recorder, sizes, device, f"linear/{model}/{name}", size, ops)
    for name, each in ops.items():
        with recorder.case(f"choose/{name}"):
            # Draws of all rows.
            for rows in sizes.choose_rows:
                logits = torch.randn(rows, sizes.vocab_size, device=device)
                temperatures = torch.full((rows,), 0.7, dtype=torch.float64, device=device)
                keys = torch.randint(-(2**63), 2**63 - 1, (rows,), device=device)
                launch = partial(each.choose, logits, temperatures, keys, sizes.vocab_size)
                timing = time_launches(device, [launch] * 5)
                recorder.add(f"choose/rows={rows}/{name}", timing.us, "us", **_facts(timing))
        with recorder.case(f"small/{name}"):
            _small(recorder, sizes, device, name, each)
    for length, sessions, rows in sizes.attention:
        with recorder.case(f"attention/{length}x{sessions}x{rows}"):
            _attention(recorder, sizes, device, (length, sessions, rows))


def _linear(
    recorder: Recorder, sizes: Sizes, device: torch.device, what: str, size: tuple[int, int], ops: dict[str, Ops]
) -> None:
    """Every kind beside cuBLAS alone, without the casts that our interface has around it."""
    num_bytes = 2 * size[0] * size[1]
    weights = list(random_weights(size, device, -(-sizes.rotate_bytes // num_bytes)))
    stacked: dict[str, list[Weight]] = {
        name: [each.stack([weight]) for weight in weights] for name, each in ops.items()
    }
    for rows in sizes.linear_rows:
        x = torch.randn(rows, size[1], device=device)
        half = x.bfloat16()
        launches: dict[str, list[Launch]] = {
            name: [partial(each.linear, x, weight) for weight in stacked[name]] for name, each in ops.items()
        }
        launches[CUBLAS] = [partial(functional.linear, half, weight) for weight in weights]
        moved = num_bytes + rows * 4 * sum(size)
        times_us: dict[str, float] = {}
        for name, those in launches.items():
            with recorder.case(f"{what}/rows={rows}/{name}"):
                timing = time_launches(device, those)
                times_us[name] = timing.us
                recorder.add(f"{what}/rows={rows}/{name}", moved / timing.us / 1e3, "GB/s", **_facts(timing))
        for name in ops:
            if {name, CUBLAS} <= times_us.keys():
                recorder.add(f"{what}/rows={rows}/{name} by {CUBLAS}", times_us[name] / times_us[CUBLAS], "times")


def _small(recorder: Recorder, sizes: Sizes, device: torch.device, name: str, ops: Ops) -> None:
    """Norm, silu, rotation and storing, in the shape of 8B."""
    shape = sizes.shapes["8b"]
    for rows in (1, CHAIN_ROWS):
        layer = LayerCache(shape, 4096, device)
        plan = layer.plan([layer.feed(64, chain_of(rows - 1))])
        x, gate_up = (
            torch.randn(rows, width, device=device) for width in (shape.hidden_size, 2 * shape.intermediate_size)
        )
        heads = torch.randn(rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, device=device)
        query, key, value = heads.split_with_sizes((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), 1)
        tables = torch.randn(2, 128, shape.head_dim // 2, device=device)
        places = tables[0], tables[1], layer.keys, layer.values
        launches: dict[str, Launch] = {
            "rms_norm": partial(ops.rms_norm, x, torch.ones(shape.hidden_size, device=device), 1e-5),
            "silu_multiply": partial(ops.gate_multiply, gate_up),
            "rotate_and_store": partial(ops.rotate_and_store, query, key, value, plan, *places),
        }
        for operation, launch in launches.items():
            timing = time_launches(device, [launch] * 20)
            recorder.add(f"small/{operation}/rows={rows}/{name}", timing.us, "us", **_facts(timing))


def _attention(recorder: Recorder, sizes: Sizes, device: torch.device, case: tuple[int, int, int]) -> None:
    """Up to six rows are a chain, and more a tree. Counted are keys and values of every session, once."""
    length, sessions, rows = case
    shape = sizes.shapes["8b"]
    layer = LayerCache(shape, sessions * (length + rows + 16), device)
    tree = chain_of(rows - 1) if rows <= CHAIN_ROWS else tree_of(rows - 1)
    feeds = [layer.feed(length, tree) for _ in range(sessions)]
    query = layer.queries(sessions * rows)
    num_bytes = 4 * sessions * length * shape.num_kv_heads * shape.head_dim
    what = f"attention/length={length}/sessions={sessions}/rows={rows}"
    for name, (ops, tiles) in attention_kinds(device).items():
        # In plain torch every row's keys are copied, and ours are read once for each row without shared work.
        if not tiles and len(query) * length > sizes.eager_scores:
            continue
        with recorder.case(f"{what}/{name}"):
            plan = layer.plan(feeds, tiles)
            timing = time_launches(device, [partial(layer.attend, ops, query, plan)])
            recorder.add(f"{what}/{name}", num_bytes / timing.us / 1e3, "GB/s", **_facts(timing))


def _facts(timing: Timing) -> dict[str, object]:
    return {"us": timing.us, "spread": timing.spread, "how": timing.how}
