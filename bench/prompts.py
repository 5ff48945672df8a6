"""Long prompts: how soon many answers begin that are asked for at once, and the gaps of streams beside one. No gate.

    python -m bench.prompts [--old DIR] [--target MODEL] [--speculation auto] [--prompts 20] [--turns 1] [--gap-turns 3]

With --old another checkout serves the same pair side by side, each turn goes to one and then to the other, and tokens
are compared on the way. Every prompt is of random tokens and begins like no other, so that no cache knows it.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

from bench.common import OPENINGS, machine, markdown, revision, spread, timed
from bench.house.stack import serving
from bench.versions import compare, in_turns
from outrider.client import AsyncClient, GenerationOptions, Round, Speculation

SPECULATION = {"auto": Speculation(), "plain": Speculation(enabled=False)}
TIMEOUT_S = 600.0
# Of the ids of any model that is served here, without those that end a text.
TOKEN_IDS = range(10, 4000)
# Running streams are watched for so long before the prompt comes, after their first rounds.
QUIET_S, FIRST_ROUNDS = 3.0, 10


@dataclass(frozen=True, slots=True)
class Beside:
    """Waits of running streams beside a long prompt, as their client saw them: seconds."""

    quiet_gaps: list[float]
    """Gaps between two rounds of a stream before the prompt was sent."""
    gaps: list[float]
    """Gaps of which some part lies between the sending and the prompt's first token."""
    first_token_s: float
    token_ids: list[int]

    @property
    def median_s(self) -> float:
        """The median round without the prompt."""
        return statistics.median(self.quiet_gaps)

    @property
    def slowdown(self) -> float:
        """99 of 100 gaps beside the prompt are at most so many median rounds without it."""
        return percentile_99(self.gaps) / self.median_s


def percentile_99(values: Sequence[float]) -> float:
    """99th percentile by linear interpolation within the values, of which there are at least two."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def prompt_of(seed: int, length: int) -> list[int]:
    """Random token ids, the same for a seed."""
    return random.Random(seed).choices(TOKEN_IDS, k=length)


def options(given: argparse.Namespace, seed: int, max_tokens: int) -> GenerationOptions:
    """Options that every request is asked with."""
    return {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "ignore_eos": True,
        "speculation": SPECULATION[given.speculation],
        "timeout_s": TIMEOUT_S,
    }


def split(times: Iterable[Sequence[float]], sent_s: float, answered_s: float) -> tuple[list[float], list[float]]:
    """The gaps between the rounds of each stream: those before a prompt was sent, and those beside it."""
    gaps = [pair for each in times for pair in pairwise(each)]
    quiet = [last - first for first, last in gaps if last <= sent_s]
    return quiet, [last - first for first, last in gaps if last > sent_s and first < answered_s]


async def first_tokens(client: AsyncClient, given: argparse.Namespace, seed: int) -> tuple[list[float], list[int]]:
    """Seconds to the first token of each of the prompts that are sent at once, and the tokens of all in order."""

    async def ask(number: int) -> tuple[float, list[int]]:
        prompt = prompt_of(seed + number, given.prompt_tokens)
        rounds, first_s, _ = await timed(client, prompt, **options(given, number, given.tokens))
        return first_s, [token.token_id for each in rounds for token in each.tokens]

    answers = await asyncio.gather(*(ask(number) for number in range(given.prompts)))
    return [first_s for first_s, _ in answers], [token_id for _, token_ids in answers for token_id in token_ids]


async def beside(client: AsyncClient, given: argparse.Namespace, seed: int) -> Beside:
    """Lets streams run, sends a prompt into their midst, and watches them until it has its first token."""
    times: list[list[float]] = [[] for _ in range(given.streams)]
    are_warm = asyncio.Event()

    async def run(number: int) -> None:
        text = OPENINGS[number % len(OPENINGS)]
        async with client.generate(text, **options(given, number, given.stream_tokens)) as stream:
            async for event in stream:
                if isinstance(event, Round):
                    times[number].append(time.perf_counter())
                    if min(map(len, times)) == FIRST_ROUNDS:
                        are_warm.set()
        raise RuntimeError(f"a stream has ended beside the prompt: it needs more than {given.stream_tokens} tokens")

    async def watch() -> Beside:
        await are_warm.wait()
        for each in times:
            each.clear()
        await asyncio.sleep(QUIET_S)
        sent_s = time.perf_counter()
        prompt = prompt_of(seed, given.beside_tokens)
        rounds, first_s, _ = await timed(client, prompt, **options(given, seed, 4))
        token_ids = [token.token_id for each in rounds for token in each.tokens]
        return Beside(*split(times, sent_s, sent_s + first_s), first_s, token_ids)

    watching = asyncio.create_task(watch())
    tasks = [watching, *(asyncio.create_task(run(number)) for number in range(given.streams))]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()
    return watching.result()


async def measure(addresses: dict[str, str], given: argparse.Namespace) -> None:
    """Measures checkouts in turns, and prints two tables. Raises TokensDiffer."""
    firsts: dict[str, list[list[float]]] = defaultdict(list)
    gaps: dict[str, list[Beside]] = defaultdict(list)
    async with AsyncExitStack() as exits:
        clients = {name: await exits.enter_async_context(AsyncClient(addresses[name])) for name in addresses}
        seeds = count(1000, 1000)
        for client in clients.values():
            await timed(client, OPENINGS[0], max_tokens=32, speculation=SPECULATION[given.speculation])
        for turn in range(given.turns):
            seed, tokens = next(seeds), {}
            for name in in_turns(clients, turn):
                seconds, tokens[name] = await first_tokens(clients[name], given, seed)
                firsts[name].append(sorted(seconds))
            compare(tokens, f"{given.prompts} prompts at once")
        for turn in range(given.gap_turns):
            seed = next(seeds)
            for name in in_turns(clients, turn):
                gaps[name].append(await beside(clients[name], given, seed))
            compare({name: each[-1].token_ids for name, each in gaps.items()}, "a prompt beside streams")
    if firsts:
        print(render_firsts(firsts))
    if gaps:
        print(f"\n{render_gaps(gaps)}")


def render_firsts(firsts: dict[str, list[list[float]]]) -> str:
    """Seconds to first tokens by checkout: first, mean and last, the median of turns, and the mean over the old one."""
    means = {name: [statistics.fmean(each) for each in turns] for name, turns in firsts.items()}
    rows = []
    for name, turns in firsts.items():
        ratios = spread(new / old for new, old in zip(means[name], means.get("old", means[name]), strict=True))
        ends = [spread(each[place] for each in turns).show(".2f") for place in (0, -1)]
        rows.append([name, ends[0], spread(means[name]).show(".2f"), ends[1], ratios.show(".3f")])
    return markdown(["checkout", "first token of the first, s", "mean, s", "of the last, s", "mean over old"], rows)


def render_gaps(gaps: dict[str, list[Beside]]) -> str:
    """Milliseconds between rounds by checkout, without the prompt and beside it, and the prompt's first token."""
    rows = []
    for name, turns in gaps.items():
        quiet = spread(each.median_s for each in turns).show(".2f", 1e3)
        quiet_99 = spread(percentile_99(each.quiet_gaps) for each in turns).show(".2f", 1e3)
        median = spread(statistics.median(each.gaps) for each in turns).show(".2f", 1e3)
        p99 = spread(percentile_99(each.gaps) for each in turns).show(".2f", 1e3)
        slowdown = spread(each.slowdown for each in turns).show(".2f")
        own = spread(percentile_99(each.gaps) / statistics.median(each.gaps) for each in turns).show(".2f")
        rows.append([name, quiet, quiet_99, median, p99, slowdown, own])
        rows[-1].append(spread(each.first_token_s for each in turns).show(".2f"))
    columns = ["median round, ms", "its p99", "beside the prompt, ms", "p99 beside", "p99 beside over median round"]
    return markdown(["checkout", *columns, "over median beside", "first token of the prompt, s"], rows)


