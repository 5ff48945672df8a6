"""Section `steps`: what a whole forward takes, with the draw after it, and where its time goes."""

import cProfile
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.subjects import KV_ROOM, Variant, cached_session, chain_of, load_shaped, tree_of, variants
from bench.gpu.timing import median_ms, synchronize
from outrider.cli.bench.common import spec_of
from outrider.engine.batching import Feed, build_batch
from outrider.engine.cache import BLOCK_SIZE
from outrider.engine.models.decoder import ChainDraws, ChainingDecoder
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.engine.sampling.draw import DrawInput, Drawn, draw_each
from outrider.model_service.row_costs import make_chain

PROFILED_KERNELS, PROFILED_FUNCTIONS, WATCHED_STEPS = 14, 16, 20
# Where nothing else is said: a chain of so many rows is profiled; trees of many sessions have so many.
PROFILED_ROWS, PROPOSED_ROWS, MANY_SESSIONS = 6, 31, 64
CHAIN_STEPS = 5
# Of a request that a step belongs to.
ROOM = 1024


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Every model in every variant, the fastest first: so a deadline cuts what is least asked."""
    for model, variant in product(sizes.shapes, reversed(variants(device))):
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
    launches_all = variant.kernels != "graphs"
    rows, lengths = sizes.step_rows, sizes.step_lengths
    if launches_all:
        rows, lengths = sizes.eager_rows, lengths[:1]
    for length in lengths:
        _grow(recorder, sizes, runner, rows, f"step/{model}/length={length}", variant.name)
        if length == lengths[0]:
            with recorder.case(f"prompt/{name}"):
                median, _ = median_ms(device, partial(_read, runner, sizes.prompt_len), 3, warm_ups=1)
                rate = sizes.prompt_len / median * 1e3
                recorder.add(f"prompt/length={sizes.prompt_len}/{name}", rate, "tok/s", ms=median)
            with recorder.case(f"chain/{name}"):
                _chain(recorder, sizes, runner, name)
            with recorder.case(f"host/{name}"):
                _host(recorder, sizes, runner, name)
            with recorder.case(f"functions/{name}"):
                _functions(recorder, sizes, runner, name)
            with recorder.case(f"profile/{name}"):
                _profile(recorder, sizes, runner, name)


def _grow(
    recorder: Recorder, sizes: Sizes, runner: ModelRunner, rows_tried: Sequence[int], what: str, name: str
) -> None:
    """Steps of more and more rows: of one session as a chain and as a tree, and of as many sessions."""
    length = int(what.rsplit("=", 1)[1])
    session = cached_session(runner, length)
    for rows in rows_tried:
        forms = {"chain": chain_of(rows - 1)} | ({"tree": tree_of(rows - 1)} if rows > 2 else {})
        for form, tree in forms.items():
            _step(recorder, sizes, runner, [Feed(session, tree)], f"{what}/{form}/rows={rows}/{name}")
    session.free()
    for count in rows_tried[1:]:
        if count * (length + KV_ROOM + BLOCK_SIZE) <= runner.pool.num_blocks * BLOCK_SIZE:
            sessions = [cached_session(runner, length) for _ in range(count)]
            feeds = [Feed(session) for session in sessions]
            _step(recorder, sizes, runner, feeds, f"{what}/sessions/rows={count}/{name}")
            for session in sessions:
                session.free()


def _step(recorder: Recorder, sizes: Sizes, runner: ModelRunner, feeds: list[Feed], what: str) -> None:
    with recorder.case(what):
        median, least = median_ms(runner.device, lambda: _forward_and_draw(runner, feeds), sizes.repeats)
        recorder.add(what, median, "ms", least=least)


def _read(runner: ModelRunner, length: int) -> None:
    """A prompt that is in no cache, alone."""
    session = runner.open([1 + index % 200 for index in range(length)], length)
    while session.cached_len < length:
        runner.forward([Feed(session)])
    session.free()


def _forward_and_draw(runner: ModelRunner, feeds: list[Feed]) -> list[Drawn]:
    result = runner.forward(feeds)
    runner.finish()
    return _drawn(runner, feeds, result)


def _chain(recorder: Recorder, sizes: Sizes, runner: ModelRunner, name: str) -> None:
    """Steps of a chain in one call, for one session and for many, beside as many single steps with their draws."""
    if not isinstance(runner.model, ChainingDecoder):
        return
    device = runner.device
    for count in (1, min(MANY_SESSIONS, max(sizes.step_rows))):
        sessions = [cached_session(runner, sizes.step_lengths[0]) for _ in range(count)]
        keys = torch.arange(CHAIN_STEPS * count, device=device).view(CHAIN_STEPS, count)
        temperatures = torch.full((count,), 0.7, dtype=torch.float64, device=device)
        draws = ChainDraws(temperatures, keys, runner.vocabulary_size)
        num_made = len(make_chain(runner, sessions, draws))
        chain_ms, _ = median_ms(device, partial(make_chain, runner, sessions, draws), sizes.repeats)
        step_ms, _ = median_ms(
            device, partial(_forward_and_draw, runner, [Feed(session) for session in sessions]), sizes.repeats
        )
        what = f"sessions={count}/steps={CHAIN_STEPS}/{name}"
        recorder.add(f"chain/{what}", chain_ms, "ms", num_steps=num_made)
        recorder.add(f"chain by single steps/{what}", chain_ms / (CHAIN_STEPS * step_ms), step_ms=step_ms)
        for session in sessions:
            session.free()


def _host(recorder: Recorder, sizes: Sizes, runner: ModelRunner, name: str) -> None:
    """Microseconds of the host: making the plan, the whole forward until it returns, and waiting for the draw."""
    length = sizes.step_lengths[0]
    for count, rows in ((1, 1), (1, PROFILED_ROWS), (min(MANY_SESSIONS, max(sizes.step_rows)), 1)):
        sessions = [cached_session(runner, length) for _ in range(count)]
        feeds = [Feed(session, chain_of(rows - 1)) for session in sessions]
        grants = [feed.num_rows for feed in feeds]
        result = runner.forward(feeds)
        parts: dict[str, Callable[[], object]] = {
            "build_batch": partial(build_batch, feeds, grants, runner.device, runner.model.tiles),
            "forward returns": partial(runner.forward, feeds),
            "forward is done": partial(_done, runner, feeds),
            "draw to ids": partial(_drawn, runner, feeds, result),
        }
        what = f"sessions={count}/rows={rows}/{name}"
        times_us = {part: _record(recorder, sizes, runner, f"host/{part}/{what}", call) for part, call in parts.items()}
        # Of a forward that an idle device is given; a graph works for longer than its replay takes to return.
        recorder.add(f"host/share/{what}", times_us["forward returns"] / times_us["forward is done"])
        if count > 1:
            # More rows than a forward has: what matters is how long the others would wait for their plan.
            feeds = [Feed(session, tree_of(PROPOSED_ROWS)) for session in sessions]
            build = partial(build_batch, feeds, [feed.num_rows for feed in feeds], runner.device, runner.model.tiles)
            what = f"host/build_batch/sessions={count}/trees of {PROPOSED_ROWS} rows/{name}"
            _record(recorder, sizes, runner, what, build)
        for session in sessions:
            session.free()


def _record(recorder: Recorder, sizes: Sizes, runner: ModelRunner, what: str, call: Callable[[], object]) -> float:
    """Microseconds until a call returns, beginning with an idle device, which it returns too."""
    times = []
    for _ in range(2 + sizes.repeats):
        synchronize(runner.device)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    median = statistics.median(times[2:])
    recorder.add(what, median, "us", least=min(times[2:]))
    return median


def _done(runner: ModelRunner, feeds: list[Feed]) -> None:
    runner.forward(feeds)
    synchronize(runner.device)


def _drawn(runner: ModelRunner, feeds: list[Feed], result: ForwardResult) -> list[Drawn]:
    """What the services draw after every row, at one temperature."""
    inputs = [DrawInput(feed, spec_of(feed.session.token_ids, 7, 0.7, ROOM)) for feed in feeds]
    return draw_each(runner, result.logits, inputs, [rows or range(0) for rows in result.ranges])


def _functions(recorder: Recorder, sizes: Sizes, runner: ModelRunner, name: str) -> None:
    """Functions of the host by their own time in a step of a chain; each call costs more than it does unwatched."""
    session = cached_session(runner, sizes.step_lengths[0])
    feeds = [Feed(session, chain_of(PROFILED_ROWS - 1))]
    profile = cProfile.Profile()
    with profile:
        for _ in range(WATCHED_STEPS):
            _forward_and_draw(runner, feeds)
    session.free()
    ranked = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)
    for place, entry in enumerate(ranked[:PROFILED_FUNCTIONS], start=1):
        code, own_us = entry.code, entry.inlinetime / WATCHED_STEPS * 1e6
        where = code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_qualname}"
        calls = entry.callcount / WATCHED_STEPS
        recorder.add(f"functions/{place:02}/{name}", own_us, "us", function=where, calls=calls)


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
