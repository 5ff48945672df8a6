"""Plain against speculative decoding through the whole stack: real processes, real gRPC, the client's own clock.

Requests with different draft counts are interleaved in one run, so that a noisy machine touches all of them alike.
Knows nothing about models: it sees what a client sees. Prints a Markdown table; `--json FILE` keeps every sample.

    python -m bench.speed [--rounds N] [--tokens N] [--temperature T] [--target DIR] [--draft DIR] [--dtype TYPE]
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio

from bench import machine
from bench.stack import served
from outrider.rpc import open_channel
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

Generate = grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]

PROMPTS = (
    "Once upon a time there was a miller who had",
    "The princess looked out of her window and saw",
    "A soldier came marching home from the war,",
    "Every night the golden bird came and",
)
SETTINGS: dict[str, pb.SpeculationSettings] = {
    "plain": pb.SpeculationSettings(enabled=False),
    "K = 1": pb.SpeculationSettings(draft_count=1),
    "K = 2": pb.SpeculationSettings(draft_count=2),
    "K = 4": pb.SpeculationSettings(draft_count=4),
    "K = 6": pb.SpeculationSettings(draft_count=6),
    "auto": pb.SpeculationSettings(),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it."""

    setting: str
    token_ids: tuple[int, ...]
    seconds: float
    first_token_s: float
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    evaluated_tokens: int
    draft_compute_us: int
    verify_compute_us: int

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token, which is the prompt's."""
        return (len(self.token_ids) - 1) / (self.seconds - self.first_token_s)


async def measure(generate: Generate, name: str, request: pb.GenerateRequest) -> Sample:
    """Runs one request to its end."""
    start = time.perf_counter()
    first, draft_us, verify_us = 0.0, 0, 0
    token_ids: list[int] = []
    async for message in generate(request):
        first = first or time.perf_counter() - start
        if message.HasField("completion"):
            figures = message.completion.speculation
            break
        token_ids += [token.token_id for token in message.round.tokens]
        draft_us += message.round.facts.draft_compute_us
        verify_us += message.round.facts.verify_compute_us
    seconds = time.perf_counter() - start
    counts = (figures.rounds, figures.draft_tokens, figures.accepted_tokens, figures.evaluated_tokens)
    return Sample(name, tuple(token_ids), seconds, first, *counts, draft_us, verify_us)


async def collect(address: str, options: argparse.Namespace) -> list[Sample]:
    """Interleaves all settings over all prompts; the first pass warms up and is dropped."""
    samples: list[Sample] = []
    async with open_channel(address) as channel:
        generate = GenerationServiceStub(channel).Generate
        for turn in range(options.rounds + 1):
            for seed, prompt in enumerate(PROMPTS):
                answers = [
                    await measure(generate, name, request_for(prompt, seed, SETTINGS[name], options))
                    for name in rotated(list(SETTINGS), turn)
                ]
                if len({answer.token_ids for answer in answers}) != 1:
                    raise SystemExit(f"Tokens differ between settings for {prompt!r}, seed {seed}.")
                samples += answers if turn else []
    return samples


def rotated(names: list[str], turn: int) -> list[str]:
    """The settings in another order each turn, so that none always follows the same one."""
    start = turn % len(names)
    return names[start:] + names[:start]


def request_for(
    prompt: str, seed: int, settings: pb.SpeculationSettings, options: argparse.Namespace
) -> pb.GenerateRequest:
    """The same request for every setting but for the speculation."""
    request = pb.GenerateRequest(text=prompt, max_tokens=options.tokens, seed=seed, speculation=settings)
    request.sampling.temperature = options.temperature
    request.sampling.ignore_eos = True
    return request


def table(samples: list[Sample]) -> str:
    """One row a setting: medians with their quartiles."""
    header = (
        "| setting | tokens/s, median (quartiles) | over plain, median (quartiles) | tokens a target pass "
        "| acceptance rate | ms a pass: target, draft |"
    )
    return "\n".join([header, "|---|---|---|---|---|---|", *(row(name, samples) for name in SETTINGS)])


def row(name: str, samples: list[Sample]) -> str:
    """A row of the table; the ratio compares each request with the plain one of the same turn and prompt."""
    plain = [sample.tokens_per_s for sample in samples if sample.setting == "plain"]
    own = [sample for sample in samples if sample.setting == name]
    ratios = [sample.tokens_per_s / base for sample, base in zip(own, plain, strict=True)]
    rounds, accepted, evaluated, verify_us, draft_us = (
        sum(getattr(sample, field) for sample in own)
        for field in ("rounds", "accepted_tokens", "evaluated_tokens", "verify_compute_us", "draft_compute_us")
    )
    cells = (
        name,
        spread([sample.tokens_per_s for sample in own], ".0f"),
        spread(ratios, ".2f"),
        f"{1 + accepted / rounds:.2f}",
        f"{accepted / evaluated:.3f}" if evaluated else "-",
        f"{verify_us / rounds / 1e3:.2f}, {draft_us / rounds / 1e3:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def spread(values: list[float], form: str) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured passes over all prompts and settings")
    parser.add_argument("--tokens", type=int, default=96, help="tokens a request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target", default="models/target")
    parser.add_argument("--draft", default="models/draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of the target")
    parser.add_argument("--json", type=Path, help="file for all samples")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> None:
    """Starts the stack, measures, prints."""
    async with served(options) as address:
        samples = await collect(address, options)
    print(f"{options.target} with {options.draft}, {options.dtype}, {options.tokens} tokens, ", end="")
    print(f"temperature {options.temperature:g}, {options.threads} threads, ", end="")
    print(f"{options.rounds * len(PROMPTS)} requests a setting, interleaved; {machine.describe()}\n")
    print(table(samples))
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples]))


if __name__ == "__main__":
    asyncio.run(run(parse()))