def main() -> None:
    """Prints tables of first tokens of long prompts, and of the gaps of streams that run beside one."""
    parser = argparse.ArgumentParser(prog="python -m bench.prompts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", type=Path, help="another checkout, with its kernels built, to compare with")
    parser.add_argument("--target", help="target of both, for instance sized:200m; default: the embedded pair")
    parser.add_argument("--speculation", choices=SPECULATION, default="auto", help="of all requests")
    parser.add_argument("--prompts", type=int, default=20, help="prompts that are sent at once")
    parser.add_argument("--prompt-tokens", type=int, default=3900, help="tokens of each of them")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--turns", type=int, default=1, help="how often they are sent to each checkout")
    parser.add_argument("--streams", type=int, default=8, help="streams that run beside a prompt")
    parser.add_argument("--stream-tokens", type=int, default=3500, help="tokens of each, more than are needed")
    parser.add_argument("--beside-tokens", type=int, default=3500, help="tokens of that prompt")
    parser.add_argument("--gap-turns", type=int, default=3, help="how often it is sent to each checkout")
    given = parser.parse_args()
    roots = {"old": given.old.resolve()} if given.old else {}
    roots["new"] = Path(__file__).resolve().parents[1]
    models = ["--target", given.target] if given.target else []
    print(f"{given.target or 'embedded pair'}, speculation {given.speculation}; {machine()};")
    print(f"{given.prompts} prompts of {given.prompt_tokens} tokens at once; {given.beside_tokens} beside", end=" ")
    print(f"{given.streams} streams; commit {revision() or 'unknown'}.\n")
    with ExitStack() as stack:
        addresses = {name: stack.enter_context(serving(root, models))["gateway"] for name, root in roots.items()}
        asyncio.run(measure(addresses, given))


if __name__ == "__main__":
    main()
