"""A proposal as a token tree, whose root is the last committed token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from outrider.errors import InvalidRequest
from outrider.parameters import DraftDistribution

MAX_DEPTH, MAX_CHILDREN, MAX_LEVEL_ROWS = 32, 8, 64
"""Limits of a tree that is asked for: rows on a path, children of a row, and rows of a level that have children."""


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens in an order in which parents come before children.

    Rows count from 1, because row 0 is the root; `token_ids[r - 1]` and `parents[r - 1]` belong to row r. So do
    `distributions[r - 1]`, what its token was drawn from, where the rule needs it, `logprobs[r - 1]`, the draft's
    log-probability of it, where the request asks, and `values[r - 1]`, the drafter's estimate that it will be
    committed, where there is one. Raises InvalidRequest when they differ in length, a token id is
    negative, or a parent does not come before its child.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    distributions: tuple[DraftDistribution, ...] = ()
    logprobs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Distance of each row from the root, the root's 0 first; len(tree) + 1 entries."""
    is_chain: bool = field(init=False, repr=False, compare=False)
    """Whether every row's parent is the row before it; the empty tree is a chain."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.token_ids):
            raise InvalidRequest("tree.parents", self.parents, f"one entry for each of {len(self.token_ids)} tokens")
        if self.distributions or self.logprobs or self.values:
            for name in ("distributions", "logprobs", "values"):
                entries = getattr(self, name)
                if entries and len(entries) != len(self.token_ids):
                    limit = f"empty or {len(self.token_ids)} entries"
                    raise InvalidRequest(f"tree.{name}", f"{len(entries)} entries", limit)
        is_chain = self.parents == tuple(range(len(self.parents)))
        object.__setattr__(self, "is_chain", is_chain)
        if is_chain and (not self.token_ids or min(self.token_ids) >= 0):
            # As nearly all are, in every round.
            object.__setattr__(self, "depths", tuple(range(len(self.token_ids) + 1)))
            return
        depths = [0]
        for index, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if token_id < 0:
                raise InvalidRequest(f"tree.token_ids[{index}]", token_id, "at least 0")
            if not 0 <= parent <= index:
                raise InvalidRequest(f"tree.parents[{index}]", parent, f"in [0, {index}]")
            depths.append(depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))

    @classmethod
    def chain(
        cls, token_ids: Sequence[int], distributions: Sequence[DraftDistribution] = (), logprobs: Sequence[float] = ()
    ) -> Self:
        """A tree of width one."""
        return cls(tuple(token_ids), tuple(range(len(token_ids))), tuple(distributions), tuple(logprobs))

    def __len__(self) -> int:
        return len(self.token_ids)

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from below the root down to `row` itself; empty for the root."""
        if self.is_chain:
            return tuple(range(1, row + 1))
        rows: list[int] = []
        while row:
            rows.append(row)
            row = self.parents[row - 1]
        return tuple(reversed(rows))

    def children(self, row: int) -> tuple[int, ...]:
        """Rows whose parent is `row`, in row order."""
        if self.is_chain:
            return (row + 1,) if row < len(self.token_ids) else ()
        return tuple(child for child, parent in enumerate(self.parents, start=1) if parent == row)

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Rows along these tokens from the root, as far as there are any; of equal siblings the first."""
        rows: list[int] = []
        for token_id in token_ids:
            children = self.children(rows[-1] if rows else 0)
            row = next((child for child in children if self.token_ids[child - 1] == token_id), 0)
            if not row:
                break
            rows.append(row)
        return tuple(rows)

    def leaves(self) -> tuple[int, ...]:
        """Rows without children, in row order; of an empty tree the root."""
        inner = set(self.parents)
        return tuple(row for row in range(1, len(self) + 1) if row not in inner) or (0,)


EMPTY = TokenTree()


class Branch(NamedTuple):
    """Guesses after an outcome of a verification: accepted rows of its chain, and the target's own token after them."""

    accepted_count: int
    next_token_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """The draft's log-probability of each guess, where the request asks."""
    distributions: tuple[DraftDistribution, ...] = ()
    """What each guess was drawn from, where the rule needs it."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a tree of guesses; 0 and empty leave it to the drafter.

    `expansions` are the children of every row at each depth, the root's first: a fixed shape. `max_width` is how many
    rows of a level get children, the likeliest (EAGLE-2, Li et al., 2024, arXiv 2406.16858). `is_static` fixes the
    shape before anything is guessed, by the drafter's rates of acceptance (Sequoia, Chen et al., 2024, arXiv
    2402.12374).
    """

    max_depth: int = 0
    max_children: int = 0
    expansions: tuple[int, ...] = ()
    max_width: int = 0
    is_static: bool = False

    def checked(self, name: str) -> Self:
        """The shape itself, which a message calls `name`; raises InvalidRequest about what does not go together."""
        if self.expansions and (self.max_width or self.is_static):
            other = "max_width" if self.max_width else "is_static"
            raise InvalidRequest(f"{name}.expansions", list(self.expansions), f"empty together with {name}.{other}")
        return self
