"""What lookups and `auto` bring to answers that copy from their prompts, to questions and to stories. No gate.

    python -m bench.copying --address HOST:PORT --corpus TALES.txt [--questions SPEC_BENCH.jsonl] [--turns 10]
    python -m bench.copying --address HOST:PORT --everyday 60

The copy set is made from the corpus: texts to repeat, to copy with one word replaced, and to quote one paragraph of. A
gateway with lookups must serve at the address. Each prompt is answered plainly, by lookups alone and by whatever the
gateway finds fastest, with all drafters and without lookups, in turns, and the tokens are compared. Each
request has a cache_salt of its own, so that none finds the answer of another one in a memory. Answers that repeat
themselves are counted apart from all others: lookups guess them well, and no user wants them.
"""

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from outrider.cli import options
from outrider.cli.bench.common import (
    OPENINGS,
    Gateway,
    Timed,
    TokensDiffer,
    interval,
    machine,
    markdown,
    read_timed,
    revision,
    rotated,
    spread,
)
from outrider.client import ChatMessage, Client, GenerationOptions, InvalidRequest, Speculation
from outrider.process.options import between, grouped, run_app, service_app

TIMEOUT_S = 300.0
PLAIN, LOOKUP, AUTO, WITHOUT = "plain", "lookup", "auto", "auto without lookup"
REPEAT, EDIT, EXTRACT = "repeat", "edit", "extract"
MIN_CHARS, MAX_CHARS = 250, 600  # of a passage
# An answer repeats itself where this share of its tokens ends a piece of so many that it had before.
REPEATED_SHARE, PIECE_LEN = 0.2, 8
REPEATING = "all that repeat themselves"
COLUMNS = ("lookup over plain", "auto over plain", "lowest quarter of it", "auto over auto without")
# What people ask an assistant, written for this measurement.
EVERYDAY = tuple(Path(__file__).with_name("everyday.txt").read_text(encoding="utf-8").splitlines())
NAMES = ("king", "man", "girl", "mother", "house", "bird", "horse", "wood")


app = service_app()


def file_option(words: str, metavar: str, *names: str) -> object:
    """An option with a file that is there."""
    return typer.Option(*names, help=words, metavar=metavar, show_default=False, exists=True, dir_okay=False)


class Prompt(NamedTuple):
    """A text to ask, and its kind; a text alone is continued, and not answered."""

    kind: str
    text: str
    is_chat: bool = True


class Length(NamedTuple):
    """Most tokens of an answer, and the temperature of all."""

    tokens: int
    temperature: float = 0.0


Found = dict[str, dict[str, list[Timed]]]
"""Answers by kind and setting."""


def copy_set(passages: Sequence[str], size: int, seed: int = 0) -> Iterator[Prompt]:
    """Prompts of each kind, `size` of them; passages are paragraphs, and one that is edited has the word to replace."""
    source = random.Random(seed)
    fitting = [each for each in passages if MIN_CHARS <= len(each) <= MAX_CHARS]
    for _ in range(size):
        yield Prompt(REPEAT, f"Repeat this text word for word, and write nothing else.\n\n{source.choice(fitting)}")
        word = source.choice(NAMES)
        text = source.choice([each for each in fitting if f" {word} " in each])
        yield Prompt(EDIT, f'Copy this text, but replace the word "{word}" by "teacher". Write only it.\n\n{text}')
        three = source.sample(fitting, 3)
        listed = "\n".join(f"{number}. {each}" for number, each in enumerate(three, start=1))
        yield Prompt(EXTRACT, f"Here are three paragraphs.\n\n{listed}\n\nQuote paragraph {source.randint(1, 3)}.")


def questions(file: Path, size: int, seed: int = 0) -> Iterator[Prompt]:
    """First turns of each category of Spec-Bench, at most `size` (Xia et al., 2024, arXiv 2401.07851)."""
    by_category = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        by_category[entry["category"]].append(entry["turns"][0])
    source = random.Random(seed)
    for category, texts in by_category.items():
        for text in source.sample(texts, min(size, len(texts))):
            yield Prompt(category, text)


def answer(client: Client, prompt: Prompt, setting: Speculation, length: Length, salt: str) -> Timed:
    """Answer to one prompt, with its time."""
    options = GenerationOptions(
        max_tokens=length.tokens,
        temperature=length.temperature,
        seed=1,
        ignore_eos=not prompt.is_chat,
        speculation=setting,
        cache_salt=salt,
        timeout_s=TIMEOUT_S,
    )
    if prompt.is_chat:
        stream = client.chat([ChatMessage(role="user", content=prompt.text)], **options)
    else:
        stream = client.generate(prompt.text, **options)
    return read_timed(stream)


def measure(client: Client, prompts: Sequence[Prompt], length: Length, has_draft: bool, asks: int = 1) -> Found:
    """The answers by kind and setting, of so many to a prompt the one with the median time. Raises TokensDiffer."""
    settings = {
        PLAIN: Speculation(enabled=False),
        LOOKUP: Speculation(drafter="lookup"),
        AUTO: Speculation(),
        **({WITHOUT: Speculation(drafter="model")} if has_draft else {}),
    }
    found: Found = defaultdict(lambda: defaultdict(list))
    numbers = count()
    for turn, prompt in enumerate(prompts):
        taken: dict[str, list[Timed]] = {name: [] for name in settings}
        for ask in range(asks):
            for name in rotated([*settings], turn + ask):
                salt = f"{time.time_ns()}-{next(numbers)}"
                taken[name].append(answer(client, prompt, settings[name], length, salt))
        answers = {name: middle(some) for name, some in taken.items()}
        if len({each.token_ids for some in taken.values() for each in some}) > 1:
            raise TokensDiffer(f"{prompt.text!r} was answered in different ways by {', '.join(answers)}")
        if len(answers[PLAIN].token_ids) < 8:
            # An answer of a few words is too short to measure.
            continue
        kind = REPEATING if repeats(answers[PLAIN].token_ids) else prompt.kind
        for name, each in answers.items():
            found[kind][name].append(each)
    return found


