"""What compose.yaml runs: a process with the models that are named, or else with the pair of OUTRIDER_PAIR.

An empty name counts as none.
"""

import os
import sys
from typing import Annotated

import typer

from outrider.cli.pairs import PairModels, choose_pair
from outrider.model_files.model_names import embedded_model
from outrider.process.options import run_app, service_app

app = service_app()
Target = Annotated[str, typer.Argument(metavar="TARGET", help="Model of the target. Empty: the pair's.")]


@app.command()
def fetch(target: Target = "") -> None:
    """Fetches the pair, where that has not been done yet and no other target is named."""
    sys.stdout.write(f"The target is {target or choose_pair(None, fetches=True).target}.\n")


@app.command()
def run(
    module: Annotated[str, typer.Argument(metavar="MODULE", help="target_service, draft_service or gateway.")],
    target: Target = "",
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Model of the draft. Empty: the pair's.")] = "",
) -> None:
    """Becomes a process of the stack; what the environment says goes before what belongs to a pair.

    A target of its own without a draft gets the tales' draft, which fits sized models; a gateway leaves out one that
    does not fit.
    """
    pair = PairModels(target, embedded_model("draft")) if target else choose_pair(None, fetches=False)
    variables = {
        "target_service": {
            "OUTRIDER_MODEL": pair.target,
            "OUTRIDER_HEAD": pair.head or "",
        },
        "draft_service": {"OUTRIDER_MODEL": draft or pair.draft},
        "gateway": {"OUTRIDER_TOKENIZER": pair.target, "OUTRIDER_GENERATION_DEFAULTS": pair.generation_defaults},
    }[module]
    os.execve(sys.executable, (sys.executable, "-m", module), {**variables, **os.environ})


if __name__ == "__main__":
    run_app(app)
