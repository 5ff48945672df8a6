"""What fewer bits a weight cost: perplexity, divergence and agreement on a text, against bfloat16.

    python -m bench.quality --model MODEL --text FILE [--dtypes float32,int8,int4] [--tokens 8192] [--window 512]

Every type reads the same windows of the text, and its distributions of each next token are held against those of
bfloat16: perplexity, KL(bfloat16 || type) in nats a token, and how often both find the same token likeliest. The
interval of a ratio of perplexities is that of a bootstrap over windows.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.cli.bench.common import machine, markdown, revision
from outrider.engine.batching import Feed
from outrider.engine.models.weights import DTYPES
from outrider.engine.runner import ModelRunner
from outrider.model_files.tokenizer_files import load_tokenizer
from outrider.model_service.settings import available_cpus

BASE = "bfloat16"
RESAMPLES, SEED = 2000, 1


@dataclass(slots=True)
class Windows:
    """Sums over the positions of each window."""

    losses: list[float] = field(default_factory=list)
    """Losses of the tokens, in nats."""
    divergences: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, log_probs: Tensor, base: Tensor, targets: Tensor) -> None:
        """Rows [T, V] float32 of log-probabilities of this type and of bfloat16, and the tokens that came."""
        self.losses.append(-float(log_probs.gather(1, targets[:, None]).double().sum()))
        self.divergences.append(float((base.exp() * (base - log_probs)).double().sum()))
        self.agreed.append(int((log_probs.argmax(1) == base.argmax(1)).sum()))
        self.counts.append(len(targets))

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / sum(self.counts))


def interval(found: Windows, base: Windows) -> tuple[float, float]:
    """95 % of the ratio of perplexities, over windows drawn with replacement."""
    differences, counts = np.subtract(found.losses, base.losses), np.array(base.counts)
    drawn = np.random.default_rng(SEED).integers(len(counts), size=(RESAMPLES, len(counts)))
    ratios = np.exp(differences[drawn].sum(1) / counts[drawn].sum(1))
    return float(np.quantile(ratios, 0.025)), float(np.quantile(ratios, 0.975))


def log_probabilities(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [T, V] of the token after each of these."""
    session = runner.open(token_ids, 1)
    rows = []
    while session.cached_len < len(token_ids):
        rows.append(runner.forward([Feed(session, wants_prefix=True)]).logits.clone())
    session.free()
    return torch.log_softmax(torch.cat(rows)[:, : runner.vocabulary_size], 1)


def compare(
    model: str, token_ids: Sequence[int], dtypes: Sequence[str], window: int, threads: int
) -> dict[str, Windows]:
    """Windows of the text under each type of the weights, bfloat16 first."""
    runners = {
        dtype: ModelRunner.load(model, dtype=dtype, num_threads=threads, kv_tokens=2 * window)
        for dtype in dict.fromkeys((BASE, *dtypes))
    }
    found = {dtype: Windows() for dtype in runners}
    for start in range(0, len(token_ids) - 1, window):
        part = token_ids[start : start + window + 1]
        targets, base = torch.tensor(part[1:]), log_probabilities(runners[BASE], part[:-1])
        for dtype, runner in runners.items():
            found[dtype].add(base if dtype == BASE else log_probabilities(runner, part[:-1]), base, targets)
    return found


def render(found: dict[str, Windows]) -> str:
    """A Markdown table with a row for each type of the weights."""
    lines = []
    for dtype, windows in found.items():
        count, low_high = sum(windows.counts), interval(windows, found[BASE])
        ratio = windows.perplexity / found[BASE].perplexity
        lines.append(
            [
                dtype,
                f"{windows.perplexity:.3f}",
                f"{ratio:.4f} ({low_high[0]:.4f} to {low_high[1]:.4f})",
                f"{sum(windows.divergences) / count:.5f}",
                f"{sum(windows.agreed) / count:.4f}",
            ]
        )
    return markdown(["weights", "perplexity", f"over {BASE}", "KL, nats a token", "same likeliest token"], lines)


def main() -> None:
    """Prints a table of how well each type of the weights predicts the text."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="models/target", help="folder, file or hub id; default: the embedded target")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model is asked about")
    parser.add_argument("--dtypes", default="int8,int4", help=f"of {', '.join(DTYPES)}, with commas between")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text, from its beginning")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--threads", type=int, default=available_cpus(), help="compute threads")
    given = parser.parse_args()
    dtypes = given.dtypes.split(",")
    unknown = next((dtype for dtype in dtypes if dtype not in DTYPES), None)
    if unknown is not None:
        parser.error(f"--dtypes names {unknown}, but there are {', '.join(DTYPES)}")
    tokenizer = load_tokenizer(given.model)
    token_ids = tokenizer.encode(given.text.read_text(encoding="utf-8"), add_special_tokens=False).ids[: given.tokens]
    if len(token_ids) < 2:
        parser.error(f"--text {given.text} has {len(token_ids)} tokens, but must have at least 2")
    print(f"{given.model}, {len(token_ids)} tokens of {given.text.name}, windows of {given.window}; {machine()};")
    print(f"commit {revision() or 'unknown'}.\n")
    print(render(compare(given.model, token_ids, dtypes, given.window, given.threads)))


if __name__ == "__main__":
    main()
