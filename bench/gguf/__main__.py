"""`python -m bench.gguf`: GGUF files in mixes of types, by our services and by llama.cpp. No gate.

make lab                                                                    # llama.cpp, compiled here: ten minutes
python -m bench.gguf make --models smollm2,sized:200m --mixes Q4_K_M,Q6_K   # files, by llama.cpp's quantiser
python -m bench.gguf quality|speed|start ... [--save FILE]                  # reports in Markdown
python -m bench.gguf load --model FOLDER --dtypes int8,int4                 # CPU and memory of loading, of any files
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from bench import quality as windows
from bench.gguf import load as loads
from bench.gguf import quality as losses
from bench.gguf import speed as speeds
from bench.gguf import start as starts
from bench.gguf.lab import Llama
from bench.gguf.subjects import ASSISTANT, GEMMA, OWN_MIXES, Subject
from bench.gguf.subjects import make as make_file
from outrider.cli.bench.common import machine, parse_numbers, revision, writable
from outrider.cli.options import INT32_MAX
from outrider.cli.other_work import cpu_times, others_said
from outrider.cli.running import Interrupts, note, run
from outrider.engine.models.weights import DTYPES
from outrider.errors import InvalidRequest
from outrider.model_service.settings import MAX_THREADS, available_cpus
from outrider.process import telemetry
from outrider.process.options import between, grouped, listed, run_app, service_app

app = service_app()
FILE, FLOAT32 = "file", "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Options: which files, and where a report goes."""

    models: Annotated[
        str,
        typer.Option(help=f"Of {ASSISTANT}, {GEMMA} and sized:PRESET, with commas between.", metavar="NAME,..."),
    ] = ASSISTANT
    mixes: Annotated[
        str, typer.Option(help="Mixes by llama.cpp's names, as Q4_K_M, with commas between.", metavar="MIX,...")
    ] = OWN_MIXES[ASSISTANT]
    threads: Annotated[
        int, typer.Option(help="Compute threads of each program.", metavar="N", callback=between(1, MAX_THREADS))
    ] = available_cpus()
    save: Annotated[
        Path | None,
        typer.Option(help="File for the report.", metavar="FILE.md", show_default=False, callback=writable),
    ] = None

    def subjects(self) -> Iterator[Subject]:
        """Every model in every mix. Raises ModelRefused and InvalidRequest."""
        for name, mix in product(listed(self.models), listed(self.mixes)):
            yield Subject(name, mix)

    def made(self) -> list[Subject]:
        """Subjects whose files are there. Raises InvalidRequest too where one is missing."""
        found = list(self.subjects())
        for subject in found:
            subject.check_made()
        return found

    def conclude(self, what: str, report: str, others: str) -> None:
        """Prints a report with what made it, and writes it where that was asked for."""
        host = f"{machine()}, {self.threads} threads{', where ' + others if others else ''}"
        words = " ".join(sys.argv[1:])
        text = f"# {what}\n\n{host}; `python -m bench.gguf {words}`, commit {revision() or 'unknown'}.\n\n{report}\n"
        sys.stdout.write(text)
        if self.save is not None:
            self.save.write_text(text, encoding="utf-8")


def check_dtype(_: typer.CallbackParam, value: str) -> str:
    """Raises InvalidRequest about a type of weights that there is not."""
    for each in listed(value):
        if each not in DTYPES:
            raise InvalidRequest("--dtype", each, f"of {', '.join(DTYPES)}")
    return value


Dtype = Annotated[str, typer.Option(help="Type of our weights.", metavar="NAME", callback=check_dtype)]


@app.command()
@grouped
def make(*, files: Files) -> None:
    """Makes files in .gguf/ with llama.cpp's quantiser, and drafts of the same models for llama.cpp."""
    telemetry.configure_logs("warning")
    with Llama() as llama:
        for subject in files.subjects():
            make_file(subject, llama, files.threads)
            note(f"{subject.file} has {subject.file.stat().st_size / 1e9:.2f} GB")


