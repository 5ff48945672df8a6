"""What looking up costs, and what it finds: no model, no process, no GPU.

    python -m bench.lookup [--tokens 100000] [--store-tokens 3000000] [--rows 8] [--store FILE]

The texts are this repository's documents, in the embedded target's tokens, over and over up to --tokens; a datastore
of --store-tokens is made of random tokens with the frequencies of words, and phrases that come again. Prints Markdown
tables; nothing fails by how fast anything is.
"""

import argparse
import random
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, quantiles

import numpy as np
import tokenizers

from bench.common import REPOSITORY, machine, markdown, revision
from gateway.lookup.chains import Chains
from gateway.lookup.memory import MAX_BYTES_PER_TOKEN, Memories, TenantMemory
from gateway.lookup.rates import LookupRates
from gateway.lookup.session import SLICE, LookupSession
from outrider.datastore.build import build
from outrider.datastore.reader import Datastore
from outrider.model_names import embedded_model
from outrider.vocabulary import Vocabulary

TENANT_TOKENS = 1_000_000
PHRASE_LEN, DOCUMENT_LEN = 12, 1000
WORDS, PHRASES = 30_000, 200_000
QUERIES = 5000


def timed_us(work: Callable[[], object]) -> float:
    """Microseconds of computing that a call takes; what else the machine does meanwhile is not in them."""
    started_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started_ns) / 1000


def spread_us(times_us: Sequence[float]) -> list[str]:
    """Median and 99th percentile, in microseconds."""
    found = quantiles(times_us, n=100)
    return [f"{found[49]:.1f}", f"{found[98]:.1f}"]


