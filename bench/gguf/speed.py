"""Speed of a file by llama.cpp and by our services, in turns: plain and speculative, and what rows cost.

One stream, greedy, every prompt new. All settings of both answer a prompt before the next one is asked, in another
order each time, so that whatever else the machine does meets all of them. Speeds are those after the first tokens.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from statistics import mean, median

import torch

from bench.gguf.lab import Llama
from bench.gguf.subjects import Subject
from outrider.cli.bench.common import AUTO, PLAIN, TokensDiffer, interval, markdown, rotated, served, spread, timed
from outrider.cli.bench.rounds.instruments import EngineLoop, read_ms
from outrider.cli.bench.rounds.samples import CONTEXT_LEN
from outrider.cli.running import Interrupts, note
from outrider.client import AsyncClient, Speculation
from outrider.engine.runner import ModelRunner
from outrider.model_files.gguf.config import EMBEDDING, OUTPUT
from outrider.model_files.gguf.header import GgufFile

OURS = {PLAIN: Speculation(enabled=False), AUTO: Speculation()}
LLAMA = "llama.cpp"
# Prompts of which no figure is kept: the gateway learns what everything costs.
WARM_UP = 2
ROWS = (1, 5, 9)
# More than any cache holds.
MEMORY_BYTES = 1 << 29
KV_TOKENS = 4096
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """How often and how much."""

    dtype: str
    threads: int
    turns: int
    tokens: int
    guesses: Sequence[int]
    """Numbers of guesses that llama.cpp makes, from repetitions and by a draft."""

    def llama_settings(self, subject: Subject) -> list[str]:
        """Names of its settings; plain is the first."""
        ways = ("lookup", "draft") if subject.draft_file is not None else ("lookup",)
        return [PLAIN, *(f"{way} {each}" for way in ways for each in self.guesses)]


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One answer: seconds and passes of what came after the first tokens."""

    token_ids: Sequence[int]
    first_s: float
    tokens_per_s: float
    tokens_a_pass: float


@dataclass(slots=True)
class Found:
    """Everything that was measured of a file; lists have one entry a turn."""

    llama: dict[str, list[SpeedRun]]
    ours: dict[str, list[SpeedRun]]
    llama_ms: dict[int, list[float]] = field(default_factory=dict)
    """Milliseconds of a step by its rows."""
    ours_ms: dict[int, list[float]] = field(default_factory=dict)
    bytes_per_s: list[float] = field(default_factory=list)
    """Bytes a second that all threads read from memory."""

    @property
    def best(self) -> str:
        """llama.cpp's fastest speculative setting."""
        return max(self.llama.keys() - {PLAIN}, key=lambda name: median(run.tokens_per_s for run in self.llama[name]))


async def measure(subject: Subject, plan: SpeedPlan, llama: Llama, interrupts: Interrupts) -> Found:
    """Answers of both, and rows of both. Raises TokensDiffer where our speculation changes a token."""
    found = Found({name: [] for name in plan.llama_settings(subject)}, {name: [] for name in OURS})
    draft = subject.draft_file and str(subject.draft_file)
    llama.ask("load", file=str(subject.file), threads=plan.threads, draft=draft)
    # The clock makes prompts that no earlier run had.
    prompts = await subject.prompts(int(time.time()) % 100_000, plan.turns + WARM_UP)
    async with (
        served(subject.stack(plan.dtype, plan.threads), interrupts) as addresses,
        AsyncClient(addresses.gateway) as client,
    ):
        for turn, prompt in enumerate(prompts):
            note(f"{subject}, turn {turn + 1} of {len(prompts)}")
            said = await answers(client, llama, prompt, [*found.llama], plan.tokens, turn)
            if said[True, PLAIN].token_ids != said[True, AUTO].token_ids:
                raise TokensDiffer(f"Prompt {turn} of {subject} has other tokens with speculation than without.")
            if turn >= WARM_UP:
                for (is_ours, name), run in said.items():
                    (found.ours if is_ours else found.llama)[name].append(run)
    await asyncio.to_thread(measure_rows, subject, plan, llama, found)
    return found


async def answers(
    client: AsyncClient, llama: Llama, prompt: Sequence[int], settings: Sequence[str], tokens: int, turn: int
) -> dict[tuple[bool, str], SpeedRun]:
    """Answers to one prompt by all settings, ours under True."""
    said: dict[tuple[bool, str], SpeedRun] = {}
    names = {f"{LLAMA} {name}": (False, name) for name in settings} | {f"ours {name}": (True, name) for name in OURS}
    for key in rotated([*names], turn):
        is_ours, name = names[key]
        if is_ours:
            said[True, name] = await ask(client, prompt, name, tokens)
            continue
        way, _, guesses = name.partition(" ")
        asked = partial(llama.ask, "generate", prompt=list(prompt), tokens=tokens, setting=way, count=int(guesses or 0))
        told = await asyncio.to_thread(asked)
        later = len(told["tokens"]) - 1
        run = SpeedRun(told["tokens"][:tokens], told["first_s"], later / told["seconds"], later / told["passes"])
        said[False, name] = run
    return said