def middle(taken: Sequence[Timed]) -> Timed:
    """The answer of median time; of an even number the slower one."""
    return sorted(taken, key=lambda each: each.token_us)[len(taken) // 2]


def repeats(token_ids: Sequence[int]) -> bool:
    """Whether an answer goes in circles: much of it stands in it before, in pieces of PIECE_LEN tokens."""
    pieces = [tuple(token_ids[end - PIECE_LEN : end]) for end in range(PIECE_LEN, len(token_ids) + 1)]
    return len(pieces) - len(set(pieces)) > REPEATED_SHARE * len(token_ids)


def render(found: Found) -> str:
    """Table of each kind's median ratios to plain decoding with their intervals, and tokens a pass of the target.

    All of all kinds are in the row before the last, without answers that repeat themselves, which have the last.
    """
    whole: dict[str, list[Timed]] = defaultdict(list)
    for kind in found.keys() - {REPEATING}:
        for name, each in found[kind].items():
            whole[name] += each
    kinds = {kind: taken for kind, taken in found.items() if kind != REPEATING} | {"all others": whole}
    kinds |= {kind: taken for kind, taken in found.items() if kind == REPEATING}
    return markdown(
        ["kind", "answers", "plain, ms a token", *COLUMNS, "tokens a pass: lookup", "auto"],
        [_row(kind, taken) for kind, taken in kinds.items() if taken],
    )


def _row(kind: str, taken: dict[str, list[Timed]]) -> list[str]:
    def ratios_of(slow: str, fast: str) -> list[float]:
        pairs = zip(taken[slow], taken[fast], strict=True) if {slow, fast} <= taken.keys() else ()
        return [one.token_us / other.token_us for one, other in pairs]

    def ratio(slow: str, fast: str) -> str:
        found = ratios_of(slow, fast)
        return interval(found).show(".2f") if found else ""

    mean = {name: sum(each.tokens_a_pass for each in some) / len(some) for name, some in taken.items()}
    plain_ms = interval(each.token_us / 1e3 for each in taken[PLAIN]).show(".2f")
    lowest = f"{spread(ratios_of(PLAIN, AUTO)).low:.2f}"
    ratios = [ratio(PLAIN, LOOKUP), ratio(PLAIN, AUTO), lowest, ratio(WITHOUT, AUTO)]
    return [kind, str(len(taken[PLAIN])), plain_ms, *ratios, f"{mean[LOOKUP]:.2f}", f"{mean[AUTO]:.2f}"]


@app.command()
@grouped
def copying(  # noqa: PLR0913, one parameter for each option is how typer declares a command
    *,
    address: Gateway,
    corpus: Annotated[
        Path | None, file_option("Text, one paragraph a line, of which the copy set is made.", "TALES.txt")
    ] = None,
    spec_bench: Annotated[
        Path | None, file_option("Questions of Spec-Bench, as JSON lines.", "SPEC_BENCH.jsonl", "--questions")
    ] = None,
    turns: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 10,
    stories: Annotated[int, typer.Option(help="Openings of stories to go on with.", min=0)] = 0,
    everyday: Annotated[int, typer.Option(help="Everyday questions to ask.", callback=between(0, len(EVERYDAY)))] = 0,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 128,
    asks: Annotated[int, typer.Option(help="Times that each setting is asked a prompt; the median counts.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="Of all answers; their seed is 1.", min=0)] = 0.0,
    has_draft: Annotated[bool, typer.Option("--has-draft", help="There is a draft service beside the lookup.")] = False,
    connection: options.ConnectionOptions,
) -> None:
    """Shows what lookups bring to answers that copy from their prompts, to questions and to stories."""
    prompts = [Prompt("story", text, is_chat=False) for text in OPENINGS[:stories]]
    prompts += [Prompt("everyday", text) for text in EVERYDAY[:everyday]]
    if corpus is not None:
        prompts += copy_set(corpus.read_text(encoding="utf-8").splitlines(), turns)
    if spec_bench is not None:
        prompts += questions(spec_bench, turns)
    if not prompts:
        raise InvalidRequest("--stories", stories, "more than 0 without --everyday, --corpus and --questions")
    with Client(address, api_key=connection.api_key, tls=connection.tls(address)) as client:
        # The first ones are to warm up: the policy learns what everything costs.
        length = Length(tokens, temperature)
        measure(client, prompts[:2], length, has_draft)
        found = measure(client, prompts, length, has_draft, asks)
    how = f"at most {tokens} tokens an answer, temperature {temperature:g}, each asked {asks} times"
    print(f"{machine()}; {how}; commit {revision() or 'unknown'}.")
    print(f"Medians with intervals of 95 %.\n\n{render(found)}")


if __name__ == "__main__":
    run_app(app)
