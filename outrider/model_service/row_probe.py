"""`python -m outrider.model_service.row_probe --model DIR`: whether a model's rows are bitwise independent here.

Loads a model as a service loads it, compares, prints one line of JSON and ends.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated

import torch
import typer
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.devices import checked_device, free_bytes, seen_devices
from outrider.engine.ops import choose_ops, triton_missing
from outrider.engine.ops.library import load_kernels, processor_levels
from outrider.engine.ops.native import NativeOps
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import are_numbers, model_fault
from outrider.errors import InvalidRequest
from outrider.model_service.server import load_model
from outrider.model_service.settings import MAX_THREADS, Dtype, ModelServiceSettings
from outrider.process import telemetry
from outrider.process.options import between, run_app, service_app
from outrider.token_tree import EMPTY, TokenTree

SESSIONS, PROMPT_LEN, DRAFT_COUNT = 8, 24, 8
KV_TOKENS = 4096
# A matrix of 256 MiB, more than caches hold, and how often it is read.
SPEED_OUTPUTS, SPEED_INPUTS, SPEED_RUNS = 32768, 4096, 8

app = service_app()


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of the same rows computed in two ways."""

    name: str
    rows: int
    equal_rows: int


@app.command()
def probe(
    *,
    model: Annotated[str, typer.Option(help="Folder or hub id of the model, sized:PRESET, or sim:PRESET.")] = "",
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights in memory.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Compute threads.", callback=between(1, MAX_THREADS))] = 1,
) -> None:
    """Compares rows of a model; without a model it prints only what computes here."""
    telemetry.configure_logs("error")
    facts = engine_facts()
    if device == "cpu":
        facts["weight_bytes_per_s"] = weight_speed(threads)
    try:
        checked_device(device, "--device")
    except InvalidRequest as refused:
        facts["refused_device"] = refused.message
    if model and "refused_device" not in facts:
        settings = ModelServiceSettings(model, device=device, dtype=dtype, threads=threads, kv_tokens=KV_TOKENS)
        runner = load_model(settings).runner
        torch.set_num_threads(runner.torch_threads)
        facts |= {"numerics_id": runner.numerics_id, "comparisons": [asdict(each) for each in compare(runner)]}
    sys.stdout.write(json.dumps(facts) + "\n")


def engine_facts() -> dict[str, object]:
    """Facts about what computes here: torch, its threads, the compiled kernels, and CUDA with what it would run."""
    kernels = load_kernels()
    return {
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "kernels": kernels.name if kernels else None,
        "processor_levels": processor_levels(),
        "cuda": [device_facts(torch.device("cuda", number)) for number in range(torch.cuda.device_count())],
        "cuda_runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "cuda_seen": seen_devices(),
        "triton": version("triton") if find_spec("triton") is not None else None,
        "triton_missing": triton_missing(),
    }


def weight_speed(num_threads: int) -> float | None:
    """Bytes of weights a second that a product of one row reads on the CPU; None without compiled kernels."""
    ops = choose_ops(torch.device("cpu"), num_threads)
    if not isinstance(ops, NativeOps):
        return None
    weight = ops.stack([torch.zeros(SPEED_OUTPUTS, SPEED_INPUTS, dtype=torch.bfloat16)])
    row, times = torch.ones(1, SPEED_INPUTS), list[float]()
    for _ in range(SPEED_RUNS):
        started_s = time.perf_counter()
        ops.linear(row, weight)
        times.append(time.perf_counter() - started_s)
    # The quickest had the least of other programs in it.
    return weight.nbytes / min(times)


def device_facts(device: torch.device) -> dict[str, object]:
    """Facts about a CUDA device: its memory in bytes, and the name of the operations that models would have there."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "free_bytes": free_bytes(device),
        "kernels": choose_ops(device, 1).name,
    }


def compare(runner: ModelRunner) -> list[Comparison]:
    """Logits alone and among neighbours, of a prompt at once and token by token, of a proposal and of plain steps."""
    prompt_len = max(2, min(PROMPT_LEN, runner.context_len - DRAFT_COUNT - 1))
    prompts = [token_ids(runner, prompt_len - number % 2, number) for number in range(SESSIONS)]
    chains = [TokenTree.chain(token_ids(runner, DRAFT_COUNT, 100 + number)) for number in range(SESSIONS)]
    alone = [rows for pair in zip(prompts, chains, strict=True) for rows in together(runner, [pair])]
    among = together(runner, list(zip(prompts, chains, strict=True)))
    stepped = [step_by_step(runner, prompts[0], chains[0])]
    decoded = [step_by_step(runner, prompts[0][:1], TokenTree.chain(prompts[0][1:]))]
    prefilled = [*together(runner, [(prompts[0], EMPTY)], wants_prefix=True)]
    return [
        compared("a row alone and in a batch", alone, among),
        compared("prefill and decoding", prefilled, decoded),
        compared("a proposal and plain decoding", alone[:1], stepped),
    ]


def token_ids(runner: ModelRunner, count: int, start: int) -> tuple[int, ...]:
    """Token ids that differ from each other, the same on every machine."""
    return tuple((7919 * (start + 1) + 101 * index) % runner.vocabulary_size for index in range(count))


def together(
    runner: ModelRunner, pairs: Sequence[tuple[Sequence[int], TokenTree]], *, wants_prefix: bool = False
) -> list[Tensor]:
    """Logits [rows, V] of each prompt with its proposal, all in one forward; those of the whole prompt when wanted.

    Raises ModelFault.
    """
    sessions = [runner.open(prompt, 1) for prompt, _ in pairs]
    feeds = [Feed(each, tree, wants_prefix) for each, (_, tree) in zip(sessions, pairs, strict=True)]
    result = runner.forward(feeds)
    if not are_numbers(result.logits[:, : runner.vocabulary_size]):
        # They would differ from themselves.
        raise model_fault(runner, max(map(len, sessions)))
    rows = [
        torch.cat([result.logits[prefix.start : prefix.stop], result.logits[own.start : own.stop]])
        for prefix, own in zip(result.prefixes, result.ranges, strict=True)
        if own is not None
    ]
    for session in sessions:
        session.free()
    return rows


def step_by_step(runner: ModelRunner, prompt: Sequence[int], tree: TokenTree) -> Tensor:
    """Logits of the same rows by plain decoding: the prompt, then one token after the other."""
    session = runner.open(prompt, 1)
    rows = [runner.forward([Feed(session)]).logits[-1:].clone()]
    for token_id in tree.token_ids:
        session.extend([token_id])
        rows.append(runner.forward([Feed(session)]).logits[-1:].clone())
    session.free()
    return torch.cat(rows)


def compared(name: str, first: Sequence[Tensor], second: Sequence[Tensor]) -> Comparison:
    pairs = [pair for tensors in zip(first, second, strict=True) for pair in zip(*tensors, strict=True)]
    return Comparison(name, len(pairs), sum(torch.equal(*pair) for pair in pairs))


if __name__ == "__main__":
    run_app(app)
