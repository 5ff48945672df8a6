"""vLLM on CPU with guesses of our draft service, beside plain and beside its own ways to guess, in turns. No gate.

    make vllm                                  # vLLM in an environment of its own: 3 GB
    python -m bench.vllm [--save FILE.md]      # SmolLM2-135M-Instruct in float32

Each setting is a vLLM of its own; they answer the same questions after each other, in another order each turn, and no
question twice. Greedy answers are compared with those of the plain one.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.gguf.subjects import questions
from bench.vllm.folders import write_draft, write_folder
from bench.vllm.lab import PROPOSER, Draft, Engine
from outrider.cli.bench.common import PLAIN, interval, machine, markdown, parse_numbers, revision, rotated, writable
from outrider.cli.options import SHARED_OPTIONS
from outrider.cli.other_work import cpu_times, others_said
from outrider.cli.pairs import Pair, choose_pair
from outrider.cli.running import failures_as_exits, note
from outrider.model_service.settings import available_cpus
from outrider.process import telemetry
from outrider.process.options import between, run_app, service_app

app = service_app()
OURS, NGRAM, DRAFT_MODEL = "our draft service", "vLLM's ngram", "vLLM's draft model"
CPUS = f"0-{available_cpus() - 1}"
HEADER = ("streams", "guesses by", "tokens a second", "over plain", "tokens a step", "same texts")


@dataclass(slots=True)
class AskedBlocks:
    """What one setting made of all blocks of questions at one number of streams."""

    rates: list[float] = field(default_factory=list)
    """Tokens a second of each block, prompts included."""
    answers: list[list[int]] = field(default_factory=list)
    row_steps: int = 0

    def add(self, said: Mapping[str, Any]) -> None:
        """Adds what an engine said of a block."""
        self.rates.append(sum(map(len, said["answers"])) / said["seconds"])
        self.answers += said["answers"]
        self.row_steps += said["row_steps"]


Questions = Sequence[Sequence[int]]
Found = Mapping[int, Mapping[str, AskedBlocks]]
"""By streams and setting."""


def speculatives(folder: Path, guesses: int) -> dict[str, Mapping[str, Any] | None]:
    """Settings by name, as vLLM takes them."""
    common = {"num_speculative_tokens": guesses}
    return {
        PLAIN: None,
        OURS: {**PROPOSER, **common},
        NGRAM: {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, **common},
        DRAFT_MODEL: {"method": "draft_model", "model": str(folder / "draft"), **common},
    }


def measure(engines: Mapping[str, Engine], blocks: Mapping[int, Sequence[Questions]], tokens: int) -> Found:
    """Answers of each engine to blocks of questions, by streams. Raises VllmFailed."""
    found = {count: {name: AskedBlocks() for name in engines} for count in blocks}
    # The first turn does not count.
    for turn in range(min(map(len, blocks.values()))):
        for count, questions_of in blocks.items():
            for name in rotated([*engines], turn):
                engines[name].ask(questions_of[turn], count, tokens)
                said = engines[name].finish()
                if turn:
                    found[count][name].add(said)
        note(f"turn {turn} is done")
    return found


def render(found: Found) -> str:
    """A table with a row for each setting at each number of streams."""
    rows = []
    for count, settings in found.items():
        plain = settings[PLAIN]
        for name, each in settings.items():
            ratios = [rate / other for rate, other in zip(each.rates, plain.rates, strict=True)]
            same = sum(answer == other for answer, other in zip(each.answers, plain.answers, strict=True))
            rows.append(
                [
                    str(count),
                    name,
                    interval(each.rates).show(".1f"),
                    interval(ratios).show(".2f"),
                    f"{sum(map(len, each.answers)) / each.row_steps:.2f}",
                    f"{same} of {len(plain.answers)}",
                ]
            )
    return markdown(HEADER, rows)


@app.command()
def vllm(
    *,
    guesses: Annotated[int, typer.Option(help="Most guesses of a step.", metavar="N", callback=between(1, 16))] = 4,
    streams: Annotated[str, typer.Option(help="Answers at once, with commas between.", metavar="N,...")] = "1,8",
    turns: Annotated[int, typer.Option(help="Blocks of questions.", metavar="N", callback=between(1, 100))] = 7,
    tokens: Annotated[int, typer.Option(help="Tokens an answer.", metavar="N", callback=between(16, 1024))] = 64,
    save: Annotated[
        Path | None,
        typer.Option(help="File for the report.", metavar="FILE.md", show_default=False, callback=writable),
    ] = None,
) -> None:
    """Measures vLLM plain, with our draft service, with its ngram, and with the same draft inside it."""
    telemetry.configure_logs("warning")
    counts = parse_numbers("--streams", streams, int, 1, 64)
    size = max(counts)
    with failures_as_exits(SHARED_OPTIONS), tempfile.TemporaryDirectory() as place, ExitStack() as running:
        pair, before = choose_pair(Pair.SMOLLM2, fetches=True), cpu_times()
        target = Path(place, "target")
        write_folder(Path(pair.target), target)
        write_draft(Path(pair.draft), target, Path(place, "draft"))
        prompts = asyncio.run(questions(pair.target, range(len(counts) * (turns + 1) * size)))
        pieces = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        blocks = {count: pieces[number :: len(counts)] for number, count in enumerate(counts)}
        draft = running.enter_context(Draft(pair.draft))
        engines = {}
        for name, speculative in speculatives(Path(place), guesses).items():
            note(f"vLLM compiles, guesses by: {name}")
            engine = Engine(target, speculative, draft=draft.address, cpus=CPUS, max_model_len=2048, max_num_seqs=size)
            engines[name] = running.enter_context(engine)
        report = render(measure(engines, blocks, tokens))
        # While all are there, so that what they took is not that of others.
        others = others_said(before, cpu_times())
    words = (
        f"{machine()}, commit {revision()}: {turns} turns of {size} questions at each number of streams, "
        f"{tokens} tokens an answer, at most {guesses} guesses a step. Medians with their intervals of 95 %"
    )
    text = f"{report}\n\n{'; '.join(filter(None, (words, others)))}.\n"
    typer.echo(text)
    if save is not None:
        save.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_app(app)
