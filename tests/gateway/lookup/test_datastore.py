"""Datastores: what is found, against brute force and counts by hand, and files that are refused."""

import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gateway.lookup.datastore.build import build, sort_places
from gateway.lookup.datastore.layout import DEPTH, MARK, SEPARATOR, TABLE_WIDTH
from gateway.lookup.datastore.reader import MAX_PLACES, Datastore
from gateway.lookup.rates import LookupRates
from gateway.lookup.session import LookupSession
from outrider.errors import ModelRefused, VocabularyMismatch
from outrider.model_files.vocabulary import Vocabulary

SIZE = 60
VOCABULARY = Vocabulary.of((f"token {number}", number) for number in range(SIZE))


def random_documents(count: int, length: int, alphabet: int = SIZE, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(alphabet) for _ in range(draw.randrange(1, 2 * length))] for _ in range(count)]


def store_of(folder: Path, documents: Sequence[Sequence[int]], vocabulary: Vocabulary = VOCABULARY) -> Datastore:
    build(documents, vocabulary, folder / "store", lambda _: None)
    return Datastore.open(folder / "store", vocabulary)


def agreement(before: Sequence[int], text: Sequence[int]) -> int:
    """Equal tokens from the ends of both."""
    pairs = zip(reversed(before), reversed(text), strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(before), len(text)))


def brute_force(documents: Sequence[Sequence[int]], text: Sequence[int]) -> list[int]:
    """Lengths of the longest matches that something follows, at most those that are looked for."""
    lengths = (agreement(tokens[:at], text) for tokens in documents for at in range(1, len(tokens)))
    return sorted((min(length, DEPTH) for length in lengths if length >= 3), reverse=True)[:MAX_PLACES]


@pytest.mark.slow
@pytest.mark.parametrize("alphabet", [2, 7, SIZE])
def test_the_longest_matches_are_those_of_brute_force(tmp_path: Path, alphabet: int) -> None:
    """On 10,000 tokens, for texts from within and from elsewhere, short and long; token 0 is one like others."""
    documents = random_documents(100, 100, alphabet)
    assert sum(map(len, documents)) > 9000
    store = store_of(tmp_path, documents)
    draw = random.Random(2)
    lengths = Counter[int]()
    for _ in range(60):
        document = draw.choice(documents)
        end = draw.randrange(len(document)) + 1
        text = document[max(0, end - draw.randrange(1, 25)) : end]
        if draw.random() < 0.5:
            text = [draw.randrange(alphabet) for _ in range(draw.randrange(6))] + text[-4:]
        found = store.find(array("i", text))
        assert [length for _, length in found] == brute_force(documents, text)
        assert len({place for place, _ in found}) == len(found)
        for place, length in found:
            assert list(store.tokens[place - length : place]) == text[-length:]
            assert 0 <= store.tokens[place] < alphabet
            lengths[length] += 1
    assert len(lengths) > 2


def test_places_are_sorted_by_what_stands_before_them() -> None:
    """The nearest token first, and equal ones in order of the text."""
    draw = np.random.default_rng(3)
    tokens = np.concatenate((np.full(DEPTH, SEPARATOR), draw.integers(0, 3, 3000), [SEPARATOR])).astype(np.uint32)
    contexts = [tuple(map(int, tokens[place - DEPTH : place][::-1])) for place in range(DEPTH + 1, len(tokens) - 1)]
    expected = sorted(range(len(contexts)), key=lambda index: (contexts[index], index))
    assert sort_places(tokens).tolist() == [index + DEPTH + 1 for index in expected]


