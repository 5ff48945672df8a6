"""Blocks for the sessions of a target: leases end first, then later sessions give way.

Every cache can be rebuilt from its tokens, so a full pool costs time and no request: sessions that were opened later
lose what they have cached, and compute it again when there is room (recomputation, Kwon et al., 2023, section 4.5).
The session that was opened first among the active ones is never refused anything that the pool has, so there is always
one that makes progress, and each in turn becomes the first. Active is also who was so a moment ago: while a draft
guesses, its session does nothing, and if it lost its cache each time, most rows would be computed again and again.

A session that gives way keeps its tokens; its task goes on as soon as there is room, with the same logits, because a
row's do not depend on how its prefix was computed. Belongs to the device thread.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner, reserve
from outrider.engine.session import Session
from outrider.engine.sharing import ReadOnce
from outrider.errors import CacheFull, PromptTooLong
from outrider.model_service.leases import LeaseTable
from outrider.token_tree import EMPTY, TokenTree

# A session whose draft is guessing has no job for the time of some steps, and would come back to an empty cache.
GRACE_STEPS = 64


@dataclass(frozen=True, slots=True)
class CacheHolder:
    """A session: the blocks that it holds, and whether a job of its own is under way, or was a moment ago."""

    num_blocks: int
    is_active: bool
    shared_blocks: tuple[int, ...] = ()
    """Blocks that others hold as well, which come free when the last of them gives way."""


def is_first(asking: int, holders: Sequence[CacheHolder]) -> bool:
    """Whether no active session was opened before the asking one; holders are in the order of their opening."""
    return not any(holder.is_active for holder in holders[:asking])


def victims(asking: int, num_missing: int, holders: Sequence[CacheHolder]) -> list[int] | None:
    """Sessions that give all their blocks to holders[asking], which lacks num_missing; None when it has to wait.

    Those opened later give way, the latest first. To the first of the active sessions, those opened earlier that have
    done nothing for a while give way as well: their clients may be slow, and must not hold up the others. As long as
    all of them together have too little, none gives way.
    """
    order = [*range(len(holders) - 1, asking, -1)]
    if is_first(asking, holders):
        order += range(asking - 1, -1, -1)
    chosen = []
    holder_counts = Counter(block for holder in holders for block in holder.shared_blocks)
    for index in order:
        if num_missing <= 0:
            break
        holder = holders[index]
        if holder.num_blocks:
            holder_counts.subtract(holder.shared_blocks)
            num_last = sum(not holder_counts[block] for block in holder.shared_blocks)
            num_missing -= holder.num_blocks - len(holder.shared_blocks) + num_last
            chosen.append(index)
    return chosen if num_missing <= 0 else None


class BlockAllocator:
    """Finds blocks for one session at a time."""

    def __init__(self, runner: ModelRunner, table: LeaseTable[Any]) -> None:
        """The table has all sessions that hold blocks."""
        self._runner = runner
        self._table = table
        self._step = 0
        # Fewest blocks that were missing to a session that was refused in this step; see _preempt.
        self._min_refused = sys.maxsize
        self.read_once = ReadOnce()
        """Prompts of this step."""

    def begin_step(self) -> dict[Session, int]:
        """Place of each session in the order of the first opens. Sessions have to ask in this order."""
        self._step += 1
        self._min_refused, self.read_once = sys.maxsize, ReadOnce()
        ages = {}
        for age, held in enumerate(self._table):
            ages[held.session] = age
            if held.task is not None:
                held.last_active = self._step
        return ages

    def reserve(self, session: Session, tree: TokenTree) -> Feed | None:
        """Reserves what the next forward writes, and returns that, without the tree where it does not fit; None: wait.

        Raises PromptTooLong for a session that would not fit into an empty pool, and InvalidRequest as runner.check.
        """
        pool = self._runner.pool
        size = pool.num_blocks * pool.block_size
        if len(session) > size:
            message = f"{len(session)} tokens are more than the key-value cache of {size} tokens holds"
            raise PromptTooLong(message, tokens=len(session), kv_tokens=size)
        while True:
            for wanted in (tree, EMPTY):
                feed = Feed(session, wanted)
                try:
                    reserve(self._runner, feed, self._table.with_room)
                except CacheFull:
                    continue
                return feed
            if not self._preempt(session):
                return None

    def _preempt(self, session: Session) -> bool:
        """Takes the blocks of those that give way; returns whether there is room now.

        Raises CacheFull when the first of the active sessions finds none, so that no session waits for nothing.
        """
        pool = self._runner.pool
        num_needed = -(-len(session) // pool.block_size) - len(session.table)
        num_missing = max(num_needed - pool.num_free, 1)
        if num_missing >= self._min_refused:
            # Later sessions have fewer others after them, and weighing those costs as much as a forward where many
            # wait and share long prefixes.
            return False
        groups, holders = [held.sessions for held in self._table], []
        asking = next(place for place, group in enumerate(groups) if session in group)
        for held, group in zip(self._table, groups, strict=True):
            is_active = held.last_active + GRACE_STEPS >= self._step
            # What the sessions of one share among themselves is one holder's.
            shared = dict.fromkeys(block for each in group for block in each.table.shared_blocks)
            num_own = sum(len(each.table) - len(each.table.shared_blocks) for each in group)
            holders.append(CacheHolder(num_own + len(shared), is_active, tuple(shared)))
        chosen = victims(asking, num_missing, holders)
        if chosen is None and is_first(asking, holders):
            raise CacheFull(f"{pool} has no room for {len(session)} tokens, and no session holds what is missing")
        if chosen is None:
            self._min_refused = num_missing
            return False
        for index in chosen:
            for each in groups[index]:
                each.free()
            self._table.num_preempted += 1
        return True
