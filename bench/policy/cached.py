"""What it costs that targets say what they have cached: microseconds of both ends, and bytes. Nothing is served.

    python -m bench.policy.cached [--blocks 26674] [--names 30] [--repeats 20]

A cache of so many blocks of 16 tokens is filled by texts of 4,096 and all of it is said; then as many names come and go
between two messages. Each figure is the least of the repeats, of
a block the median of all texts.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import typer

from gateway.sessions.placement import LinkBook, PromptPrefix
from outrider.engine.cache import BLOCK_SIZE, ROOT
from outrider.estimates.prefixes import BLOCK_TOKENS, KnownPrefixes, NewsWriter, PrefixJournal, PrefixNews
from outrider.process.options import between, run_app, service_app
from outrider.rpc.messages.round import news_from, write_news
from outrider.v1.types_pb2 import PrefixNews as NewsMessage

TEXT_TOKENS, NUM_TARGETS = 4096, 16
PER_TEXT = TEXT_TOKENS // BLOCK_SIZE

app = service_app()


@dataclass(frozen=True, slots=True)
class Cost:
    """A line of the report."""

    what: str
    value: float
    unit: str = "us"

    def __str__(self) -> str:
        return f"{self.what:<58} {self.value:>10.1f} {self.unit}"


def least_us(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of processor time of the quickest of some repeats."""
    times = []
    for _ in range(repeats):
        started_ns = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - started_ns)
    return min(times) / 1e3


def fill(journal: PrefixJournal, blocks: Sequence[int]) -> None:
    """Publishes blocks, each text's after each other."""
    for at, block in enumerate(blocks):
        tokens = [block + number for number in range(BLOCK_SIZE)]
        journal.publish(block, b"salt", block - 1 if at % PER_TEXT else ROOT, tokens)


def clear(journal: PrefixJournal, blocks: Sequence[int]) -> None:
    """Withdraws blocks, the last ones first."""
    for block in reversed(blocks):
        journal.withdraw(block)


def said(news: PrefixNews) -> bytes:
    """The message of one load."""
    message = NewsMessage()
    write_news(message, news)
    return message.SerializeToString()


def snapshot(blocks: Sequence[int], repeats: int) -> list[Cost]:
    """Costs of a new link to a full cache, all parts together."""
    journal = PrefixJournal()
    texts = [blocks[at : at + PER_TEXT] for at in range(0, len(blocks) - PER_TEXT + 1, PER_TEXT)]
    fill_us = [least_us(lambda: fill(journal, text), 1) for text in texts]  # noqa: B023
    clear_us = [least_us(lambda: clear(journal, text), 1) for text in texts]  # noqa: B023
    fill(journal, blocks)

    def parts() -> list[bytes]:
        writer, found = NewsWriter(journal), list[bytes]()
        while writer.is_due:
            found.append(said(writer.next()))
        return found

    def hear() -> None:
        known = KnownPrefixes(len(blocks))
        for part in messages:
            known.hear(news_from(NewsMessage.FromString(part)))

    messages = parts()
    return [
        Cost("device thread: a block that is published", median(fill_us) / PER_TEXT),
        Cost("device thread: a block that goes", median(clear_us) / PER_TEXT),
        Cost("whole cache: how long the device thread can be held up", least_us(journal.all, repeats)),
        Cost("whole cache: service", least_us(parts, repeats)),
        Cost("whole cache: gateway", least_us(hear, repeats)),
        Cost("whole cache: bytes", sum(map(len, messages)), f"in {len(messages)}"),
    ]


def change(blocks: Sequence[int], num_names: int, repeats: int) -> list[Cost]:
    """Costs of a message with names that came and as many that went, and of one without any."""
    journal, service_us, gateway_us, size = PrefixJournal(), list[float](), list[float](), 0
    fill(journal, blocks)
    writer, known = NewsWriter(journal), KnownPrefixes(2 * len(blocks))
    while writer.is_due:
        known.hear(writer.next())
    changing = range(len(blocks), len(blocks) + 2 * num_names * BLOCK_TOKENS // BLOCK_SIZE)
    old, new = changing[: len(changing) // 2], changing[len(changing) // 2 :]
    fill(journal, old)
    known.hear(writer.next())
    for _ in range(repeats):
        fill(journal, new)
        clear(journal, old)
        old, new = new, old
        message = b""

        def say() -> None:
            nonlocal message
            message = said(writer.next())

        service_us.append(least_us(say, 1))
        gateway_us.append(least_us(lambda: known.hear(news_from(NewsMessage.FromString(message))), 1))  # noqa: B023
        size = len(message)
    empty_us = least_us(lambda: said(writer.next()), repeats)
    return [
        Cost(f"{num_names} names came and went: service", min(service_us)),
        Cost(f"{num_names} names came and went: gateway", min(gateway_us)),
        Cost(f"{num_names} names came and went: at 20 a second", 20 * size, "bytes/s"),
        Cost("nothing new: service", empty_us),
        Cost("nothing new: bytes", len(said(writer.next())), "bytes"),
    ]


def choice(repeats: int) -> list[Cost]:
    """Costs of looking a prompt up that is cached everywhere."""
    prompt, books = range(TEXT_TOKENS), [LinkBook(0.0, 1 << 20, BLOCK_SIZE) for _ in range(NUM_TARGETS)]
    prefix = asyncio.run(PromptPrefix.of(prompt, b"salt"))
    for book in books:
        book.hear(PrefixNews(0, prefix.names))
    names_us = least_us(lambda: PromptPrefix(b"", prefix.chain[:1]).grown(prompt), repeats)
    return [
        Cost(f"a prompt of {TEXT_TOKENS} tokens: its names", names_us),
        Cost(f"the same at {NUM_TARGETS} targets", least_us(lambda: [book.hit_len(prefix) for book in books], repeats)),
    ]


@app.command()
def main(
    blocks: Annotated[int, typer.Option(callback=between(256, 1 << 17), help="Blocks of the cache.")] = 26_674,
    names: Annotated[int, typer.Option(callback=between(1, 1024), help="Names that come and go.")] = 30,
    repeats: Annotated[int, typer.Option(callback=between(1, 1000), help="Of each figure.")] = 20,
) -> None:
    """Prints what each part costs."""
    for cost in (*snapshot(range(blocks), repeats), *change(range(blocks), names, repeats), *choice(repeats)):
        print(cost)


if __name__ == "__main__":
    run_app(app)
