"""Section `compile`: every kernel once in every shape that is measured, so that no section waits for a compiler."""

import time
from functools import partial

import torch

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes, matrices
from bench.gpu.subjects import (
    TILES,
    LayerCache,
    available_ops,
    cached_session,
    chain_of,
    load_shaped,
    random_weights,
    tree_of,
    variants,
)
from bench.gpu.timing import Launch, synchronize
from outrider.engine.batching import Feed
from outrider.engine.ops import Ops


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Records the seconds of the first call of each, which are the compiler's where there is one."""
    found = available_ops(device)
    recorder.add("kinds of operations", ", ".join(found))
    for name, ops in found.items():
        with recorder.case(f"signatures/{name}"):
            for what, launch in _signatures(sizes, device, ops).items():
                with recorder.case(f"{what}/{name}"):
                    start = time.perf_counter()
                    launch()
                    synchronize(device)
                    recorder.add(f"{what}/{name}", time.perf_counter() - start, "s")
    for model in sizes.shapes:
        for variant in variants(device):
            with recorder.case(f"model/{model}/{variant.name}"):
                runner = load_shaped(model, sizes, device, variant, num_layers=1)
                for rows in sizes.step_rows:
                    session = cached_session(runner, sizes.step_lengths[0])
                    start = time.perf_counter()
                    runner.forward([Feed(session, chain_of(rows - 1))])
                    synchronize(device)
                    recorder.add(f"model/{model}/rows={rows}/{variant.name}", time.perf_counter() - start, "s")
                    session.free()


def _signatures(sizes: Sizes, device: torch.device, ops: Ops) -> dict[str, Launch]:
    launches: dict[str, Launch] = {}
    rows_tried = sorted({*sizes.linear_rows, *sizes.places})
    for model, shape in sizes.shapes.items():
        for matrix, size in matrices(shape, sizes.vocab_size).items():
            weight = ops.stack(list(random_weights(size, device, 1)))
            for rows in rows_tried:
                x = torch.randn(rows, size[1], device=device)
                launches[f"linear/{model}/{matrix}/rows={rows}"] = partial(ops.linear, x, weight)
        layer = LayerCache(shape, 8192, device)
        for rows in (1, 6, 32):
            tree = chain_of(rows - 1) if rows < 32 else tree_of(rows - 1)
            for tiles in ((), *((each,) for each in TILES)):
                plan = layer.plan([layer.feed(300, tree)], tiles)
                attend = partial(layer.attend, ops, layer.queries(plan.num_rows), plan)
                launches[f"attention/{model}/rows={rows}/shared by {tiles}"] = attend
    for rows in sizes.choose_rows:
        logits = torch.randn(rows, sizes.vocab_size, device=device)
        temperatures = torch.full((rows,), 0.7, dtype=torch.float64, device=device)
        keys = torch.arange(rows, device=device)
        launches[f"choose/rows={rows}"] = partial(ops.choose, logits, temperatures, keys, sizes.vocab_size)
    return launches
