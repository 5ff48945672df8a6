"""`python -m outrider.model_service.convert_head FOLDER OUT`: what `outrider convert-head` runs; it needs torch."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.engine.heads.convert import convert_head
from outrider.process.options import run_app, service_app

app = service_app()


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json and pickled weights.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    theta: Annotated[float | None, typer.Option(help="Base of the rotary embedding.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Converts a head and prints what was written."""
    written = convert_head(folder, out, theta)
    base = "" if written.theta is None else f", rope_theta {written.theta:g}"
    sentence = f"{out}: {written.tensors} tensors, {written.bytes} bytes, layout {written.layout}{base}"
    sys.stdout.write((json.dumps(asdict(written)) if as_json else sentence) + "\n")


if __name__ == "__main__":
    run_app(app, prefix="outrider: ")
