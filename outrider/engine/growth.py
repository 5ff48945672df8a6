"""Growth of a tree of guesses: the likeliest rows, as far as their number, depth and siblings are limited.

The value of a row is the chance that it is committed: its parent's value times the chance that it is taken where its
parent is. Values never rise along a path, so the best rows are a tree, and best-first search finds them (OPT-Tree, Wang
et al., 2024, arXiv 2406.17276). A row has children only after a forward, so all rows that may matter are expanded
together: as many forwards as the tree is deep. EAGLE-2 (Li et al., 2024, arXiv 2406.16858) expands the best `width`
rows of each depth and keeps the best of all; SpecInfer (Miao et al., 2023, arXiv 2305.09781) gives all rows of a depth
the same number of children; Sequoia (Chen et al., 2024, arXiv 2402.12374) has chances by rank, the same at every row.

Pure: knows no model, no noise and no session.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import InvalidRequest
from outrider.parameters import DraftDistribution
from outrider.token_tree import TokenTree, TreeShape

ROOT = 0
MAX_CHILDREN = 8
# Rows that may be expanded for each one that is wanted, before they are expanded one by one.
SPARE = 4
# Of a row that is hardly ever reached: above 0 in any float.
MIN_VALUE = 1e-30


class Child(NamedTuple):
    """A token that may follow a row, and the chance that it is the one that does."""

    token_id: int
    share: float
    is_leaf: bool = False
    """Whether nothing can follow it."""
    logprob: float = 0.0
    """The draft's log-probability of it, where that is wanted."""
    distribution: DraftDistribution | None = None
    """What it was drawn from, where that is wanted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tree: `max_rows` rows below the root, `max_depth` deep, `max_children` children of a row.

    With `expansions` rows at depth d have expansions[d] children, and the others none. With `width` only the best that
    many rows of each depth are expanded, and those of an earlier depth never again. With `one_by_one` there is never
    more than one row to be computed next.
    """

    max_rows: int
    max_depth: int
    max_children: int = MAX_CHILDREN
    expansions: tuple[int, ...] = ()
    width: int = 0
    one_by_one: bool = False

    @classmethod
    def of(cls, shape: TreeShape, max_rows: int, max_depth: int) -> "Limits":
        """Limits that a shape asks for, of at most so many rows at such a depth."""
        if shape.expansions:
            return cls(max_rows, min(max_depth, len(shape.expansions)), max(shape.expansions), shape.expansions)
        max_depth, max_children = min(max_depth, shape.max_depth or max_depth), shape.max_children or MAX_CHILDREN
        return cls(max_rows, max_depth, max_children, width=shape.max_width)

    def children_at(self, depth: int) -> int:
        """Most children of a row at a depth."""
        if depth >= self.max_depth:
            return 0
        return self.expansions[depth] if self.expansions else self.max_children


class Node(NamedTuple):
    """A row that is known; its parent by its number among all that are."""

    token_id: int
    parent: int
    depth: int
    value: float
    is_leaf: bool = False
    logprob: float = 0.0
    distribution: DraftDistribution | None = None


