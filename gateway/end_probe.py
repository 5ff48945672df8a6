"""`python -m gateway.end_probe --model PLACE`: with which tokens answers of a model end, and who says so.

Reads the files of a folder, or a GGUF file, as target and gateway do; loads no model. Prints one line of JSON and ends.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.text.turn_end import turn_end
from outrider.model_files.ends import find_ends, told
from outrider.model_files.tokenizer_files import load_tokenizer
from outrider.process import telemetry
from outrider.process.options import run_app, service_app

THE_TEMPLATE = "the chat template"

app = service_app()


@app.command()
def probe(*, model: Annotated[str, typer.Option(help="Folder or GGUF file of the model.")]) -> None:
    """Prints the ends, each with where it is said, and what is wrong with the chat template's, if anything is."""
    telemetry.configure_logs("error")
    tokenizer = load_tokenizer(model)
    ends = find_ends(Path(model), tokenizer)
    closing = turn_end(ChatTemplate.read(model), Tokenizer(model))
    if closing.token_id is not None:
        ends[closing.token_id] = (*ends.get(closing.token_id, ()), THE_TEMPLATE)
    facts = {"ends": {told(token_id, tokenizer): places for token_id, places in ends.items()}, "fault": closing.fault}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    run_app(app)
