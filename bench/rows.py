"""What a forward costs by its rows: a chain or a tree of one session, or one row each of many sessions.

    python -m bench.rows [--model sized:200m] [--old DIR | --taps 1,3,5 | --against int8] [--rows 1,2,4] [--turns 12]

Prints a Markdown table in milliseconds. With --old another checkout, whose kernels are built and have the same
functions, computes the same forwards in this process, in turns, and every logit of both is compared bit by bit. Ratios
are of neighbours: below 1 this checkout is faster. With --taps the other one is this checkout without what a head would
read, so that the ratio is what keeping it costs; with --against it is this checkout with weights of another type, and
logits are not compared. The bytes of the weights over the bandwidth of this run, the floor of one row, stand before the
table. Nothing fails by how fast anything is.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.common import REPOSITORY, TokensDiffer, machine, markdown, revision, spread
from bench.rounds.instruments import read_ms
from bench.rounds.samples import MEMORY_BYTES
from bench.versions import in_turns
from outrider.engine.batching import Feed
from outrider.engine.models.checkpoints import Checkpoint, find_checkpoint
from outrider.engine.models.weights import DTYPES, PACKED_BITS
from outrider.engine.ops.library import FOLDER, load_kernels
from outrider.engine.ops.native import NativeOps
from outrider.engine.runner import ModelIdentity, ModelRunner
from outrider.errors import ModelRefused
from outrider.model_service.settings import available_cpus
from outrider.token_tree import EMPTY, TokenTree

ROWS = (*range(1, 17), 20, 24, 28, 32)
CHAIN, TREE, SESSIONS = SHAPES = ("chain", "tree", "sessions")
# The first of them brings back what the other checkout's forward took from the caches.
STEPS_IN_A_ROW = 4
# The fastest of them is the bandwidth.
READS = 9

RowTimes = dict[int, dict[str, dict[str, list[float]]]]
"""Milliseconds of a forward by rows, shape and checkout."""


class Forwards:
    """One model on one version's kernels, with a session for each row of the largest batch, contexts cached."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        dtype: str,
        num_threads: int,
        context: int,
        most: int,
        taps: Sequence[int] = (),
    ) -> None:
        """Loads the model; takes seconds, and raises ModelRefused where the folder has no kernels for this machine."""
        kernels = load_kernels(folder=folder)
        if kernels is None:
            raise ModelRefused(f"{folder} has no kernels that are built and run here", model=checkpoint.name)
        ops = NativeOps(kernels, num_threads, packed_bits=PACKED_BITS.get(dtype))
        decoder = checkpoint.build(torch.device("cpu"), DTYPES[dtype], ops)
        identity = ModelIdentity(checkpoint.name, "", dtype, num_threads, checkpoint.config.vocab_size)
        self._runner = ModelRunner(decoder, identity, kv_tokens=2 * (most + 1) * (context + most))
        self._runner.tap(taps)
        token_ids = [(7 * index + 11) % checkpoint.config.vocab_size for index in range(context + most)]
        self._proposed = token_ids[context:]
        self._sessions = [self._runner.open(token_ids[:context], context) for _ in range(most)]
        for session in self._sessions:
            while session.cached_len < context:
                self._runner.forward([Feed(session)])

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._runner.model.weights)

    def step(self, shape: str, num_rows: int) -> tuple[float, Tensor]:
        """Milliseconds of a forward over the last cached token of one session or of each, and its logits."""
        tree = EMPTY
        if shape != SESSIONS and num_rows > 1:
            parents = [row if shape == CHAIN else row // 2 for row in range(num_rows - 1)]
            tree = TokenTree(tuple(self._proposed[: num_rows - 1]), tuple(parents))
        feeds = [Feed(session, tree) for session in self._sessions[: num_rows if shape == SESSIONS else 1]]
        times_ms = []
        for _ in range(STEPS_IN_A_ROW):
            started_ns = time.perf_counter_ns()
            result = self._runner.forward(feeds)
            times_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
        return median(times_ms[1:]), result.logits


def measure(
    versions: Mapping[str, Forwards], row_counts: Sequence[int], turns: int, *, are_equal: bool = True
) -> RowTimes:
    """Raises TokensDiffer where a bit of a logit differs between versions that should be equal."""
    found: RowTimes = {
        num_rows: {shape: {name: [] for name in versions} for shape in SHAPES} for num_rows in row_counts
    }
    # The first turn is to warm up.
    for turn, shape, num_rows in product(range(turns + 1), SHAPES, row_counts):
        logits = {}
        for name in in_turns(versions, turn):
            taken_ms, logits[name] = versions[name].step(shape, num_rows)
            if turn:
                found[num_rows][shape][name].append(taken_ms)
        first, *others = logits.values()
        if are_equal and not all(torch.equal(first, other) for other in others):
            raise TokensDiffer(f"{num_rows} rows, {shape}: logits differ between {' and '.join(logits)}")
    return found


def render(found: RowTimes) -> str:
    """Medians with quartiles of this checkout, and of its ratios to the other one where there are two."""
    names = list(found[min(found)][CHAIN])
    header, lines = ["rows"], []
    for shape in SHAPES:
        header += [f"{shape}, {name}" for name in names] + [f"{shape}, {names[-1]} over {names[0]}"] * (len(names) > 1)
    for num_rows, shapes in found.items():
        line = [str(num_rows)]
        for times in shapes.values():
            line += [f"{spread(times[name]).median:.2f}" for name in names[:-1]] + [
                spread(times[names[-1]]).show(".2f")
            ]
            if len(names) > 1:
                line.append(spread(new / old for old, new in zip(*times.values(), strict=True)).show(".2f"))
        lines.append(line)
    return markdown(header, lines)


def main() -> None:
    """Prints tables of the measured times of an engine's operations."""
    parser = argparse.ArgumentParser(prog="python -m bench.rows", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="models/target", help="folder or sized:PRESET; default: the embedded target")
    parser.add_argument("--old", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--taps", default="", help="boundaries whose residuals are kept, with commas between")
    parser.add_argument("--against", choices=sorted(DTYPES), help="another type of the weights, for comparison")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows, with commas between")
    parser.add_argument("--context", type=int, default=128, help="tokens before the first row")
    parser.add_argument("--turns", type=int, default=12, help="measured passes over all shapes, rows and checkouts")
    parser.add_argument("--threads", type=int, default=available_cpus(), help="compute threads")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="type of the weights in memory")
    given = parser.parse_args()
    row_counts = sorted({int(count) for count in given.rows.split(",")})
    folders = {"old": given.old.resolve() / FOLDER.relative_to(REPOSITORY)} if given.old else {}
    taps = tuple(int(tap) for tap in given.taps.split(",")) if given.taps else ()
    if sum(map(bool, (given.old, taps, given.against))) > 1:
        parser.error("of --old, --taps and --against only one can be given")
    if taps:
        folders = {"without": FOLDER}
    checkpoint = find_checkpoint(given.model)
    torch.set_num_threads(1)
    sizes = given.threads, given.context, row_counts[-1]
    versions = {name: Forwards(folder, checkpoint, given.dtype, *sizes) for name, folder in folders.items()}
    if given.against:
        versions[given.against] = Forwards(FOLDER, checkpoint, given.against, *sizes)
    versions[given.dtype if given.against else "new"] = Forwards(FOLDER, checkpoint, given.dtype, *sizes, taps)
    buffer = torch.ones(MEMORY_BYTES // 4)
    fastest_ms = min(read_ms(buffer, given.threads) for _ in range(READS))
    print(f"{checkpoint.name}, {given.dtype}, {given.context} tokens of context, {given.threads} threads; {machine()};")
    print(f"{given.turns} turns; medians in ms, in brackets quartiles; commit {revision() or 'unknown'}.\n")
    for name, forwards in versions.items():
        floor_ms = fastest_ms * forwards.num_bytes / buffer.nbytes
        print(f"{name}: {forwards.num_bytes / 1e6:.0f} MB of weights, which memory takes {floor_ms:.2f} ms to bring.\n")
    print(render(measure(versions, row_counts, given.turns, are_equal=not given.against)))


if __name__ == "__main__":
    main()
