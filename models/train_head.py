"""Makes a drafting head for a target: a small layer that reads the target's own states and guesses its next tokens.

    python models/train_head.py --corpus FILE [--method METHOD] [--target DIR] [--out DIR]

A run that was stopped, however it was, goes on when the same command is given again.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer
from torch import nn
from transformers.utils import logging

from outrider.engine.devices import checked_device
from outrider.engine.models.weights import model_hash
from outrider.errors import InvalidRequest
from outrider.process.options import grouped, options_of, run_app, service_app
from training.data import END_OF_TEXT, END_OF_TEXT_ID, digest, encode, read_documents
from training.head_run import HeadRun, HeadSettings, files_of
from training.model import trained_model
from training.run import CheckpointEvery, RunSettings, Separator, Threads, held_out_of
from training.storage import Storage

app = service_app()


@app.command(help=__doc__)
@grouped
def train_head(
    *,
    corpus: Annotated[Path, typer.Option(help="UTF-8 text, plain or as .xz or .gz: best the target's own.")],
    target: Annotated[Path, typer.Option(help="Folder of a Llama model, with its tokenizer.")] = Path("models/target"),
    out: Annotated[Path, typer.Option(help="Folder of the head, and of what a stopped run needs to go on.")] = Path(
        "build/head"
    ),
    separator: Separator = "\n\n",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Threads = None,
    checkpoint_every: CheckpointEvery = 50,
    given: HeadSettings,
) -> None:
    """Checks the options, makes the head, and prints what it reached."""
    settings = given.checked()
    torch_device = checked_device(device, "--device")
    if threads is not None:
        torch.set_num_threads(threads)
    model = trained_model("--target", target)
    nn.Module.to(model, torch_device)
    tokenizer = target_tokenizer(target)
    documents = read_documents(corpus, separator)
    identity = {"--corpus": digest(documents), "--target": model_hash(target), **options_of(settings)}
    storage = Storage(out, checkpoint_every)
    goes_on = storage.holds(identity)
    held_out = held_out_of(encode(tokenizer, documents), RunSettings(preset=settings.preset, seed=settings.seed))
    files = files_of(settings, held_out, model, str(target))
    run = HeadRun(settings, files, held_out, model, storage, Console(highlight=False))
    # Only now, so that what is refused leaves no folder.
    storage.claim(identity, tokenizer.to_str())
    run.console.print(f"{'Going on with' if goes_on else 'Making'} a head in {out}:")
    sizes = f"{len(documents):,} documents, {len(held_out.token_ids):,} tokens"
    run.console.print(f"{sizes}, {len(held_out.blocks):,} blocks of {held_out.block_len} held out")
    table = run.make()
    run.console.print("How often a guess is kept at temperature 1, or is the target's likeliest; all before it right.")
    run.console.print(table)
    run.console.print(f"The head: {out / 'head'}")


def target_tokenizer(target: Path) -> Tokenizer:
    """The tokenizer beside the target. Raises InvalidRequest when there is none, or not one of models/train.py."""
    path = target / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
    if tokenizer is None or tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise InvalidRequest("--target", str(target), f"a model with a tokenizer.json whose id 0 is {END_OF_TEXT}")
    return tokenizer


if __name__ == "__main__":
    # Its bars would stand between ours.
    logging.disable_progress_bar()
    run_app(app)
