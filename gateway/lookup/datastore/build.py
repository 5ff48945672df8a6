"""Makes the file of a datastore from documents of token ids."""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gateway.lookup.datastore.layout import ALIGNMENT, DEPTH, SEPARATOR, TABLE_WIDTH, DatastoreHead, Section
from outrider.errors import ModelRefused
from outrider.model_files.vocabulary import Vocabulary

TELL_EVERY = 1_000_000  # tokens

Tokens: TypeAlias = NDArray[np.uint32]
Places: TypeAlias = NDArray[np.int64]
Buffer: TypeAlias = memoryview | bytes
Tell: TypeAlias = Callable[[str], None]


def build(documents: Iterable[Iterable[int]], vocabulary: Vocabulary, out: Path, tell: Tell) -> DatastoreHead:
    """Writes a datastore, all of it or nothing, and returns its head; `tell` gets a sentence of progress at times.

    Takes about 70 bytes of memory a token. Raises ModelRefused about documents without a token and ids outside the
    vocabulary.
    """
    collected, num_documents, told = array("I", [SEPARATOR] * DEPTH), 0, 0
    for document in documents:
        before = len(collected)
        collected.extend(document)
        if len(collected) == before:
            continue
        collected.append(SEPARATOR)
        num_documents += 1
        if len(collected) - told > TELL_EVERY:
            told = len(collected)
            tell(f"{num_documents:,} documents, {told:,} tokens")
    tokens = np.frombuffer(collected, np.uint32)
    told_tokens = tokens[tokens != SEPARATOR]
    if told_tokens.size == 0:
        raise ModelRefused("There is nothing to build a datastore of: the documents have no tokens.")
    if told_tokens.max() >= vocabulary.size:
        raise ModelRefused(f"The documents have token {told_tokens.max()}, the vocabulary {vocabulary.size} ids.")
    tell(f"Sorting {told_tokens.size:,} tokens.")
    places = sort_places(tokens)
    last = tokens[places - 1]
    offsets = np.searchsorted(last, np.arange(vocabulary.size + 1, dtype=np.uint32))
    place_type = np.uint32 if len(tokens) < SEPARATOR else np.uint64
    arrays: dict[str, NDArray[Any]] = {
        "tokens": tokens,
        "places": places.astype(place_type),
        "offsets": offsets.astype(np.uint64),
        **tables(tokens, vocabulary.size),
    }
    tell(f"Writing {sum(each.nbytes for each in arrays.values()):,} bytes.")
    sections, digest, start = {}, hashlib.blake2b(digest_size=32), 0
    parts: list[Buffer] = []
    for name, each in arrays.items():
        sections[name] = Section(start, each.nbytes)
        parts += [each.data, bytes(-each.nbytes % ALIGNMENT)]
        start += each.nbytes + -each.nbytes % ALIGNMENT
    # The last array needs no padding.
    parts.pop()
    for part in parts:
        digest.update(part)
    place_bytes = place_type().nbytes
    counts = (num_documents, told_tokens.size, len(places), place_bytes)
    head = DatastoreHead(vocabulary, *counts, sections, digest.hexdigest())
    _write(out, [head.packed(), *parts])
    return head


def sort_places(tokens: Tokens) -> Places:
    """Places with a token before and at them, by the DEPTH tokens before them, the nearest first, then by place.

    By doubling what is sorted by (Manber and Myers, 1993): the rank of 2 k tokens is that of a pair of ranks of k.
    """
    num_tokens = len(tokens)
    # ranks[p] is about the tokens before p; before the first there is nothing, which is below all.
    ranks = np.zeros(num_tokens, np.int64)
    ranks[1:] = np.unique(tokens[:-1], return_inverse=True)[1] + 1
    width = 1
    while width < DEPTH:
        further = np.zeros(num_tokens, np.int64)
        further[width:] = ranks[:-width]
        pairs = ranks * (num_tokens + 1) + further
        order = np.argsort(pairs, kind="stable")
        ordered = pairs[order]
        ranks[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1])))
        width *= 2
    order = np.argsort(ranks, kind="stable")
    has_token = tokens != SEPARATOR
    is_place = np.concatenate(([False], has_token[1:] & has_token[:-1]))
    return order[is_place[order]]


def tables(tokens: Tokens, vocabulary_size: int) -> dict[str, NDArray[Any]]:
    """Most frequent tokens at all and after each token, with their shares; of equally frequent ones lower ids."""
    counts = np.bincount(tokens[tokens != SEPARATOR], minlength=vocabulary_size)
    unigram_tokens, unigram_shares = np.zeros(TABLE_WIDTH, np.uint32), np.zeros(TABLE_WIDTH, np.float32)
    best = np.argsort(-counts, kind="stable")[:TABLE_WIDTH]
    unigram_tokens[: len(best)], unigram_shares[: len(best)] = best, counts[best] / counts.sum()
    is_pair = (tokens[:-1] != SEPARATOR) & (tokens[1:] != SEPARATOR)
    pairs = tokens[:-1][is_pair].astype(np.int64) * vocabulary_size + tokens[1:][is_pair]
    found, times = np.unique(pairs, return_counts=True)
    first, second = np.divmod(found, vocabulary_size)
    order = np.lexsort((second, -times, first))
    first, second, times = first[order], second[order], times[order]
    begins = np.searchsorted(first, np.arange(vocabulary_size))
    rank = np.arange(len(first)) - begins[first]
    kept = rank < TABLE_WIDTH
    totals = np.bincount(first, weights=times, minlength=vocabulary_size)
    bigram_tokens = np.zeros((vocabulary_size, TABLE_WIDTH), np.uint32)
    bigram_shares = np.zeros((vocabulary_size, TABLE_WIDTH), np.float32)
    bigram_tokens[first[kept], rank[kept]] = second[kept]
    bigram_shares[first[kept], rank[kept]] = times[kept] / totals[first[kept]]
    return {
        "bigram_tokens": bigram_tokens,
        "bigram_shares": bigram_shares,
        "unigram_tokens": unigram_tokens,
        "unigram_shares": unigram_shares,
    }


def _write(out: Path, parts: Iterable[Buffer]) -> None:
    """Writes a file beside it that takes its place when all is written, so that no reader ever maps half of one."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with partial.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