@app.command()
@grouped
def quality(
    *,
    files: Files,
    dtypes: Annotated[
        str, typer.Option(help="Types of our weights, with commas between.", metavar="NAME,...", callback=check_dtype)
    ] = ",".join(each for each in DTYPES if each not in (FLOAT32, "int4")),
    tokens: Annotated[
        int, typer.Option(help="Tokens of the text.", metavar="N", callback=between(2, INT32_MAX))
    ] = 8192,
    text: Annotated[
        Path | None,
        typer.Option(help="Text. Default: docs/*.md.", metavar="FILE", show_default=False, exists=True, dir_okay=False),
    ] = None,
) -> None:
    """Compares our types and llama.cpp with the file's own values in float32: KL, perplexity, likeliest tokens."""
    telemetry.configure_logs("warning")
    reports, before = [], cpu_times()
    with Llama() as llama:
        for subject in files.made():
            token_ids = losses.read_text(subject, text, tokens)
            found = losses.measure(subject, llama, token_ids, listed(dtypes), files.threads)
            reports.append(f"## {subject}, {len(token_ids)} tokens\n\n{windows.render(found)}")
        files.conclude("What serving a GGUF file loses", "\n\n".join(reports), others_said(before, cpu_times()))


@app.command()
@grouped
def speed(
    *,
    files: Files,
    dtype: Dtype = FILE,
    turns: Annotated[int, typer.Option(help="Prompts.", metavar="N", callback=between(1, 1000))] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens an answer.", metavar="N", callback=between(16, 2048))] = 128,
    guesses: Annotated[str, typer.Option(help="Guesses that llama.cpp makes a round.", metavar="N,...")] = "2,4,8",
) -> None:
    """Measures our services and llama.cpp in turns: plain, speculative, rows."""
    telemetry.configure_logs("warning")
    counts = parse_numbers("--guesses", guesses, int, 1, 64)
    plan = speeds.SpeedPlan(dtype, files.threads, turns, tokens, counts)

    async def measuring(interrupts: Interrupts) -> None:
        before = cpu_times()
        with Llama() as llama:
            found = {each: await speeds.measure(each, plan, llama, interrupts) for each in files.made()}
            others = others_said(before, cpu_times())
        what = f"Speed beside llama.cpp, weights as {dtype}, {tokens} tokens an answer, {turns} turns"
        files.conclude(what, speeds.render(found), others)

    run(measuring)


@app.command()
@grouped
def start(
    *,
    files: Files,
    dtype: Dtype = FILE,
    turns: Annotated[int, typer.Option(help="Starts of each.", metavar="N", callback=between(1, 100))] = 3,
) -> None:
    """Measures seconds to a first token from a file that was read before, and memory over the file's size."""
    telemetry.configure_logs("warning")

    async def measuring(interrupts: Interrupts) -> None:
        before = cpu_times()
        found = {each: await starts.measure(each, dtype, files.threads, turns, interrupts) for each in files.made()}
        files.conclude(f"Start with a file, weights as {dtype}", starts.render(found), others_said(before, cpu_times()))

    run(measuring)


@app.command()
@grouped
def load(
    *,
    files: Files,
    model: Annotated[str, typer.Option(help="Folder, hub id or GGUF file.", metavar="MODEL")],
    dtypes: Annotated[
        str, typer.Option(help="Types of our weights, with commas between.", metavar="NAME,...", callback=check_dtype)
    ] = "bfloat16,int8,int4",
    turns: Annotated[int, typer.Option(help="Times each.", metavar="N", callback=between(1, 100))] = 3,
) -> None:
    """Measures seconds of CPU a GB of files while a model is loaded, and the memory beside its weights."""
    telemetry.configure_logs("warning")
    before = cpu_times()
    found = loads.measure(model, listed(dtypes), files.threads, turns)
    files.conclude("Loading", loads.render(model, found), others_said(before, cpu_times()))


if __name__ == "__main__":
    run_app(app)
