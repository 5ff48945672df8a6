"""Makes a drafting head for a target: a small layer that reads the target's own states and guesses its next tokens.

    python models/train_head.py --corpus FILE [--method METHOD] [--target DIR] [--out DIR]

A run that was stopped, however it was, goes on when the same command is given again.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from outrider.engine.devices import checked_device
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.errors import InvalidRequest
from outrider.process.options import grouped, options_of, run_app, service_app
from training.data import END_OF_TEXT, digest, encode, read_documents
from training.head_run import HeadRun, HeadSettings, files_of
from training.model import CausalModel, end_ids, target_tokenizer, trained_model
from training.run import CheckpointEvery, RunSettings, Separator, Threads, held_out_of
from training.steady import SteadyConsole
from training.storage import Storage

app = service_app()


@app.command(help=__doc__)
@grouped
def train_head(
    *,
    corpus: Annotated[Path, typer.Option(help="UTF-8 text, plain or as .xz or .gz: best the target's own.")],
    target: Annotated[
        Path, typer.Option(help="Folder of a Llama or Qwen 3 model, with its tokenizer, or a GGUF file.")
    ] = Path("models/target"),
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
    console = SteadyConsole()
    with console.steadily():
        model = trained_model("--target", target)
        nn.Module.to(model, torch_device)
        tokenizer = target_tokenizer("--target", target)
        documents = read_documents(corpus, separator)
        identity = {
            "--corpus": digest(documents),
            "--target": find_checkpoint(str(target)).digest(),
            **options_of(settings),
        }
        storage = Storage(out, checkpoint_every)
        goes_on = storage.holds(identity)
        backend = tokenizer.backend_tokenizer
        token_ids = encode(backend, documents, separator_id(tokenizer, model))
        held_out = held_out_of(token_ids, RunSettings(preset=settings.preset, seed=settings.seed))
        files = files_of(settings, held_out, model, str(target))
        run = HeadRun(settings, files, held_out, model, storage, console)
        # Only now, so that what is refused leaves no folder.
        storage.claim(identity, backend.to_str())
        console.print(f"{'Going on with' if goes_on else 'Making'} a head in {out}:")
        sizes = f"{len(documents):,} documents, {len(held_out.token_ids):,} tokens"
        console.print(f"{sizes}, {len(held_out.blocks):,} blocks of {held_out.block_len} held out")
        table = run.make()
        console.print("How often a guess is kept at temperature 1, or is the target's likeliest; all before it right.")
        console.print(table)
        console.print(f"The head: {out / 'head'}")


def separator_id(tokenizer: PreTrainedTokenizerFast, model: CausalModel) -> int:
    """The id that stands before each document. Raises InvalidRequest about a target that has none."""
    named = tokenizer.get_vocab().get(END_OF_TEXT), *end_ids(model), model.config.bos_token_id
    found = next((each for each in named if each is not None), None)
    if found is None:
        limit = f"a model that has {END_OF_TEXT}, or names an end or a beginning of sequence"
        raise InvalidRequest("--target", tokenizer.name_or_path, limit)
    return int(found)


if __name__ == "__main__":
    # Its bars would stand between ours.
    logging.disable_progress_bar()
    run_app(app)
