"""Whether a head that learns while it serves keeps more of its guesses when what is asked changes. No gate.

    python -m bench.learning --target MODEL --head DIR [--questions 24] [--turns 3] --out FOLDER

Three kinds of questions come one after the other, each in turns: English, German, and Python. Each question is answered
with guesses of the head, which is recorded, and of the newest version that was learnt, which is not; after a turn
models/learn_head.py makes a version, and the target is started again with it. Tokens are those of the same seed, and
compared; figures are tokens a round in chains of three.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from gateway.server import start as start_gateway
from gateway.settings import GatewaySettings
from outrider.cli.bench.common import TokensDiffer
from outrider.client import AsyncClient, ChatMessage, Speculation
from outrider.process.options import between, run_app, service_app
from target_service.server import LEARNT, TargetSettings
from target_service.server import start as start_target

DRAFT_COUNT, MAX_TOKENS = 3, 64
# So many MiB hold about one kind's answers, so that what is asked no more is forgotten.
RECORD_MIB = 24
THINGS = {
    "English": ("a lighthouse", "rain", "honey", "chess", "an old bridge", "bread", "the moon", "a violin"),
    "German": ("einen Leuchtturm", "Regen", "Honig", "Schach", "eine alte Brücke", "Brot", "den Mond", "eine Geige"),
    "Python": ("a list", "a word", "a file", "a matrix", "a date", "a queue", "a tree", "a sentence"),
}
FORMS = {
    "English": (
        *("Tell me a short story about {}.", "Explain {} to a child.", "Write a letter about {} to a friend."),
        *("Give me three facts about {}.", "Describe {} in the evening.", "What can we learn from {}?"),
        *("Write a poem about {}.", "Why do people like {}?", "Imagine a day without {}."),
    ),
    "German": (
        *("Erzähle mir eine kurze Geschichte über {}.", "Erkläre einem Kind {}.", "Schreibe einen Brief über {}."),
        *("Nenne drei Tatsachen über {}.", "Beschreibe {} am Abend.", "Was lernen wir über {}?"),
        *("Schreibe ein Gedicht über {}.", "Schreibe einen Bericht über {}.", "Stelle drei Fragen über {}."),
    ),
    "Python": (
        *("Write a Python function that reverses {}.", "Write a Python function that counts what is in {}."),
        *("Write a Python class for {}.", "Write a Python function that prints {}.", "Write Python tests for {}."),
        *("Write a Python function that sorts {}.", "Write a Python function that checks {}."),
        *("Write a Python function that copies {}.", "Write a Python function that compares {} with another."),
    ),
}

app = service_app()


class AskedTurn(NamedTuple):
    """Figures of some questions of one kind."""

    kind: str
    head: float
    """Tokens a round."""
    learnt: float | None
    version: str
    said: str
    """Line of the trainer afterwards."""


def questions(kind: str, turn: int, count: int) -> list[str]:
    """Questions of a kind, none of which comes in two turns of up to 24."""
    every = [form.format(thing) for thing in THINGS[kind] for form in FORMS[kind]]
    return [every[(place * 5) % len(every)] for place in range(turn * count, (turn + 1) * count)]


async def answered(client: AsyncClient, text: str, seed: int, drafter: str, *, kept: bool) -> tuple[list[int], int]:
    """Tokens of an answer, and in how many rounds it came."""
    stream = client.chat(
        [ChatMessage(role="user", content=text)],
        max_tokens=MAX_TOKENS,
        seed=seed,
        temperature=0.7 * (seed % 2),
        speculation=Speculation(drafter=drafter, draft_count=DRAFT_COUNT),
        unrecorded=not kept,
    )
    [sample] = (await stream.result()).samples
    rounds = sample.rounds
    return [token.token_id for each in rounds for token in each.tokens], len(rounds)


async def serve(target: str, head: str, out: Path, texts: Sequence[str], first: int) -> tuple[float, float | None, str]:
    """Answers some questions; tokens a round with the head and with the newest version, and that one's name."""
    async with AsyncExitStack() as undo:
        learnt, record = str(out / "learnt"), str(out / "answers")
        settings = TargetSettings(
            target, "127.0.0.1:0", head=head, record=record, record_mib=RECORD_MIB, learnt=learnt, kv_tokens=8192
        )
        service = await start_target(settings)
        undo.push_async_callback(service.stop, 0)
        gateway = await start_gateway(
            GatewaySettings(service.address, target, "", listen="127.0.0.1:0", rest_listen="", lookup=False)
        )
        undo.push_async_callback(gateway.stop, 0)
        client = await undo.enter_async_context(AsyncClient(gateway.address))
        names = [name for name in service.facts.drafters if name == "eagle3" or name.startswith(LEARNT)]
        counts = {name: [0, 0] for name in names}
        for seed, text in enumerate(texts, first):
            found = [await answered(client, text, seed, name, kept=name == names[0]) for name in names]
            if any(tokens != found[0][0] for tokens, _ in found):
                raise TokensDiffer(f"{text!r} has other tokens with {names[-1]}")
            for name, (tokens, num_rounds) in zip(names, found, strict=True):
                counts[name][0] += len(tokens)
                counts[name][1] += num_rounds
    rates = [tokens / num_rounds for tokens, num_rounds in counts.values()]
    return rates[0], rates[1] if len(rates) > 1 else None, names[-1] if len(names) > 1 else ""