def test_tables_are_counts(tmp_path: Path) -> None:
    """Of 1,000 tokens: the most frequent after each, never across documents; of equals the lower id."""
    documents = random_documents(40, 26, alphabet=12, seed=4)
    assert sum(map(len, documents)) > 1000
    after = store_of(tmp_path, documents).tables.after
    pairs = Counter(pair for tokens in documents for pair in pairwise(tokens))

    def ranked(counts: Counter[int]) -> list[tuple[int, float]]:
        best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:TABLE_WIDTH]
        return [(token_id, pytest.approx(count / counts.total())) for token_id, count in best]

    for token_id in range(12):
        behind = Counter({second: count for (first, second), count in pairs.items() if first == token_id})
        assert after(token_id) == ranked(behind)
    everything = ranked(Counter(token_id for tokens in documents for token_id in tokens))
    # A token that never occurs, the beginning of a text, and an id of a larger vocabulary.
    assert after(40) == after(-1) == after(SIZE) == everything


def test_a_row_of_the_table_has_what_there_is(tmp_path: Path) -> None:
    """One token, if only one ever follows."""
    store = store_of(tmp_path, [[5, 6], [0, 0, 7]])
    assert store.tables.after(5) == [(6, 1.0)]
    assert store.tables.after(0) == [(0, 0.5), (7, 0.5)]


def test_nothing_matches_across_documents(tmp_path: Path) -> None:
    """Neither before a place nor after it."""
    store = store_of(tmp_path, [[1, 2, 3], [4, 5, 6, 7], []])
    assert store.find(array("i", [1, 2, 3])) == []
    assert store.find(array("i", [2, 3, 4])) == []
    assert store.find(array("i", [3, 4, 5, 6])) == [(DEPTH + 4 + 3, 3)]
    assert store.find(array("i", [4, 5])) == store.find(array("i")) == store.find(array("i", [4, 5, SIZE])) == []
    assert (store.head.num_documents, store.head.num_tokens, store.head.num_places) == (2, 7, 5)


def test_a_session_looks_it_up(tmp_path: Path) -> None:
    """Its rows are the datastore's, and what nothing matches has the table's."""
    store = store_of(tmp_path, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [30, 31]])
    rates = LookupRates()
    look = LookupSession([8, 1, 2, 3], datastore=store, rates=rates).look(4, 4)
    assert look.tree.token_ids[:2] == (4, 7)
    assert set(look.tree.token_ids[2:]) == {5, 6}
    assert look.tree.parents == (0, 0, 1, 1)
    assert look.tree.values == pytest.approx((1 / 3, 1 / 6, 0.1, 0.1))
    assert set(look.sources) == {"datastore"}
    assert look.match_len == 3
    look = LookupSession([30], datastore=store, rates=rates).look(1, 4)
    assert (look.tree.token_ids, look.sources, look.match_len) == ((31,), ("table",), 0)
    assert LookupSession([], datastore=store, rates=rates).look(2, 2).sources == ("table", "table")


def test_ids_beyond_16_bits(tmp_path: Path) -> None:
    """A vocabulary of more than 65,536 ids is stored as it is."""
    vocabulary = Vocabulary.of((str(number), number) for number in range(70_000))
    store = store_of(tmp_path, [[69_999, 4463, 65_537, 66_000], [4463, 1, 464]], vocabulary)
    assert store.find(array("i", [69_999, 4463, 65_537])) == [(DEPTH + 3, 3)]
    assert store.find(array("i", [4463, 4463, 1])) == []
    assert store.tables.after(65_537) == [(66_000, 1.0)]


