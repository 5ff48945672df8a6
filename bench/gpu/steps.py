"""Section `steps`: what a whole forward takes, with the draw behind it, and where its time goes."""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.subjects import Variant, cached_session, chain_of, load_shaped, tree_of, variants
from bench.gpu.timing import median_ms, synchronize
from outrider.engine.batching import Feed, build_batch
from outrider.engine.noise import token_keys
from outrider.engine.runner import ModelRunner

PROFILED_KERNELS = 14
# Where nothing else is said: a chain of so many rows is profiled.
PROFILED_ROWS = 6


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Every model in every variant; short contexts before long ones, so that a deadline cuts what is least asked."""
    for model in sizes.shapes:
        for variant in variants(device):
            with recorder.case(f"{model}/{variant.name}"):
                _measure(recorder, sizes, device, model, variant)
            # Two models with their caches would not fit beside each other.
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _measure(recorder: Recorder, sizes: Sizes, device: torch.device, model: str, variant: Variant) -> None:
    started = time.perf_counter()
    runner = load_shaped(model, sizes, device, variant)
    synchronize(device)
    name = f"{model}/{variant.name}"
    weight_bytes = sum(weight.nbytes for weight in runner.model.weights if isinstance(weight, torch.Tensor))
    recorder.add(f"load/{name}", time.perf_counter() - started, "s", weight_gib=weight_bytes / 2**30)
    for length in sizes.step_lengths:
        session = cached_session(runner, length)
        for rows in sizes.step_rows:
            forms = {"chain": chain_of(rows - 1)} | ({"tree": tree_of(rows - 1)} if rows > 2 else {})
            for form, tree in forms.items():
                what = f"step/{model}/length={length}/{form}/rows={rows}/{variant.name}"
                _step(recorder, sizes, runner, [Feed(session, tree)], what)
        session.free()
        for count in sizes.step_rows[1:]:
            if count * (length + 128) > sizes.kv_tokens[model]:
                continue
            sessions = [cached_session(runner, length) for _ in range(count)]
            what = f"step/{model}/length={length}/sessions/rows={count}/{variant.name}"
            _step(recorder, sizes, runner, [Feed(session) for session in sessions], what)
            for session in sessions:
                session.free()
        if length == sizes.step_lengths[0]:
            with recorder.case(f"host/{name}"):
                _host(recorder, sizes, runner, name)
            with recorder.case(f"profile/{name}"):
                _profile(recorder, sizes, runner, name)


def _step(recorder: Recorder, sizes: Sizes, runner: ModelRunner, feeds: list[Feed], what: str) -> None:
    with recorder.case(what):
        median, least = median_ms(runner.device, lambda: _forward_and_draw(runner, feeds), sizes.repeats)
        recorder.add(what, median, "ms", least=least)


def _forward_and_draw(runner: ModelRunner, feeds: list[Feed]) -> list[int]:
    logits = runner.forward(feeds).logits
    runner.finish()
    count = logits.shape[0]
    temperatures = torch.from_numpy(np.full(count, 0.7)).to(runner.device)
    keys = torch.from_numpy(token_keys([7] * count, range(count))).to(runner.device)
    return _chosen(runner, logits, temperatures, keys)


def _host(recorder: Recorder, sizes: Sizes, runner: ModelRunner, name: str) -> None:
    """Microseconds of the host: making the plan, the whole forward until it returns, and waiting for the draw."""
    length = sizes.step_lengths[0]
    for count, rows in ((1, 1), (1, PROFILED_ROWS), (max(sizes.step_rows), 1)):
        sessions = [cached_session(runner, length) for _ in range(count)]
        feeds = [Feed(session, chain_of(rows - 1)) for session in sessions]
        grants = [feed.num_rows for feed in feeds]
        logits = runner.forward(feeds).logits
        temperatures = torch.full((logits.shape[0],), 0.7, dtype=torch.float64, device=runner.device)
        keys = torch.arange(logits.shape[0], device=runner.device)
        parts: dict[str, Callable[[], object]] = {
            "build_batch": partial(build_batch, feeds, grants, runner.device, runner.model.tile_rows),
            "forward returns": partial(runner.forward, feeds),
            "choose to ids": partial(_chosen, runner, logits, temperatures, keys),
        }
        for part, call in parts.items():
            times = [_host_us(runner.device, call) for _ in range(2 + sizes.repeats)][2:]
            what = f"host/{part}/sessions={count}/rows={rows}/{name}"
            recorder.add(what, statistics.median(times), "us", least=min(times))
        for session in sessions:
            session.free()


def _chosen(runner: ModelRunner, logits: Tensor, temperatures: Tensor, keys: Tensor) -> list[int]:
    ids: list[int] = runner.ops.choose(logits, temperatures, keys, runner.vocabulary_size).tolist()
    return ids


def _host_us(device: torch.device, call: Callable[[], object]) -> float:
    """Until the call returns, beginning with an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _profile(recorder: Recorder, sizes: Sizes, runner: ModelRunner, name: str) -> None:
    """The kernels of one step of a chain, by their time on the device; the sum is what no launch could hide."""
    session = cached_session(runner, sizes.step_lengths[0])
    feeds = [Feed(session, chain_of(PROFILED_ROWS - 1))]
    _forward_and_draw(runner, feeds)
    synchronize(runner.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if runner.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        _forward_and_draw(runner, feeds)
        synchronize(runner.device)
    session.free()
    on_device = [each for each in profiler.events() or () if "CUDA" in str(each.device_type)]
    events = on_device or list(profiler.events() or ())
    kernels: dict[str, list[float]] = {}
    for each in events:
        kernels.setdefault(each.name[:110], []).append(each.time_range.elapsed_us())
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    recorder.add(f"profile/launches/{name}", len(events), "kernels")
    recorder.add(f"profile/device time/{name}", sum(map(sum, kernels.values())) / 1e3, "ms")
    for place, (kernel, times) in enumerate(ranked[:PROFILED_KERNELS], start=1):
        recorder.add(f"profile/{place:02}/{name}", sum(times), "us", kernel=kernel, count=len(times))