async def ask(client: AsyncClient, prompt: Sequence[int], setting: str, tokens: int) -> SpeedRun:
    """Asks our server for an answer."""
    rounds, first_s, seconds = await timed(
        client,
        prompt,
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        cache_salt=f"{time.time_ns()}",
        speculation=OURS[setting],
        timeout_s=TIMEOUT_S,
    )
    token_ids = [token.token_id for each in rounds for token in each.tokens]
    later = len(token_ids) - len(rounds[0].tokens)
    return SpeedRun(token_ids, first_s, later / (seconds - first_s), later / (len(rounds) - 1))


def measure_rows(subject: Subject, plan: SpeedPlan, llama: Llama, found: Found) -> None:
    """Steps of several rows by both in turns, in this process and in llama.cpp's, and the memory's speed."""
    runner = ModelRunner.load(str(subject.file), dtype=plan.dtype, num_threads=plan.threads, kv_tokens=KV_TOKENS)
    loop, memory = EngineLoop(runner), torch.zeros(MEMORY_BYTES // 4)
    context = [(7 * index + 11) % runner.vocabulary_size for index in range(CONTEXT_LEN)]
    for turn in range(plan.turns):
        note(f"{subject}, rows, turn {turn + 1} of {plan.turns}")
        found.bytes_per_s.append(1e3 * memory.nbytes / read_ms(memory, plan.threads))
        for rows in ROWS[:: -1 if turn % 2 else 1]:
            loop.step_ms(rows, 0.0)
            found.ours_ms.setdefault(rows, []).append(loop.step_ms(rows, 0.0))
            llama.ask("step_ms", rows=rows, context=context)
            found.llama_ms.setdefault(rows, []).append(llama.ask("step_ms", rows=rows, context=context))


def step_bytes(file: GgufFile) -> int:
    """Bytes that a step of one row reads: of an embedding of its own it reads one row, which does not count."""
    skipped = {EMBEDDING} if OUTPUT in file.tensors else set()
    return sum(place.size for name, place in file.tensors.items() if name not in skipped)


def render(results: dict[Subject, Found]) -> str:
    """Tables of speeds, of the ratios that are aimed at, and of rows."""
    speeds, ratios, rows = [], [], []
    for subject, found in results.items():
        settings = {f"{LLAMA}, {name}": runs for name, runs in found.llama.items()}
        settings |= {f"ours, {name}": runs for name, runs in found.ours.items()}
        base = found.llama[PLAIN]
        for name, runs in settings.items():
            over = interval(one.tokens_per_s / two.tokens_per_s for one, two in zip(runs, base, strict=True))
            tokens = f"{mean(run.tokens_a_pass for run in runs):.2f}"
            speed = spread(run.tokens_per_s for run in runs).show(".1f")
            first = spread(1e3 * run.first_s for run in runs).show(".0f")
            speeds.append([str(subject), name, speed, over.show(".2f"), tokens, first])
        ratios.append([str(subject), *ratio_cells(found)])
        rows.append([str(subject), *row_cells(subject, found)])
    return "\n\n".join(
        (
            markdown(
                ["file", "setting", "tokens/s", "over llama.cpp plain", "tokens a pass", "first token, ms"], speeds
            ),
            markdown(
                ["file", "plain over plain", "auto over its best", "its best", "same answers", "same tokens"], ratios
            ),
            markdown(["file", *row_head()], rows),
            "Speeds and milliseconds are medians with quartiles, ratios medians of those of one prompt or turn with "
            "intervals of 95 %. Same: of our answers and llama.cpp's plain ones, and tokens before they part. Share: "
            "tokens/s of plain times the file's bytes of a step over the bytes a second that the threads read.",
        )
    )


def ratio_cells(found: Found) -> list[str]:
    """What the aims are about, and how far texts agree."""
    pairs = [("plain", found.llama[PLAIN]), ("auto", found.llama[found.best])]
    ratios = [
        interval(one.tokens_per_s / two.tokens_per_s for one, two in zip(found.ours[name], theirs, strict=True))
        for name, theirs in pairs
    ]
    texts = [(run.token_ids, other.token_ids) for run, other in zip(found.ours[PLAIN], found.llama[PLAIN], strict=True)]
    same = sum(tuple(one) == tuple(two) for one, two in texts)
    shared = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*text, strict=False))) for text in texts]
    return [*(each.show(".2f") for each in ratios), found.best, f"{same} of {len(texts)}", f"{mean(shared):.0f}"]


def row_head() -> list[str]:
    """Columns of `row_cells`."""
    return [
        "one row, ms: ours",
        LLAMA,
        *(f"{n} rows over one: {who}" for n in ROWS[1:] for who in ("ours", LLAMA)),
        "share",
    ]


def row_cells(subject: Subject, found: Found) -> list[str]:
    """Milliseconds of one row, how many times that several take, and the share of the memory's speed."""
    sides = (found.ours_ms, found.llama_ms)
    cells = [spread(side[1]).show("#.3g") for side in sides]
    for rows in ROWS[1:]:
        cells += [interval(a / b for a, b in zip(side[rows], side[1], strict=True)).show(".2f") for side in sides]
    size = step_bytes(GgufFile.read(subject.file))
    speed = median(run.tokens_per_s for run in found.ours[PLAIN])
    return [*cells, f"{speed * size / median(found.bytes_per_s):.2f}"]