def test_the_file_is_only_read(tmp_path: Path) -> None:
    """A process that may read it can use it; its digest is that of what it holds."""
    store_of(tmp_path, random_documents(5, 30))
    (tmp_path / "store").chmod(0o400)
    store = Datastore.open(tmp_path / "store", VOCABULARY)
    assert store.tokens.readonly
    assert store.is_whole()


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "{path} is no datastore"),
        (lambda data: b"PK" + data[2:], "{path} is no datastore"),
        (lambda data: data[:12], "{path} is cut off within its head"),
        (lambda data: data[:200], "{path} is cut off within its head"),
        (lambda data: data[:-1], "{path} has {fewer} bytes, but its head promises {size}"),
        (lambda data: data + b"0", "{path} has {more} bytes, but its head promises {size}"),
        (replaced(b'"version": 1', b'"version": 2'), "{path} is a datastore of version 2; this version reads 1"),
        (replaced(b'"num_tokens": ', b'"num_tokens": 9'), "{path} has a head that is none of a datastore: .*tokens"),
        (replaced(b'"num_places": ', b'"num_places": -'), "{path} has a head that is none of a datastore: .*places"),
        (replaced(b'"places"', b'"plaices"'), "{path} has a head that is none of a datastore: .*places"),
        (replaced(b'"place_bytes": 4', b'"place_bytes": 2'), "{path} has a head that is none of a datastore: .*counts"),
        (replaced(b'"digest": "', b'"digest": "x'), "{path} has a head that is none of a datastore: .*digest"),
        (replaced(b'"start": 0', b'"start":-64'), "{path} has a head that is none of a datastore: .*tokens"),
        (replaced(b'{"version', b'["version'), "{path} has a head that is none of a datastore"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, change: Callable[[bytes], bytes], words: str) -> None:
    """By name, and by what is wrong with them."""
    store_of(tmp_path, random_documents(5, 30))
    path = tmp_path / "store"
    data = path.read_bytes()
    changed = change(data)
    if len(data) > len(changed) > 200 or len(changed) > len(data):
        # The head keeps its length, so that it is what the head says that is wrong.
        head_len = int.from_bytes(data[len(MARK) : 16], "little") + len(changed) - len(data)
        is_head = changed[len(MARK) : 16] == data[len(MARK) : 16] and changed[16:200] != data[16:200]
        changed = changed[: len(MARK)] + head_len.to_bytes(8, "little") + changed[16:] if is_head else changed
    path.write_bytes(changed)
    sizes = {"size": len(data), "fewer": len(data) - 1, "more": len(data) + 1}
    with pytest.raises(ModelRefused, match=words.format(path=path, **sizes)):
        Datastore(path)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """And folders."""
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ModelRefused, match=f"{path} cannot be read as a datastore: "):
            Datastore(path)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """By the name of the file, and by where the two differ."""
    store_of(tmp_path, random_documents(5, 30))
    other = Vocabulary.of((f"token {number}" if number != 7 else "x", number) for number in range(SIZE))
    with pytest.raises(VocabularyMismatch, match=r"store is of another vocabulary .*ids 0 and 59"):
        Datastore.open(tmp_path / "store", other)
    with pytest.raises(VocabularyMismatch, match="have 60 and 1 ids"):
        Datastore.open(tmp_path / "store", Vocabulary.of([("a", 0)]))


def test_damage_is_found_by_the_digest(tmp_path: Path) -> None:
    """One bit of one token."""
    store_of(tmp_path, random_documents(5, 30))
    path = tmp_path / "store"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    assert not Datastore(path).is_whole()


@pytest.mark.parametrize(
    ("documents", "words"), [([[], []], "have no tokens"), ([[1, SIZE]], f"have token {SIZE}, the vocabulary {SIZE}")]
)
def test_what_cannot_be_built_leaves_nothing(tmp_path: Path, documents: list[list[int]], words: str) -> None:
    """No file, and what was there before stays."""
    (tmp_path / "store").write_text("before")
    with pytest.raises(ModelRefused, match=words):
        build(documents, VOCABULARY, tmp_path / "store", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert (tmp_path / "store").read_text() == "before"


@pytest.mark.slow
def test_progress_is_told(tmp_path: Path) -> None:
    """Every million tokens, then what is done with them."""
    told: list[str] = []
    documents = ([number % SIZE for number in range(300_000)] for _ in range(4))
    head = build(documents, VOCABULARY, tmp_path / "store", told.append)
    assert told[0].endswith("documents, 1,200,020 tokens")
    assert told[1] == "Sorting 1,200,000 tokens."
    assert told[2].startswith("Writing ")
    assert json.loads(head.packed()[16:])["num_tokens"] == 1_200_000