def document_tokens() -> list[list[int]]:
    """Every Markdown file of the repository, in the embedded target's tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{embedded_model('target')}/tokenizer.json")
    paths = sorted(REPOSITORY.glob("docs/**/*.md"))
    return [tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids for path in paths]


def index_rows(texts: Sequence[Sequence[int]], num_tokens: int) -> list[list[str]]:
    """Microseconds a token of adding to an index, by how many come at once."""
    text = [token_id for tokens in texts for token_id in tokens]
    text = (text * (1 + num_tokens // len(text)))[:num_tokens]
    rows = []
    for size in (1, 4, SLICE, len(text)):
        chains, slices = Chains(len(text)), [text[start : start + size] for start in range(0, len(text), size)]
        took_us = sum(timed_us(lambda part=part, chains=chains: chains.extend(part)) for part in slices)  # type: ignore[misc]
        rows.append([f"{size:,}", f"{took_us / len(text):.2f}", f"{chains.num_bytes / len(text):.1f}"])
    return rows


def replay(session: LookupSession, answer: Sequence[int], num_rows: int, *, chain: bool) -> tuple[list[float], int]:
    """Decodes a known answer with what is looked up; microseconds of each look, and rounds that it took."""
    times_us, place = [], 0
    while place < len(answer):
        started_ns = time.thread_time_ns()
        look = session.look(num_rows, num_rows, chain=chain)
        times_us.append((time.thread_time_ns() - started_ns) / 1000)
        accepted, row = list[int](), 0
        for token_id in answer[place:]:
            row = next((each for each in look.tree.children(row) if look.tree.token_ids[each - 1] == token_id), 0)
            if not row:
                break
            accepted.append(row)
        session.observe(look, accepted)
        session.extend(answer[place : place + len(accepted) + 1])
        place += len(accepted) + 1
    return times_us, len(times_us)


def look_rows(texts: Sequence[Sequence[int]], num_rows: int) -> list[list[str]]:
    """Looks while the second half of each text is decoded: with its first half alone, and with more to look up in."""
    memories = Memories(TENANT_TOKENS, TENANT_TOKENS * MAX_BYTES_PER_TOKEN)
    for tokens in texts:
        memories.of("filled").add(array("i", tokens))
    nothing = list[int]()
    settings: list[tuple[str, TenantMemory | None, bool, bool]] = [
        ("own text, chain", None, False, True),
        ("own text", None, False, False),
        ("and the answer as prediction", None, True, False),
        ("and a memory that has it", memories.of("filled"), False, False),
    ]
    rows = []
    for name, memory, is_predicted, chain in settings:
        rates, times_us, num_rounds, num_tokens = LookupRates(), list[float](), 0, 0
        for tokens in texts:
            half = len(tokens) // 2
            answer = tokens[half:]
            prediction = answer if is_predicted else nothing
            session = LookupSession(tokens[:half], prediction=prediction, memory=memory, rates=rates)
            session.look(1, 1)
            looked_us, rounds = replay(session, answer, num_rows, chain=chain)
            times_us += looked_us
            num_rounds, num_tokens = num_rounds + rounds, num_tokens + len(answer)
        rows.append([name, *spread_us(times_us), f"{fmean(times_us):.1f}", f"{num_tokens / num_rounds:.2f}"])
    return rows


def random_documents(num_tokens: int) -> Iterator[list[int]]:
    """Documents of phrases that come again and words between them, in Zipf's distribution."""
    draw = np.random.default_rng(1)
    phrases = draw.zipf(1.3, (PHRASES, PHRASE_LEN)) % WORDS
    for _ in range(num_tokens // DOCUMENT_LEN):
        parts = phrases[draw.integers(0, PHRASES, DOCUMENT_LEN // PHRASE_LEN + 1)]
        parts[:, -2:] = draw.zipf(1.3, (len(parts), 2)) % WORDS
        yield parts.ravel()[:DOCUMENT_LEN].tolist()


def store_rows(path: Path, num_tokens: int) -> list[list[str]]:
    """A datastore, built unless there is a file already: size, times to open it and to look up in it."""
    vocabulary, rows = Vocabulary.of((str(number), number) for number in range(WORDS)), []
    if not path.exists():
        took_us = timed_us(lambda: build(random_documents(num_tokens), vocabulary, path, print))
        rows.append(["build, s", f"{took_us / 1e6:.1f}"])
    opened_us = timed_us(lambda: Datastore.open(path, vocabulary))
    store, draw = Datastore.open(path, vocabulary), random.Random(2)
    first_us, later_us, lengths = [], [], []
    for _ in range(QUERIES):
        end = draw.randrange(64, len(store.tokens))
        text = array("i", store.tokens[end - 20 : end])
        text[draw.randrange(12)] = draw.randrange(WORDS)
        first_us.append(timed_us(lambda text=text: store.find(text)))  # type: ignore[misc]
        later_us.append(timed_us(lambda text=text: store.find(text)))  # type: ignore[misc]
        lengths.append(max((length for _, length in store.find(text)), default=0))
    table_us = [timed_us(lambda: store.tables.after(draw.randrange(WORDS))) for _ in range(QUERIES)]
    return [
        ["tokens", f"{store.head.num_tokens:,}"],
        ["bytes a token", f"{path.stat().st_size / store.head.num_tokens:.1f}"],
        *rows,
        ["open, ms", f"{opened_us / 1000:.2f}"],
        ["look, us, p50 and p99", " and ".join(spread_us(first_us))],
        ["the same look again, us, p50 and p99", " and ".join(spread_us(later_us))],
        ["length of the longest match, mean", f"{fmean(lengths):.1f}"],
        ["table, us, p50 and p99", " and ".join(spread_us(table_us))],
    ]


def tenant_rows() -> list[list[str]]:
    """Table of what a tenant's memory takes, and what filling it with requests of 2,000 tokens costs."""
    memories = Memories(TENANT_TOKENS, TENANT_TOKENS * MAX_BYTES_PER_TOKEN)
    memory, draw, rows = memories.of("one"), np.random.default_rng(3), []
    rows.append(["0", f"{memory.num_bytes:,}", "", ""])
    request_us = list[float]()
    for number in range(1, 1001):
        text = array("i", (draw.zipf(1.3, 2000) % WORDS).astype(np.int32).tobytes())
        request_us.append(timed_us(lambda text=text: memory.add(text)))  # type: ignore[misc]
        if number in {1, 10, 100, 1000}:
            rows.append([f"{2000 * number:,}", f"{memory.num_bytes:,}", f"{len(memory):,}", f"{max(request_us):.0f}"])
            request_us.clear()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--store-tokens", type=int, default=3_000_000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--store", type=Path, default=None)
    options = parser.parse_args()
    print(f"{machine()}, commit {revision()}\n")
    texts = document_tokens()
    print(markdown(("tokens at once", "us a token", "bytes a token"), index_rows(texts, options.tokens)))
    print(f"\n{len(texts)} documents, {sum(map(len, texts)):,} tokens, {options.rows} rows\n")
    header = ("looked up in", "look p50, us", "p99", "mean", "tokens a round")
    print(markdown(header, look_rows(texts, options.rows)) + "\n")
    print(markdown(("told", "bytes", "kept", "slowest request, us"), tenant_rows()) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or Path(folder) / "store"
        print(markdown(("datastore", ""), store_rows(path, options.store_tokens)))


if __name__ == "__main__":
    main()
