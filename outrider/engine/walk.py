"""A walk down a proposal by the draws after its rows: what of it is kept. Pure, for target and draft alike."""

from collections.abc import Sequence
from typing import NamedTuple

from outrider.token_tree import TokenTree


class Walk(NamedTuple):
    """A walk down a proposal: what is kept of it, the token after that, and how many draft tokens were tested."""

    accepted_rows: tuple[int, ...]
    next_token_id: int
    evaluated_count: int


def walk(tree: TokenTree, drawn: Sequence[int], substitutes: Sequence[int] = ()) -> Walk:
    """Follows the draws from the root; drawn[row] is the token drawn after that row, drawn[0] after the root.

    Rows count from 1. Of siblings with the same token the lowest row is followed. Where no child carries the draw,
    substitutes[row] is followed, unless it is 0: the rule `typical`. A row whose draw is negative has none and is not
    entered: its token ends the walk as the target's own, and the next step finds the fault where plain decoding finds
    it. Raises ValueError when there is not one draw for the root and each row.
    """
    if len(drawn) != len(tree) + 1:
        raise ValueError(f"{len(drawn)} draws for a root and {len(tree)} rows")
    visited, next_token_id = [0], drawn[0]
    while child := child_with(tree, visited[-1], drawn[visited[-1]]) or (substitutes and substitutes[visited[-1]]):
        if drawn[child] < 0:
            next_token_id = tree.token_ids[child - 1]
            break
        visited.append(child)
        next_token_id = drawn[child]
    return Walk(tuple(visited[1:]), next_token_id, count_evaluated(tree, visited))


def child_with(tree: TokenTree, row: int, token_id: int) -> int:
    """The first child with this token, 0 for none: the root is no child."""
    for child in tree.children(row):
        if tree.token_ids[child - 1] == token_id:
            return child
    return 0


def count_evaluated(tree: TokenTree, visited: Sequence[int]) -> int:
    """Number of guesses tested: one for each visited row with children, of which at most one is accepted.

    Siblings stand for one guess, so that accepted over evaluated means the same for trees and chains.
    """
    return sum(bool(tree.children(row)) for row in visited)
