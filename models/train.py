"""Makes a pair like the embedded one from any text: a tokenizer, a target, and a draft distilled from the target.

    python models/train.py --corpus FILE [--out DIR]
    python models/train.py --corpus FILE --from-pair models    (only extends the context of a pair)

A run that was stopped, however it was, goes on when the same command is given again.
"""

from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers.utils import logging

from outrider.command_line import refuse_together, run_app, service_app
from outrider.engine.models.weights import model_hash
from outrider.errors import InvalidRequest, ModelRefused
from outrider.vocabulary import Vocabulary
from training import options
from training.corpus import digest, encode, read_documents, train_tokenizer
from training.pair import Run, Text
from training.plan import STEPS, Settings
from training.report import Report
from training.shapes import PRESETS, ROLES
from training.storage import Storage

app = service_app()


@app.command(help=__doc__)
def train(  # noqa: PLR0913, one parameter for each option is how typer declares a command
    *,
    corpus: options.Corpus,
    out: options.Out = Path("build/pair"),
    from_pair: options.FromPair = None,
    preset: options.PresetName = "story",
    separator: options.Separator = "\n\n",
    target_steps: options.TargetSteps = None,
    long_target_steps: options.LongTargetSteps = None,
    draft_steps: options.DraftSteps = None,
    long_draft_steps: options.LongDraftSteps = None,
    batch: options.Batch = 16,
    long_batch: options.LongBatch = 1,
    seed: options.Seed = 1,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    checkpoint_every: options.CheckpointEvery = 50,
) -> None:
    """Checks the options, and hands them on."""
    refuse_together("--from-pair", from_pair, {"--target-steps": target_steps, "--draft-steps": draft_steps})
    if preset not in PRESETS:
        raise InvalidRequest("--preset", preset, f"one of {', '.join(PRESETS)}")
    torch_device = checked_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    given = {"target": target_steps, "target-long": long_target_steps}
    given |= {"draft": draft_steps, "draft-long": long_draft_steps}
    steps = {stage: count or STEPS[stage] for stage, count in given.items()}
    documents = read_documents(corpus, separator)
    settings = Settings(digest(documents), preset, pair_digest(from_pair), seed, batch, long_batch, steps)
    make_pair(settings, documents, from_pair, torch_device, Storage(out, checkpoint_every))


def make_pair(
    settings: Settings, documents: list[str], from_pair: Path | None, device: torch.device, storage: Storage
) -> None:
    """Says what comes, makes the pair, and prints what every stage reached."""
    goes_on = storage.holds(settings.values())
    tokenizer = find_tokenizer(from_pair, storage, documents, settings.preset.vocab_size)
    text = Text.of(encode(tokenizer, documents), settings)
    # Only now, so that a text that is refused leaves no folder behind.
    storage.claim(settings.values(), tokenizer.to_str())
    console = Console(highlight=False)
    console.print(f"{'Going on with' if goes_on else 'Making'} a pair in {storage.out}:")
    sizes = f"{len(documents):,} documents, {len(text.token_ids):,} tokens of {tokenizer.get_vocab_size():,} kinds"
    console.print(f"{sizes}, {len(text.held_out.blocks):,} blocks of {text.held_out.block_len} held out")
    report = Report(console, storage.every)
    rows = Run(settings, text, tokenizer, from_pair, device, storage, report).make()
    report.table(rows, text.held_out)
    console.print(f"Serve it: outrider up --target {storage.out / 'target'} --draft {storage.out / 'draft'}")


def checked_device(name: str) -> torch.device:
    """The device of this name. Raises InvalidRequest when there is none here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest("--device", name, "cpu, or cuda where torch can use one") from error
    return device


def pair_digest(pair: Path | None) -> str | None:
    """What names the pair to start from. Raises InvalidRequest when it is none, or its halves do not fit."""
    if pair is None:
        return None
    try:
        difference = Vocabulary.read(pair / "draft").difference(Vocabulary.read(pair / "target"))
        hashes = [model_hash(pair / role) for role in ROLES]
    except (ModelRefused, OSError) as error:
        raise InvalidRequest("--from-pair", str(pair), f"a folder of a target and a draft: {error}") from error
    if difference is not None:
        raise InvalidRequest("--from-pair", str(pair), f"a pair with one vocabulary: {difference}")
    return " ".join(hashes)


def find_tokenizer(pair: Path | None, storage: Storage, documents: list[str], vocab_size: int) -> Tokenizer:
    """The tokenizer of the pair to start from, or the run's own, trained once."""
    if pair is not None:
        return Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    if storage.tokenizer.is_file():
        return Tokenizer.from_file(str(storage.tokenizer))
    return train_tokenizer(documents, vocab_size)


if __name__ == "__main__":
    # Its bars would stand between ours.
    logging.disable_progress_bar()
    run_app(app)
