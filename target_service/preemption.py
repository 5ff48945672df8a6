"""Who gives way when the pool is full and no session is on a lease. Pure decisions; knows no blocks and no sessions.

Every cache can be rebuilt from its tokens, so a full pool costs time and no request: sessions that were opened later
lose what they have cached, and compute it again when there is room (recomputation, Kwon et al., 2023, section 4.5).
The session that was opened first among the active ones is never refused anything that the pool has, so there is always
one that makes progress, and each in turn becomes the first. Active is also who was so a moment ago: while a draft
guesses, its session does nothing, and if it lost its cache each time, most rows would be computed again and again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A session: the blocks that it holds, and whether a job of its own is under way, or was a moment ago."""

    num_blocks: int
    is_active: bool
    shared_blocks: tuple[int, ...] = ()
    """Those that others hold as well, which come free when the last of them gives way."""


def is_first(asking: int, holders: Sequence[Holder]) -> bool:
    """Whether no active session was opened before the asking one; holders are in the order of their opening."""
    return not any(holder.is_active for holder in holders[:asking])


def victims(asking: int, num_missing: int, holders: Sequence[Holder]) -> list[int] | None:
    """Sessions that give all their blocks to holders[asking], which lacks num_missing; None when it has to wait.

    Those opened later give way, the latest first. To the first of the active sessions, those opened earlier that have
    done nothing for a while give way as well: their clients may be slow, and must not hold up the others. As long as
    all of them together have too little, nobody gives way.
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
