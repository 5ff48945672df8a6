"""What loading a model takes: seconds of CPU a GB of its files, and memory beside its weights."""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.gguf.start import memory_of, warm
from outrider.cli.bench.common import markdown, spread
from outrider.cli.running import note
from outrider.engine.models.checkpoints import FolderCheckpoint, find_checkpoint
from outrider.engine.models.weights import weight_files
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest

# So few that the cache is no part of the memory that counts.
KV_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Loaded:
    """Seconds of one loading, bytes of the weights, and what the process grew by at most."""

    cpu_s: float
    wall_s: float
    weight_bytes: int
    grown_bytes: int


def files_of(model: str) -> list[Path]:
    """The files that hold the weights of a folder, a hub id or a GGUF file. Raises InvalidRequest and ModelRefused."""
    found = find_checkpoint(model)
    if not isinstance(found, FolderCheckpoint) or not found.folder.exists():
        raise InvalidRequest("--model", model, "a folder or a GGUF file of a family of our own")
    return weight_files(found.folder) if found.folder.is_dir() else [found.folder]


def load_once(model: str, dtype: str, threads: int) -> Loaded:
    """In a process that has loaded nothing yet."""
    checkpoint, own = find_checkpoint(model), multiprocessing.current_process().pid
    assert own is not None
    before = memory_of(own)[0]
    cpu_s, began_s = time.process_time(), time.perf_counter()
    runner = ModelRunner.load(checkpoint, dtype=dtype, num_threads=threads, kv_tokens=KV_TOKENS)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    weight_bytes = sum(weight.nbytes for weight in {id(each): each for each in runner.model.weights}.values())
    embedding = runner.model.embedding
    if all(embedding is not each for each in runner.model.weights):
        weight_bytes += embedding.nbytes
    return Loaded(cpu_s, wall_s, weight_bytes, memory_of(own)[1] - before)


def measure(model: str, dtypes: Sequence[str], threads: int, turns: int) -> dict[str, list[Loaded]]:
    """Loads in turns, each in a process of its own. Raises ModelRefused and InvalidRequest."""
    found: dict[str, list[Loaded]] = {dtype: [] for dtype in dtypes}
    for turn in range(turns):
        for dtype in dtypes:
            note(f"{model} as {dtype}, turn {turn + 1} of {turns}")
            for file in files_of(model):
                warm(file)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found[dtype].append(pool.submit(load_once, model, dtype, threads).result())
    return found


def render(model: str, results: dict[str, list[Loaded]]) -> str:
    """A table with a row for each type."""
    gigabytes = sum(file.stat().st_size for file in files_of(model)) / 1e9
    rows = [
        [
            dtype,
            f"{gigabytes:.2f}",
            spread(each.cpu_s / gigabytes for each in found).show(".2f"),
            spread(each.wall_s for each in found).show(".2f"),
            f"{found[0].weight_bytes / 1e6:.0f}",
            spread((each.grown_bytes - each.weight_bytes) / 1e6 for each in found).show(".0f"),
        ]
        for dtype, found in results.items()
    ]
    head = ["weights", "GB of files", "CPU s a GB", "wall s", "weights, MB", "peak - weights, MB"]
    words = f"From files that were read before; a cache of {KV_TOKENS} tokens. Medians with quartiles."
    return f"{markdown(head, rows)}\n\n{words}"
