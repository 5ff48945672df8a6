"""How long the device takes for something: events around it, after a warm-up, and the median of repeats.

Small launches are captured into a graph and replayed, so that what Python needs to launch them is not measured.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]
WARM_UPS = 2
MIN_REPEATS, MAX_REPEATS = 3, 25
BUDGET_S = 0.25


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one launch."""

    us: float
    spread: float
    """The range of the middle half of the repeats, in parts of the median."""
    how: str
    """ "graph", "launches", or on a CPU "clock"."""


def time_launches(device: torch.device, launches: Sequence[Launch], *, captured: bool = True) -> Timing:
    """Times the launches one after the other, as one run that is repeated; each launch's mean share of it.

    What cannot be captured, because it waits for the device, is launched and not replayed.
    """
    for _ in range(WARM_UPS):
        _run(launches)
    if device.type != "cuda":
        return _timing([_clocked(launches) for _ in range(MIN_REPEATS)], len(launches), "clock")
    torch.cuda.synchronize(device)
    graph = capture(launches) if captured else None
    run: Launch = (lambda: _run(launches)) if graph is None else graph.replay
    run()
    first = _evented(run)
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(BUDGET_S * 1e6 / max(first, 1.0))))
    times = [_evented(run) for _ in range(repeats)]
    return _timing(times, len(launches), "launches" if graph is None else "graph")


def capture(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph | None:
    """A graph of the launches, which have been made before; None where one of them cannot be captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(launches)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _run(launches)
    except RuntimeError as error:
        print(f"not captured: {error}")
        torch.cuda.synchronize()
        return None
    return graph


def median_ms(device: torch.device, step: Launch, repeats: int, warm_ups: int = WARM_UPS) -> tuple[float, float]:
    """Milliseconds of a step by the clock, which ends with the device idle: the median and the least."""
    times = []
    for number in range(warm_ups + repeats):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        if number >= warm_ups:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), min(times)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


def _clocked(launches: Sequence[Launch]) -> float:
    start = time.perf_counter()
    _run(launches)
    return (time.perf_counter() - start) * 1e6


def _evented(run: Launch) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _timing(times: list[float], count: int, how: str) -> Timing:
    median = statistics.median(times)
    quarters = statistics.quantiles(times, n=4)
    return Timing(median / count, (quarters[2] - quarters[0]) / median, how)
