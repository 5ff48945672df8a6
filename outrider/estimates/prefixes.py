"""Which beginnings of texts a service has cached, as it says them to gateways: names, what changed, what is known.

A name stands for 64 tokens and all before them: 8 bytes of a digest that begins with a salt, so that who does not know
the salt of a text finds nothing out. A service keeps a journal of the names of its published blocks; each link sends
what changed in it since it last did, all of it at first; and a gateway has a set. Pure. The journal is written on the
device thread and read on any; the rest belongs to a loop.
"""

import hashlib
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequest, check_count, check_range

BLOCK_TOKENS = 64  # of a text, that have one name
NAME_BYTES = 8
MAX_NAMES = 4096  # in a message, which then has 32 KB
MAX_CHANGES = 8192  # that a link may have to catch up with; one that is later begins anew
MAX_KNOWN = 1 << 18  # of one service, whatever it says of the size of its cache


def first_link(salt: bytes) -> bytes:
    """Digest that the chain of a salt begins with."""
    return _digest(salt)


def next_link(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of token ids after all those before them."""
    return _digest(before + array("q", token_ids).tobytes())


def name_of(link: bytes) -> int:
    """The name by which services and gateways speak of a link of a chain."""
    return int.from_bytes(link[:NAME_BYTES])


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """Names that have come and gone since the message before; plain form of the message."""

    number: int = 0
    """Place of this message on its link; 0 begins anew, and what was known before is void."""
    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    has_more: bool = False
    """Whether the next one follows from what is known already, and this one is a part."""


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """What a published block is the end of."""

    link: bytes
    rest: tuple[int, ...]
    """Tokens after the last whole 64."""
    names: tuple[int, ...]
    """Names that are there for as long as the block is."""


class PrefixJournal:
    """Names of the texts whose blocks are published, and which of them came and went last."""

    def __init__(self) -> None:
        self.num_changes = 0
        """Changes that there ever were."""
        self._ends: dict[int, ChainEnd] = {}
        self._lock = threading.Lock()
        # By how many blocks have each: names are short, and two texts may share one.
        self._names: dict[int, int] = {}
        self._changes: deque[tuple[int, bool]] = deque(maxlen=MAX_CHANGES)

    def publish(self, block: int, salt: bytes, parent: int, token_ids: Sequence[int]) -> None:
        """A block is published, after a parent that was; one that was not stands for the beginning of a text."""
        before = self._ends.get(parent)
        link, rest = (before.link, before.rest) if before is not None else (first_link(salt), ())
        rest, names = (*rest, *token_ids), list[int]()
        while len(rest) >= BLOCK_TOKENS:
            link, rest = next_link(link, rest[:BLOCK_TOKENS]), rest[BLOCK_TOKENS:]
            names.append(name_of(link))
        self._ends[block] = ChainEnd(link, rest, tuple(names))
        for name in names:
            self._count(name, 1)

    def withdraw(self, block: int) -> None:
        """A block is published no more."""
        for name in self._ends.pop(block).names:
            self._count(name, -1)

    def all(self) -> tuple[list[int], int]:
        """All names, and how many changes have led to them."""
        with self._lock:
            return list(self._names), self.num_changes

    def since(self, num_changes: int) -> tuple[list[int], list[int], int] | None:
        """Names that came and that went after so many changes, and how many changes there are now.

        None where those are too many to be remembered.
        """
        with self._lock:
            num_new = self.num_changes - num_changes
            if num_new > len(self._changes):
                return None
            last: dict[int, bool] = {}
            for (name, is_there), _ in zip(reversed(self._changes), range(num_new), strict=False):
                last.setdefault(name, is_there)
            now = self.num_changes
        added = [name for name, is_there in last.items() if is_there]
        return added, [name for name, is_there in last.items() if not is_there], now

    def _count(self, name: int, step: int) -> None:
        with self._lock:
            before = self._names.pop(name, 0)
            if before + step:
                self._names[name] = before + step
            if not (before and before + step):
                self._changes.append((name, step > 0))
                self.num_changes += 1


class NewsWriter:
    """What one link has yet to say of a journal."""

    def __init__(self, journal: PrefixJournal) -> None:
        self._journal = journal
        self._number = 0
        # Changes that are said, or are about to be; none before the beginning.
        self._num_changes: int | None = None
        self._added: list[int] = []
        self._removed: list[int] = []

    @property
    def is_due(self) -> bool:
        """Whether there is something new."""
        return bool(self._added or self._removed) or self._num_changes != self._journal.num_changes

    def next(self) -> PrefixNews:
        """The next message; without names where nothing has changed."""
        if not (self._added or self._removed):
            changes = None if self._num_changes is None else self._journal.since(self._num_changes)
            if changes is None:
                self._number = 0
                self._added, self._num_changes = self._journal.all()
            else:
                self._added, self._removed, self._num_changes = changes
        number = self._number
        self._number += 1
        # What went goes first, so that the other end never has more than the cache.
        removed, self._removed = self._removed[:MAX_NAMES], self._removed[MAX_NAMES:]
        num_added = MAX_NAMES - len(removed)
        added, self._added = self._added[:num_added], self._added[num_added:]
        return PrefixNews(number, added, removed, self.is_due)


class KnownPrefixes:
    """Names that a service has said. Whatever it says, they are at most so many, and none before it has said all."""

    def __init__(self, most: int) -> None:
        self.names: set[int] = set()
        self.is_known = False
        """Whether it has said all of them."""
        self._most = min(most, MAX_KNOWN)
        self._coming: set[int] | None = None
        self._next: int | None = None

    def hear(self, news: PrefixNews) -> bool:
        """Takes a message; returns whether all is known as it was when that was made.

        Raises InvalidRequest about what cannot be; then nothing is known, until it begins anew.
        """
        if news.number == 0:
            self._coming = set()
        elif self._next is None:
            # It has gone on before it heard that it has to begin anew.
            return False
        try:
            return self._take(news)
        except InvalidRequest:
            self.names, self.is_known, self._coming, self._next = set(), False, None, None
            raise

    def _take(self, news: PrefixNews) -> bool:
        if news.number:
            check_range("load.prefixes.number", news.number, self._next or 0, self._next or 0)
        check_count("load.prefixes", len(news.added) + len(news.removed), MAX_NAMES, "names")
        self._next = news.number + 1
        names = self.names if self._coming is None else self._coming
        names.difference_update(news.removed)
        names.update(news.added)
        check_range("load.prefixes.added", len(names), 0, self._most)
        if news.has_more:
            return False
        self.names, self.is_known, self._coming = names, True, None
        return True


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
