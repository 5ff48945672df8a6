"""Many places that vote for what comes next: a tree of guesses with an estimate for each.

The continuations of all places are a trie, and a child's value is its parent's times its share of the votes
(SuffixDecoding, arXiv 2411.04975) times how often guesses of that kind are accepted. Where places of several kinds, or
with matches of very different lengths, stand for one row, those that are accepted most often vote first, and the others
only about what is left, as in prediction by partial matching (Cleary and Witten, 1984, with exclusion).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from gateway.lookup.chains import Match
from gateway.lookup.rates import TABLE_GROUND, Kind, ground_of, name_of
from outrider.token_tree import EMPTY, TokenTree


class NextTokens(Protocol):
    """What follows a token at all, for want of something better."""

    def after(self, token_id: int) -> Sequence[tuple[int, float]]:
        """Tokens with their shares, the most frequent first."""


class Voter(NamedTuple):
    """A match and where it was found."""

    kind: Kind
    match: Match


class Ground(NamedTuple):
    """What a row's value stands on: the number of its rate, and its share of the votes there."""

    number: int
    share: float


class Child(NamedTuple):
    """A token behind a row."""

    token_id: int
    value: float
    ground: Ground
    voters: list[Voter]


@dataclass(frozen=True, slots=True)
class Look:
    """Guesses behind the committed tokens. Rows fall in value, so that the first n rows of the tree are a tree."""

    tree: TokenTree = EMPTY
    sources: tuple[str, ...] = ()
    """Of each row: lookup, datastore, prediction or table."""
    match_len: int = 0
    """Of the longest match, at most 32 tokens; 0 where there is none."""
    grounds: tuple[Ground, ...] = ()

    def cut(self, num_rows: int) -> "Look":
        """Only the first rows."""
        tree = self.tree
        if num_rows >= len(tree):
            return self
        kept = TokenTree(tree.token_ids[:num_rows], tree.parents[:num_rows], values=tree.values[:num_rows])
        return Look(kept, self.sources[:num_rows], self.match_len, self.grounds[:num_rows])


NOTHING = Look()


@dataclass(frozen=True, slots=True)
class Vote:
    """One count of all votes: the rate of each ground, and the last committed token."""

    means: Sequence[float]
    last_token_id: int
    table: NextTokens | None = None

    def grow(self, voters: list[Voter], max_rows: int, max_depth: int, *, chain: bool) -> Look:
        """The rows of highest value, one after the other; as a chain only the best child of each row."""
        token_ids: list[int] = []
        parents: list[int] = []
        values: list[float] = []
        grounds: list[Ground] = []
        # Of equal value what came first goes first; nothing behind the number is ever compared.
        heap: list[tuple[float, int, int, tuple[int, ...], Child]] = []
        match_len = max((voter.match.length for voter in voters), default=0)
        row, value, number = 0, 1.0, 0
        path: tuple[int, ...] = ()
        while len(token_ids) < max_rows:
            if len(path) < max_depth:
                for child in self._children(voters, path, value)[: 1 if chain else None]:
                    number += 1
                    heappush(heap, (-child.value, number, row, path, child))
            if not heap:
                break
            _, _, parent, path, child = heappop(heap)
            voters, value, path = child.voters, child.value, (*path, child.token_id)
            token_ids.append(child.token_id)
            parents.append(parent)
            values.append(value)
            grounds.append(child.ground)
            row = len(token_ids)
        if not token_ids:
            return NOTHING
        tree = TokenTree(tuple(token_ids), tuple(parents), values=tuple(values))
        return Look(tree, tuple(name_of(ground.number) for ground in grounds), match_len, tuple(grounds))

    def _children(self, voters: list[Voter], path: tuple[int, ...], value: float) -> list[Child]:
        """What may follow a path, the best first; their values add up to the path's at most."""
        votes: dict[int, dict[int, int]] = {}
        followers: dict[int, list[Voter]] = {}
        for voter in voters:
            token_id = _said(voter, path)
            if token_id >= 0:
                counts = votes.setdefault(ground_of(voter.kind, voter.match.length + len(path)), {})
                counts[token_id] = counts.get(token_id, 0) + 1
                followers.setdefault(token_id, []).append(voter)
        if not votes:
            return self._last_resort(path, value)
        children: dict[int, Child] = {}
        for ground in sorted(votes, key=self.means.__getitem__, reverse=True):
            fresh = {token_id: count for token_id, count in votes[ground].items() if token_id not in children}
            total = sum(fresh.values())
            for token_id, count in fresh.items():
                share = count / total
                worth = value * self.means[ground] * share
                children[token_id] = Child(token_id, worth, Ground(ground, share), followers[token_id])
            value *= 1 - self.means[ground] if fresh else 1
        return sorted(children.values(), key=lambda child: -child.value)

    def _last_resort(self, path: tuple[int, ...], value: float) -> list[Child]:
        if self.table is None:
            return []
        scale = value * self.means[TABLE_GROUND]
        found = self.table.after(path[-1] if path else self.last_token_id)
        return [Child(token_id, scale * share, Ground(TABLE_GROUND, share), []) for token_id, share in found]


def _said(voter: Voter, path: tuple[int, ...]) -> int:
    """What stands behind a path at a voter's place, below 0 where nothing does."""
    tokens, place = voter.match.tokens, voter.match.place + len(path)
    if place < len(tokens):
        return int(tokens[place])
    # A text that repeats itself goes on with what was guessed of it.
    return path[place - len(tokens)] if voter.kind is Kind.OWN else -1
