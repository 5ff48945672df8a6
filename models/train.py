"""Makes a pair like the embedded one from any text: a tokenizer, a target, and a draft distilled from the target.

    python models/train.py --corpus FILE [--out DIR]
    python models/train.py --corpus FILE --from-pair models    (only extends the context of a pair)

A run that was stopped, however it was, goes on when the same command is given again.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from transformers.utils import logging

from outrider.engine.devices import checked_device
from outrider.engine.models.weights import model_hash
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.vocabulary import Vocabulary
from outrider.process.options import grouped, options_of, refuse_together, run_app, service_app
from training.data import digest, encode, read_documents, train_tokenizer
from training.model import ROLES
from training.run import CheckpointEvery, Run, RunSettings, Separator, Threads, held_out_of, outcome_table
from training.steady import SteadyConsole
from training.storage import Storage

app = service_app()


@app.command(help=__doc__)
@grouped
def train(
    *,
    corpus: Annotated[Path, typer.Option(help="UTF-8 text, plain or as .xz or .gz.")],
    out: Annotated[Path, typer.Option(help="Folder of the pair, and of what a stopped run needs to go on.")] = Path(
        "build/pair"
    ),
    from_pair: Annotated[
        Path | None, typer.Option(help="Folder of a pair; only its context is extended, nothing else.")
    ] = None,
    separator: Separator = "\n\n",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Threads = None,
    checkpoint_every: CheckpointEvery = 50,
    given: RunSettings,
) -> None:
    """Checks the options, makes the pair, and prints what every stage reached."""
    refuse_together("--from-pair", from_pair, options_of(given, "target_steps", "draft_steps"))
    settings = given.resolved()
    torch_device = checked_device(device, "--device")
    if threads is not None:
        torch.set_num_threads(threads)
    documents = read_documents(corpus, separator)
    identity = {"--corpus": digest(documents), "--from-pair": pair_digest(from_pair), **options_of(settings)}
    storage = Storage(out, checkpoint_every)
    goes_on = storage.holds(identity)
    tokenizer = find_tokenizer(from_pair, storage, documents, settings.sizes.vocab_size)
    held_out = held_out_of(encode(tokenizer, documents), settings)
    # Only now, so that a text that is refused leaves no folder.
    storage.claim(identity, tokenizer.to_str())
    console = SteadyConsole()
    console.print(f"{'Going on with' if goes_on else 'Making'} a pair in {out}:")
    sizes = f"{len(documents):,} documents, {len(held_out.token_ids):,} tokens of {tokenizer.get_vocab_size():,} kinds"
    console.print(f"{sizes}, {len(held_out.blocks):,} blocks of {held_out.block_len} held out")
    with console.steadily():
        outcomes = Run(settings, held_out, tokenizer, from_pair, torch_device, storage, console).make()
    console.print("Held-out loss in nats a token; behind so many tokens the same ones are measured.")
    console.print(outcome_table(outcomes, held_out))
    console.print(f"Serve it: outrider up --target {out / 'target'} --draft {out / 'draft'}")


def pair_digest(pair: Path | None) -> str | None:
    """Digest of the pair to start from. Raises InvalidRequest when it is none, or its halves do not fit."""
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
