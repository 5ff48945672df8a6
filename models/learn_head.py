"""Lets a drafting head go on learning from what its target answered, while the machine has nothing else to do.

    python models/learn_head.py --target DIR --head DIR --record DIR [--out DIR]

`--record` is the folder that a target keeps answers in (python -m target_service --record). A version is published into
`--out` where it keeps more of its guesses than the head on answers that it has not learnt, beyond doubt; a target that
is started with --learnt OUT offers the newest one beside its head. A run that was stopped, however it was, goes on when
the same command is given again.
"""

import os
import time
from hashlib import file_digest
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from transformers.utils import logging

from outrider.engine.models.checkpoints import find_checkpoint
from outrider.process.options import between, grouped, options_of, run_app, service_app
from training.head_files import HeadFiles
from training.idle import IdleMachine
from training.model import trained_model
from training.online import OnlineRun, OnlineSettings, check_record
from training.run import Threads, frozen
from training.steady import SteadyConsole
from training.storage import Storage

app = service_app()

LOWEST_PRIORITY = 19
LOOK_S = 10.0
CHECKPOINT_EVERY = 10


@app.command(help=__doc__)
@grouped
def learn_head(
    *,
    target: Annotated[Path, typer.Option(help="Folder of the target, or its GGUF file.")],
    head: Annotated[Path, typer.Option(help="Folder of the eagle3 head that the target has beside.")],
    record: Annotated[Path, typer.Option(help="Folder that the target keeps answers in.")],
    out: Annotated[Path, typer.Option(help="Folder of the versions, and of what a stopped run needs to go on.")] = Path(
        "build/learnt"
    ),
    watch: Annotated[bool, typer.Option(help="Make one version after the other, for ever.")] = False,
    busy_share: Annotated[
        float,
        typer.Option(
            callback=between(0, 1),
            help="Wait while processes that are not niced take more of the CPUs than this; 1 never waits.",
        ),
    ] = 0.25,
    threads: Threads = 1,
    given: OnlineSettings,
) -> None:
    """Checks the options, makes a version if there is enough to learn, and says what came of it."""
    os.nice(LOWEST_PRIORITY)
    if threads is not None:
        torch.set_num_threads(threads)
    console = SteadyConsole()
    with console.steadily():
        model = trained_model("--target", target)
        nn.Module.to(frozen(model), "cpu")
        files = HeadFiles.read(head, model.config)
        digest = find_checkpoint(str(target)).digest()
        check_record(record, digest, files.taps)
        with (head / "model.safetensors").open("rb") as file:
            identity = {"--target": digest, "--head": file_digest(file, "sha256").hexdigest(), **options_of(given)}
        storage = Storage(out, CHECKPOINT_EVERY)
        storage.holds(identity)
        # Only now, so that what is refused leaves no folder.
        storage.claim(identity, "{}")
        run = OnlineRun(given, model, head, files, record, storage, console, IdleMachine(busy_share))
        while True:
            if run.is_due():
                console.print(run.make())
            else:
                console.doing = f"{len(run.new_answers()):,} new answers of {given.new_answers:,}"
            if not watch:
                break
            time.sleep(LOOK_S)
        console.print(f"{len(run.new_answers()):,} new answers of {given.new_answers:,} for the next version")


if __name__ == "__main__":
    # Its bars would stand between ours.
    logging.disable_progress_bar()
    run_app(app)
