"""Which blocks hold the keys and values of which tokens, so that an equal beginning is not computed twice.

A published block has a name: a digest of its own tokens and
of all before them, that begins with a salt, so that sessions of different salts share nothing. The digest only finds a
block; what is served is compared token by token with what was asked for, and so a collision serves nobody's keys.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 32
ROOT = -1
"""Stands for the block before the first one."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a published block holds: its own tokens, behind those of the published block `parent`."""

    digest: bytes
    salt: bytes
    parent: int
    token_ids: tuple[int, ...]


class PrefixIndex:
    """Published blocks by their digests, and those of them that nobody holds, which stay until a block is needed.

    Whoever holds a block holds its parent too, and lets go of it later. So of the blocks that nobody holds the oldest
    never has a published child, and what is evicted leaves nothing behind that cannot be reached any more.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._prefixes: dict[int, Prefix] = {}
        # The one that was held longest ago comes first.
        self._unheld: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._prefixes

    @property
    def num_unheld(self) -> int:
        """Published blocks that nobody holds."""
        return len(self._unheld)

    def find(self, salt: bytes, parent: int, token_ids: Sequence[int]) -> int | None:
        """The block of these tokens behind a published parent, or ROOT; None when there is none."""
        wanted = self._prefix(salt, parent, token_ids)
        block = self._blocks.get(wanted.digest)
        return block if block is not None and self._prefixes[block] == wanted else None

    def publish(self, block: int, salt: bytes, parent: int, token_ids: Sequence[int]) -> int | None:
        """Gives a held block its name; returns the block that has it, which may be an earlier one of the same tokens.

        None when another prefix has the same digest, or when the block has another name already.
        """
        prefix = self._prefix(salt, parent, token_ids)
        found = self._blocks.get(prefix.digest)
        if found is not None:
            return found if self._prefixes[found] == prefix else None
        if block in self._prefixes:
            return None
        self._blocks[prefix.digest], self._prefixes[block] = block, prefix
        return block

    def withdraw(self, block: int) -> None:
        """Takes the name from a block that has no published children."""
        del self._blocks[self._prefixes.pop(block).digest]
        self._unheld.pop(block, None)

    def put_by(self, block: int) -> None:
        """Nobody holds this published block any more."""
        self._unheld[block] = None

    def take_up(self, block: int) -> bool:
        """Somebody holds a block again; tells whether it was one that was kept here."""
        if block not in self._unheld:
            return False
        del self._unheld[block]
        return True

    def evict(self) -> int:
        """Withdraws the block that was held longest ago, and returns it; raises KeyError when all are held."""
        block = next(iter(self._unheld))
        self.withdraw(block)
        return block

    def check(self, held: set[int]) -> None:
        """Raises RuntimeError unless names, blocks and those that nobody holds agree."""
        named = {self._blocks.get(prefix.digest) for prefix in self._prefixes.values()}
        if named != set(self._prefixes) or len(self._blocks) != len(self._prefixes):
            raise RuntimeError(f"{len(self._blocks)} names stand for {len(self._prefixes)} published blocks")
        if set(self._unheld) != set(self._prefixes) - held:
            raise RuntimeError(f"{len(self._unheld)} published blocks count as unheld, but others are")
        ages = {block: age for age, block in enumerate(self._unheld)}
        for block, prefix in self._prefixes.items():
            if prefix.parent != ROOT and prefix.parent not in self._prefixes:
                raise RuntimeError(f"block {block} stands behind block {prefix.parent}, which has no name")
            if ages.get(prefix.parent, len(ages)) < ages.get(block, len(ages)):
                raise RuntimeError(f"block {block} would outlive block {prefix.parent}, behind which it stands")

    def _prefix(self, salt: bytes, parent: int, token_ids: Sequence[int]) -> Prefix:
        before = first_digest(salt) if parent == ROOT else self._prefixes[parent].digest
        return Prefix(digest(before, token_ids), salt, parent, tuple(token_ids))


def first_digest(salt: bytes) -> bytes:
    """What the chain of a salt begins with."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest()


def digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The link of a chain: token ids behind the digest of all before them."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES, person=b"block").digest()
