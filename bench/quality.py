"""What fewer bits a weight cost: perplexity, divergence and agreement on a text, against bfloat16 or another type.

    python -m bench.quality --model MODEL --text FILE [--dtypes int8,int4] [--base float32] [--tokens 8192]

Every type reads the same windows of the text, and its distributions of each next token are held against those of the
base: perplexity, KL(base || type) in nats a token, how often both find the same token likeliest, and the largest
difference of a log-probability. Intervals are those of a bootstrap over windows.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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

Source = Callable[[Sequence[int]], Tensor]
"""Gives the log-probabilities [T, V] of the token after each of T."""


@dataclass(slots=True)
class Windows:
    """Sums over the positions of each window."""

    losses: list[float] = field(default_factory=list)
    """Losses of the tokens, in nats."""
    divergences: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    largest: float = 0.0
    """Largest difference of a log-probability from the base's."""

    def add(self, log_probs: Tensor, base: Tensor, targets: Tensor) -> None:
        """Rows [T, V] float32 of log-probabilities of this type and of the base, and the tokens that came."""
        self.losses.append(-float(log_probs.gather(1, targets[:, None]).double().sum()))
        self.divergences.append(float((base.exp() * (base - log_probs)).double().sum()))
        self.agreed.append(int((log_probs.argmax(1) == base.argmax(1)).sum()))
        self.counts.append(len(targets))
        self.largest = max(self.largest, float((base - log_probs).abs().max()))

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / sum(self.counts))


def interval(values: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """95 % of the mean a token of the sums of windows, which are drawn with replacement."""
    sums, tokens = np.array(values), np.array(counts)
    drawn = np.random.default_rng(SEED).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    means = sums[drawn].sum(1) / tokens[drawn].sum(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def log_probabilities(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [T, V] of the token after each of these."""
    session = runner.open(token_ids, 1)
    rows = []
    while session.cached_len < len(token_ids):
        rows.append(runner.forward([Feed(session, wants_prefix=True)]).logits.clone())
    session.free()
    return torch.log_softmax(torch.cat(rows)[:, : runner.vocabulary_size], 1)


def sources_of(model: str, dtypes: Sequence[str], window: int, threads: int) -> dict[str, Source]:
    """The model under each type of the weights; all stay in memory. Raises ModelRefused."""
    kv_tokens = 2 * window
    runners = {each: ModelRunner.load(model, dtype=each, num_threads=threads, kv_tokens=kv_tokens) for each in dtypes}
    return {dtype: partial(log_probabilities, runner) for dtype, runner in runners.items()}


def compare(sources: Mapping[str, Source], token_ids: Sequence[int], window: int) -> dict[str, Windows]:
    """Windows of the text by each source, of which the first is the base."""
    found = {name: Windows() for name in sources}
    for start in range(0, len(token_ids) - 1, window):
        part = token_ids[start : start + window + 1]
        targets, base = torch.tensor(part[1:]), None
        for name, source in sources.items():
            log_probs = source(part[:-1])
            base = log_probs if base is None else base
            found[name].add(log_probs, base, targets)
    return found


def render(found: Mapping[str, Windows]) -> str:
    """A Markdown table with a row for each source; the first is the base."""
    lines, (base_name, base) = [], next(iter(found.items()))
    for name, windows in found.items():
        over = interval([mine - other for mine, other in zip(windows.losses, base.losses, strict=True)], windows.counts)
        divergence = interval(windows.divergences, windows.counts)
        ratio, count = windows.perplexity / base.perplexity, sum(windows.counts)
        lines.append(
            [
                name,
                f"{windows.perplexity:.3f}",
                f"{ratio:.4f} ({math.exp(over[0]):.4f} to {math.exp(over[1]):.4f})",
                f"{sum(windows.divergences) / count:.5f} ({divergence[0]:.5f} to {divergence[1]:.5f})",
                f"{sum(windows.agreed) / count:.4f}",
                f"{windows.largest:.3f}",
            ]
        )
    columns = ("KL, nats a token", "same likeliest token", "largest difference")
    return markdown(["weights", "perplexity", f"over {base_name}", *columns], lines)


def main() -> None:
    """Prints a table of how well each type of the weights predicts the text."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="models/target", help="folder, file or hub id; default: the embedded target")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model is asked about")
    parser.add_argument("--dtypes", default="int8,int4", help=f"of {', '.join(DTYPES)}, with commas between")
    parser.add_argument("--base", default=BASE, help="type that the others are held against")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text, from its beginning")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--threads", type=int, default=available_cpus(), help="compute threads")
    given = parser.parse_args()
    dtypes = [*dict.fromkeys((given.base, *given.dtypes.split(",")))]
    unknown = next((dtype for dtype in dtypes if dtype not in DTYPES), None)
    if unknown is not None:
        parser.error(f"--dtypes and --base name {unknown}, but there are {', '.join(DTYPES)}")
    tokenizer = load_tokenizer(given.model)
    token_ids = tokenizer.encode(given.text.read_text(encoding="utf-8"), add_special_tokens=False).ids[: given.tokens]
    if len(token_ids) < 2:
        parser.error(f"--text {given.text} has {len(token_ids)} tokens, but must have at least 2")
    print(f"{given.model}, {len(token_ids)} tokens of {given.text.name}, windows of {given.window}; {machine()};")
    print(f"commit {revision() or 'unknown'}.\n")
    print(render(compare(sources_of(given.model, dtypes, given.window, given.threads), token_ids, given.window)))


if __name__ == "__main__":
    main()