def learn(target: str, head: str, out: Path, count: int, steps: int) -> str:
    """Makes a version of what was recorded; returns what the trainer said of it."""
    words = [sys.executable, "models/learn_head.py", "--target", target, "--head", head, "--busy-share", "1"]
    words += ["--record", str(out / "answers"), "--out", str(out / "learnt")]
    words += ["--steps", str(steps), "--new-answers", str(min(count, 16))]
    ended = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ | {"COLUMNS": "400"})
    lines = ended.stdout.splitlines()
    # Answers of a few words are not recorded, and may leave too few.
    return next((line for line in lines if line.startswith("version ")), lines[-1])


def table(turns: Sequence[AskedTurn]) -> str:
    """The turns in order, as Markdown."""
    lines = [
        "| asked | head | learnt | served version | what was made then |",
        "|---" * 5,
    ]
    for each in turns:
        learnt = "-" if each.learnt is None else f"{each.learnt:.3f}"
        lines.append(f"| {each.kind} | {each.head:.3f} | {learnt} | {each.version or '-'} | {each.said} |")
    return "\n".join([lines[0], lines[1] + "|", *lines[2:]])


@app.command(help=__doc__)
def measure(
    *,
    target: Annotated[str, typer.Option(help="A model that the trainer reads: a folder or a GGUF file.")],
    head: Annotated[str, typer.Option(help="Folder of its eagle3 head.")] = "models/smollm2/head",
    out: Annotated[Path, typer.Option(help="New folder for answers and versions.")],
    count: Annotated[int, typer.Option("--questions", callback=between(16, 24), help="Of a turn.")] = 24,
    num_turns: Annotated[int, typer.Option("--turns", callback=between(1, 3), help="Of each kind.")] = 3,
    steps: Annotated[int, typer.Option(callback=between(1, 10000), help="Of each version.")] = 100,
) -> None:
    """Prints a line a turn, and the table; goes on after the turns that a run before has made."""
    done = out / "turns.jsonl"
    turns = [AskedTurn(*json.loads(line)) for line in done.read_text().splitlines()] if done.exists() else []
    for number in range(len(turns), len(FORMS) * num_turns):
        kind, turn = [*FORMS][number // num_turns], number % num_turns
        found = asyncio.run(serve(target, head, out, questions(kind, turn, count), number * count))
        turns.append(AskedTurn(kind, *found, learn(target, head, out, count, steps)))
        with done.open("a", encoding="utf-8") as file:
            file.write(json.dumps(turns[-1]) + "\n")
        typer.echo(turns[-1])
    typer.echo(table(turns))


if __name__ == "__main__":
    run_app(app)