class Growth:
    """A tree on its way: what is known of it, and what is to be computed next."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.max_children = limits.max_children
        # In the order in which they became known, so that of equal values a parent comes before its child.
        self.nodes = [Node(-1, -1, 0, 1.0)]
        # The best rows of all, the least of them first.
        self._best: list[tuple[float, int]] = []
        self._expanded: set[int] = set()

    def frontier(self) -> list[int]:
        """The nodes whose children are wanted next, best first; none when the tree cannot become better.

        They are among the best rows, are not expanded yet, and could have a child among the best rows.
        """
        if ROOT not in self._expanded:
            return [ROOT] if self.limits.max_rows and self.limits.children_at(0) else []
        limits, least = self.limits, self._least()
        wanted = [
            -number
            for value, number in self._best
            if -number not in self._expanded
            and value > least
            and not self.nodes[-number].is_leaf
            and limits.children_at(self.nodes[-number].depth)
        ]
        wanted.sort(key=lambda number: (-self.nodes[number].value, number))
        if limits.width:
            newest = max(self.nodes[number].depth for number in self._expanded) + 1
            return [number for number in wanted if self.nodes[number].depth == newest][: limits.width]
        if limits.one_by_one:
            return wanted[:1]
        # The best of all that are not expanded is among the best rows in the end, whatever follows, so one is never too
        # many; of the others some are computed and left out, and must be few: they take room in the cache.
        return wanted[: max(1, (SPARE * limits.max_rows - len(self._expanded)) // 2)]

    def expand(self, number: int, children: Iterable[Child]) -> None:
        """Says what may follow a node, the likeliest first; of more than are allowed the first."""
        node = self.nodes[number]
        self._expanded.add(number)
        for child in list(children)[: self.limits.children_at(node.depth)]:
            value = max(node.value * child.share, MIN_VALUE)
            if value <= self._least():
                break
            self.nodes.append(Node(child.token_id, number, node.depth + 1, value, *child[2:]))
            # Negative, because of equal values the first known is to stay.
            heapq.heappush(self._best, (value, 1 - len(self.nodes)))
            if len(self._best) > self.limits.max_rows:
                heapq.heappop(self._best)

    def tree(self, *, with_logprobs: bool = False) -> TokenTree:
        """The best rows with their values, and log-probabilities where they are wanted."""
        return _tree(self.nodes, sorted(-each for _, each in self._best), with_logprobs=with_logprobs)

    def _least(self) -> float:
        """Value that a new row has to exceed."""
        return self._best[0][0] if len(self._best) == self.limits.max_rows else 0.0


class Filling:
    """A tree on its way, as Growth is one, whose shape and values were there before its tokens."""

    def __init__(self, shape: TokenTree) -> None:
        """See static_shape. Rows are fewer where a row has fewer children than in the shape."""
        self._values = (1.0, *shape.values)
        self._children = [shape.children(row) for row in range(len(shape) + 1)]
        self.max_children = max(map(len, self._children))
        self.nodes = [Node(-1, -1, 0, 1.0)]
        # Rows of the shape, by node.
        self._places = [ROOT]
        self._expanded: set[int] = set()

    def frontier(self) -> list[int]:
        """The nodes of the newest level whose children are wanted."""
        return [
            number
            for number, (node, place) in enumerate(zip(self.nodes, self._places, strict=True))
            if number not in self._expanded and self._children[place] and not node.is_leaf
        ]

    def expand(self, number: int, children: Iterable[Child]) -> None:
        """Says what may follow a node, the likeliest first."""
        self._expanded.add(number)
        for place, child in zip(self._children[self._places[number]], children, strict=False):
            node = Node(child.token_id, number, self.nodes[number].depth + 1, self._values[place], *child[2:])
            self.nodes.append(node)
            self._places.append(place)

    def tree(self, *, with_logprobs: bool = False) -> TokenTree:
        """Tree of all nodes; see Growth.tree."""
        return _tree(self.nodes, range(1, len(self.nodes)), with_logprobs=with_logprobs)


def _tree(nodes: Sequence[Node], numbers: Iterable[int], *, with_logprobs: bool) -> TokenTree:
    """The tree of the nodes with these numbers, among which are the parents of each."""
    order = depth_first((number, nodes[number].parent) for number in numbers)
    rows = {ROOT: 0} | {number: row for row, number in enumerate(order, start=1)}
    chosen = [nodes[number] for number in order]
    return TokenTree(
        tuple(node.token_id for node in chosen),
        tuple(rows[node.parent] for node in chosen),
        logprobs=tuple(node.logprob for node in chosen) if with_logprobs else (),
        values=tuple(node.value for node in chosen),
    )


def depth_first(nodes: Iterable[tuple[int, int]]) -> list[int]:
    """Numbers of nodes, each given with its parent's, in depth-first order; siblings stay in the order given."""
    children: dict[int, list[int]] = {}
    for number, parent in nodes:
        children.setdefault(parent, []).append(number)
    order: list[int] = []
    waiting = children.get(ROOT, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])[::-1]
    return order


def static_shape(rates: Sequence[float], max_rows: int, max_depth: int, width: int = 0) -> TokenTree:
    """The best tree where the k-th child of every row is taken with the chance rates[k]; token ids are ranks.

    rates fall, are above 0 and add up to 1 at most. `width` as in Limits. The sum of its values is the expected number
    of accepted rows.
    """
    growth = Growth(Limits(max_rows, max_depth, len(rates), width=width))
    ranked = [Child(rank, rate) for rank, rate in enumerate(rates)]
    while wanted := growth.frontier():
        for number in wanted:
            growth.expand(number, ranked)
    return growth.tree()


def level_order(expansions: Sequence[int], max_rows: int, width: int = 0) -> tuple[int, ...]:
    """Parents of the first max_rows rows, depth by depth, where rows at depth d have expansions[d] children.

    With `width` only the first that many of each depth have some.
    """
    parents: list[int] = []
    level = [ROOT]
    for count in expansions:
        first = len(parents) + 1
        parents += [parent for parent in level for _ in range(count)]
        level = list(range(first, len(parents) + 1))[: width or None]
    return tuple(parents[:max_rows])


def row_count(expansions: Sequence[int]) -> int:
    """Rows of the tree in which every row at depth d has expansions[d] children."""
    total, width = 0, 1
    for count in expansions:
        width *= count
        total += width
    return total


def check_rows(shape: TreeShape, num_rows: int, field: str, count_field: str) -> None:
    """Raises InvalidRequest about a shape whose expansions have more rows than are asked for; fields by their names."""
    found = row_count(shape.expansions)
    if found > num_rows:
        raise InvalidRequest(f"{field}.expansions", f"{found} rows", f"at most the {num_rows} rows of {count_field}")
