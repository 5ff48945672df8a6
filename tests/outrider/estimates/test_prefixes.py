"""Names of cached prompts: what a service writes down, what its links say of it, and what a gateway knows then."""

import random

import pytest
import torch

from gateway.sessions.placement import PromptPrefix
from outrider.engine.cache import ROOT, BlockPool, BlockTable, KVCache
from outrider.engine.session import Session
from outrider.errors import CacheFull, InvalidRequest
from outrider.estimates import prefixes
from outrider.estimates.prefixes import (
    BLOCK_TOKENS,
    MAX_KNOWN,
    KnownPrefixes,
    NewsWriter,
    PrefixJournal,
    PrefixNews,
    first_link,
    name_of,
    next_link,
)
from outrider.token_tree import EMPTY

TOKENS = [number * 7 % 101 for number in range(5 * BLOCK_TOKENS + 9)]


def published(journal: PrefixJournal, salt: bytes, token_ids: list[int], size: int, first: int = 0) -> range:
    """Publishes the whole blocks of a text, with numbers from the first one on."""
    blocks = range(first, first + len(token_ids) // size)
    for at, block in enumerate(blocks):
        journal.publish(block, salt, block - 1 if at else ROOT, token_ids[at * size : (at + 1) * size])
    return blocks


@pytest.mark.parametrize("size", [1, 3, 16, 64, 100, 128])
async def test_a_service_names_what_a_gateway_names(size: int) -> None:
    """Whatever the size of its blocks, of the 64s that they hold whole; and they go with the block that ends them."""
    journal, prefix = PrefixJournal(), await PromptPrefix.of(TOKENS, b"salt")
    blocks = published(journal, b"salt", TOKENS, size)
    num_whole = len(blocks) * size // BLOCK_TOKENS
    assert journal.all() == ([*prefix.names[:num_whole]], num_whole)
    for block in reversed(blocks):
        journal.withdraw(block)
        assert len(journal.all()[0]) == (block * size) // BLOCK_TOKENS
    assert journal.all() == ([], 2 * num_whole)


async def test_who_does_not_know_the_salt_knows_no_name() -> None:
    """Equal texts of two salts have no name in common, at a service as at a gateway."""
    journal = PrefixJournal()
    blocks = published(journal, b"one", TOKENS, 16)
    published(journal, b"two", TOKENS, 16, first=len(blocks))
    one, two = [(await PromptPrefix.of(TOKENS, salt)).names for salt in (b"one", b"two")]
    assert len({*one, *two}) == 10
    assert {*journal.all()[0]} == {*one, *two}


def test_names_are_what_the_protocol_says() -> None:
    """A gateway of another make can compute them: a vector."""
    first = next_link(first_link(b"salt"), range(64))
    assert (name_of(first), name_of(next_link(first, range(64)))) == (0x6D08A2C07BBCE4C6, 0xB27C57FBF3E967D9)


def test_a_name_of_two_texts_goes_with_the_last() -> None:
    """Eight bytes may be the same by chance or design."""
    journal = PrefixJournal()
    for block in (1, 2):
        published(journal, b"", TOKENS[:64], 64, first=block)
    assert journal.num_changes == 1
    journal.withdraw(1)
    assert (len(journal.all()[0]), journal.num_changes) == (1, 1)
    journal.withdraw(2)
    assert journal.all() == ([], 2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and memories of a few names."""
    monkeypatch.setattr(prefixes, "MAX_NAMES", 3)
    monkeypatch.setattr(prefixes, "MAX_CHANGES", 12)


class Text:
    """A pool in which sessions come and go, as in a service."""

    def __init__(self, chance: random.Random) -> None:
        self.pool = BlockPool(24, 16)
        self._cache = KVCache(1, 24 * 16, 1, 1, torch.float32, torch.device("cpu"))
        self._sessions: list[Session] = []
        self._chance = chance

    def step(self) -> None:
        """A session is opened and read, goes on, is truncated, or ends."""
        chance = self._chance
        if chance.random() < 0.4 or not self._sessions:
            begin = [*([chance.randrange(2)] * 64), *([chance.randrange(2)] * 64), *([chance.randrange(3)] * 70)]
            session = Session(BlockTable(self.pool, self._cache), begin, 1, chance.choice([b"", b"salt"]))
            session.take_prefix()
            self._sessions.append(session)
        session = chance.choice(self._sessions)
        if chance.random() < 0.5:
            self._sessions.remove(session)
            session.free()
            return
        session.truncate(chance.randrange(1, len(session) + 1))
        try:
            session.reserve(0)
        except CacheFull:
            return
        session.advance(len(session), EMPTY)
        session.publish(len(session))

    @property
    def names(self) -> set[int]:
        """Names of what is published, from the blocks themselves."""
        index, found = self.pool.prefixes, set[int]()
        for block, end in index._prefixes.items():
            tokens, parent = end.token_ids, end.parent
            while parent != ROOT:
                tokens, parent = index._prefixes[parent].token_ids + tokens, index._prefixes[parent].parent
            assert block in index
            if len(tokens) % BLOCK_TOKENS == 0:
                link = first_link(end.salt)
                for start in range(0, len(tokens), BLOCK_TOKENS):
                    link = next_link(link, tokens[start : start + BLOCK_TOKENS])
                found.add(name_of(link))
        return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(30))
def test_when_all_is_quiet_every_gateway_knows_what_is_cached(seed: int) -> None:
    """However seldom its link was heard, and whatever was evicted meanwhile; on the way it never knows too many."""
    chance = random.Random(seed)
    text = Text(chance)
    journal = text.pool.prefixes.journal
    links = [(NewsWriter(journal), KnownPrefixes(text.pool.num_blocks), often) for often in (0.9, 0.2, 0.02)]
    num_parts = 0
    for _ in range(400):
        text.step()
        for writer, known, often in links:
            if chance.random() < often:
                news = writer.next()
                assert len(news.added) + len(news.removed) <= 3
                is_whole = known.hear(news)
                num_parts += not is_whole
                assert is_whole != news.has_more
                if is_whole:
                    assert known.names == text.names
    assert num_parts
    for writer, known, _ in links:
        while writer.is_due:
            known.hear(writer.next())
        assert known.is_known
        assert known.names == text.names
        news = writer.next()
        assert ([*news.added, *news.removed], news.has_more) == ([], False)


def test_a_link_that_was_too_slow_begins_anew() -> None:
    """And so does one that is asked for it; with nothing new a message has no names."""
    journal = PrefixJournal()
    writer, known = NewsWriter(journal), KnownPrefixes(100)
    assert writer.is_due
    assert writer.next() == PrefixNews(0, [], [])
    assert not writer.is_due
    assert writer.next() == PrefixNews(1, [], [])
    for number in range(prefixes.MAX_CHANGES // 2):
        journal.publish(number, b"", ROOT, [number] * 64)
        journal.withdraw(number)
    assert writer.next().number == 2
    journal.publish(1, b"", ROOT, [1] * 64)
    for number in range(prefixes.MAX_CHANGES):
        journal.publish(2, b"", ROOT, [number + 2] * 64)
        journal.withdraw(2)
    news = writer.next()
    assert (news.number, len(news.added), len(news.removed)) == (0, 1, 0)
    assert known.hear(news)


WHOLE, NEXT = PrefixNews(0, [1, 2]), PrefixNews(1, [3], [1])


def test_nothing_is_known_before_all_is() -> None:
    """Parts wait for the last one; what was known before stays until then."""
    known = KnownPrefixes(4)
    assert not known.hear(PrefixNews(0, [1, 2], has_more=True))
    assert (known.names, known.is_known) == (set(), False)
    assert known.hear(PrefixNews(1, [3]))
    assert (known.names, known.is_known) == ({1, 2, 3}, True)
    assert not known.hear(PrefixNews(0, [7], has_more=True))
    assert known.names == {1, 2, 3}
    assert known.hear(PrefixNews(1))
    assert known.names == {7}


@pytest.mark.parametrize(
    ("news", "field"),
    [
        (PrefixNews(2, [4]), "load.prefixes.number"),
        (PrefixNews(1, range(5)), "load.prefixes.added"),
        (PrefixNews(1, range(4097)), "load.prefixes"),
        (PrefixNews(1, (), range(4097)), "load.prefixes"),
        (PrefixNews(0, range(5)), "load.prefixes.added"),
    ],
)
def test_what_cannot_be_is_refused_and_all_forgotten(news: PrefixNews, field: str) -> None:
    """A gap, a message that is too long, more than the cache holds; after it nothing counts but a beginning."""
    known = KnownPrefixes(4)
    assert known.hear(WHOLE)
    assert known.hear(NEXT) == (known.names == {2, 3})
    known.hear(PrefixNews(0, [1, 2]))
    with pytest.raises(InvalidRequest) as refused:
        known.hear(news)
    assert refused.value.metadata["field"] == field
    assert (known.names, known.is_known) == (set(), False)
    assert not known.hear(PrefixNews(3, [5]))
    assert known.names == set()
    assert known.hear(WHOLE)
    assert known.names == {1, 2}


def test_there_is_a_limit_whatever_a_service_says_of_its_cache() -> None:
    """Else its words would fill a gateway's memory."""
    known = KnownPrefixes(1 << 40)
    for number in range(MAX_KNOWN // 4096):
        known.hear(PrefixNews(number, range(number * 4096, (number + 1) * 4096), has_more=True))
    with pytest.raises(InvalidRequest):
        known.hear(PrefixNews(MAX_KNOWN // 4096, [MAX_KNOWN]))
