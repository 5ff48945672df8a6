"""Blocks for the sessions of a target: leases end first, then later sessions give way. Decides nothing by itself.

Who gives way is decided in target_service.preemption. A session that gives way keeps its tokens and loses its cache;
its task goes on as soon as there is room, with the same logits, because a row's do not depend on how its prefix was
computed. Belongs to the device thread.
"""

import sys
from collections.abc import Iterator
from typing import Protocol

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import Allocate, reserve
from outrider.engine.session import Session
from outrider.errors import CacheFull, PromptTooLong
from outrider.token_tree import EMPTY, TokenTree
from target_service.preemption import Holder, is_first, victims


class Holding(Protocol):
    """A session of the table."""

    last_active: int
    """Step of the device in which a job of it was last under way."""

    @property
    def session(self) -> Session:
        """What holds the blocks."""

    @property
    def task(self) -> object | None:
        """The job under way."""


class Holdings(Protocol):
    """All sessions in the order of their first open; see outrider.sessions.SessionTable."""

    def __iter__(self) -> Iterator[Holding]: ...

    def with_room(self, allocate: Allocate) -> None:
        """Calls `allocate`, ending leases as long as it raises CacheFull and there are some."""

    def count_preemption(self) -> None:
        """Counts a session that loses its cache."""


# A session whose draft is guessing has no job for the time of some steps, and would come back to an empty cache.
GRACE_STEPS = 64


class Room:
    """Finds blocks for one session at a time."""

    def __init__(self, runner: ModelRunner, holdings: Holdings) -> None:
        self._runner = runner
        self._holdings = holdings
        self._step = 0
        # What was missing to whoever was refused in this step; see _preempt.
        self._least_refused = sys.maxsize

    def begin_step(self) -> dict[Session, int]:
        """The place of each session in the order of the first opens. Whoever came first has to ask first."""
        self._step += 1
        self._least_refused = sys.maxsize
        ages = {}
        for age, holding in enumerate(self._holdings):
            ages[holding.session] = age
            if holding.task is not None:
                holding.last_active = self._step
        return ages

    def take(self, session: Session, tree: TokenTree) -> TokenTree | None:
        """Reserves what the next forward writes, and returns the tree, or EMPTY when only that fits; None means: wait.

        Raises PromptTooLong for a session that would not fit into an empty pool, and InvalidRequest as runner.check.
        """
        self._check_size(session)
        while True:
            for wanted in (tree, EMPTY):
                if self._reserve(session, wanted):
                    return wanted
            if not self._preempt(session):
                return None

    def _check_size(self, session: Session) -> None:
        pool = self._runner.pool
        size = pool.num_blocks * pool.block_size
        if len(session) > size:
            message = f"{len(session)} tokens are more than the key-value cache of {size} tokens holds"
            raise PromptTooLong(message, tokens=len(session), kv_tokens=size)

    def _reserve(self, session: Session, tree: TokenTree) -> bool:
        try:
            reserve(self._runner, Feed(session, tree), self._holdings.with_room)
        except CacheFull:
            return False
        return True

    def _preempt(self, session: Session) -> bool:
        """Takes the blocks of those that give way; tells whether there is room now.

        Raises CacheFull when the first of the active sessions finds none, so that nobody waits for nothing.
        """
        pool = self._runner.pool
        num_needed = -(-len(session) // pool.block_size) - len(session.table)
        num_missing = max(num_needed - pool.num_free, 1)
        if num_missing >= self._least_refused:
            # Later sessions have fewer others behind them, and weighing those costs as much as a forward where many
            # wait and share long prefixes.
            return False
        holdings = list(self._holdings)
        asking = [holding.session for holding in holdings].index(session)
        holders = [self._holder(holding) for holding in holdings]
        chosen = victims(asking, num_missing, holders)
        if chosen is None and is_first(asking, holders):
            raise CacheFull(f"{pool} has no room for {len(session)} tokens, and no session holds what is missing")
        if chosen is None:
            self._least_refused = num_missing
            return False
        for index in chosen:
            holdings[index].session.free()
            self._holdings.count_preemption()
        return True

    def _holder(self, holding: Holding) -> Holder:
        table = holding.session.table
        return Holder(len(table), holding.last_active + GRACE_STEPS >= self._step, table.shared_blocks)
