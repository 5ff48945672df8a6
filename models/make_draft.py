"""Makes drafts for a target: a head that reads its states, and a small model of its own, both from what it writes.

    python models/make_draft.py --target DIR [--out DIR] [--corpus FILE] [--questions FILE]

The target writes conversations through its chat template, or plain text where it has none; the drafts learn its
distributions on its answers. A run that was stopped, however it was, goes on when the same command is given again.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging

from outrider.engine.models.checkpoints import find_checkpoint
from outrider.model_files.vocabulary import Vocabulary
from outrider.process.options import grouped, options_of, run_app, service_app
from training.data import digest, read_documents
from training.dialogue import Turns, Writing
from training.draft_report import markdown, read_questions
from training.draft_run import DraftRun, DraftRunSettings, check_fit
from training.model import CausalModel, end_ids, target_tokenizer, trained_model
from training.run import CheckpointEvery, Separator, Threads
from training.steady import SteadyConsole
from training.storage import Storage

app = service_app()


@app.command(help=__doc__)
@grouped
def make_draft(
    *,
    target: Annotated[
        Path, typer.Option(help="Folder of a Llama or Qwen 3 model, with its tokenizer, or a GGUF file.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the drafts, and of what a stopped run needs to go on.")] = Path(
        "build/draft"
    ),
    corpus: Annotated[
        Path | None, typer.Option(help="UTF-8 text, plain or as .xz or .gz, of which some texts take a piece.")
    ] = None,
    separator: Separator = "\n\n",
    questions: Annotated[
        Path | None,
        typer.Option(help="JSON lines with category and turns, for the report alone: nothing is learnt from them."),
    ] = None,
    threads: Threads = None,
    checkpoint_every: CheckpointEvery = 50,
    given: DraftRunSettings,
) -> None:
    """Checks the options, makes the drafts, and writes and prints what they reach."""
    if threads is not None:
        torch.set_num_threads(threads)
    console = SteadyConsole()
    with console.steadily():
        model = trained_model("--target", target)
        # The place of a target is private: drafts carry only its name.
        name = target.absolute().name
        documents = [] if corpus is None else read_documents(corpus, separator)
        asked = [] if questions is None else read_questions(questions)
        check_fit(given, model)
        writing = read_writing(target, model, given, documents)
        identity = {
            "--target": find_checkpoint(str(target)).digest(),
            "--corpus": digest(documents),
            "--questions": digest([each.category + each.text for each in asked]),
            **options_of(given),
        }
        storage = Storage(out, checkpoint_every)
        goes_on = storage.holds(identity)
        # Only now, so that what is refused leaves no folder.
        storage.claim(identity, writing.tokenizer.backend_tokenizer.to_str())
        console.print(f"{'Going on with' if goes_on else 'Making'} drafts in {out}:")
        run = DraftRun(given, model, name, Vocabulary.read(target), writing, asked, storage, console)
        report = markdown(run.make())
        (out / "report.md").write_text(report, encoding="utf-8")
        console.print(report)
        console.print(f"Serve them: outrider up --target {target} --head {out / 'head'} --draft {out / 'draft'}")


def read_writing(target: Path, model: CausalModel, settings: DraftRunSettings, documents: list[str]) -> Writing:
    """Beginnings of the target's texts. Raises InvalidRequest about `--target`, and about temperatures."""
    tokenizer = target_tokenizer("--target", target)
    config = model.config
    turns = Turns.read(tokenizer, frozenset(end_ids(model)))
    beginning = () if config.bos_token_id is None else (config.bos_token_id,)
    return Writing(tokenizer, turns, beginning, settings.answer_temperatures, documents, settings.corpus_share)


if __name__ == "__main__":
    # Its bars would stand between ours.
    logging.disable_progress_bar()
    run_app(app)
