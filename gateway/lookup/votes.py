"""Many places that vote for what comes next: a tree of guesses with an estimate for each.

The continuations of all places are a trie, and a child's value is its parent's times its share of the votes
(SuffixDecoding, arXiv 2411.04975) times how often guesses of that kind are accepted. Where places of several kinds, or
with matches of very different lengths, stand for one row, those that are accepted most often vote first, and the others
only about what is left, as in prediction by partial matching (Cleary and Witten, 1984, with exclusion).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeAlias

from gateway.lookup.chains import Tokens
from gateway.lookup.rates import GROUNDS, LONGEST, NAMES, TABLE_GROUND, Kind
from outrider.token_tree import EMPTY, TokenTree

VALUE_OF = itemgetter(0)


class NextTokens(Protocol):
    """Table of the tokens that follow a token at all, for want of something better."""

    def after(self, token_id: int) -> Sequence[tuple[int, float]]:
        """Tokens with their shares, the most frequent first; an id below 0 stands for the beginning of a text."""


class Voter(NamedTuple):
    """A place in some text after a match of so many tokens, and where the text is from."""

    kind: Kind
    tokens: Tokens
    place: int
    length: int


class Ground(NamedTuple):
    """Ground of a row's value: the number of its rate, and its share of the votes there."""

    number: int
    share: float


# A token after a row: its value, its id, its ground's number, its share there, and who named it.
Child: TypeAlias = tuple[float, int, int, float, list[Voter]]


@dataclass(frozen=True, slots=True)
class Look:
    """Guesses after the committed tokens. Rows fall in value, so that the first n rows of the tree are a tree."""

    tree: TokenTree = EMPTY
    sources: tuple[str, ...] = ()
    """Source of each row: lookup, datastore, prediction, table or grammar."""
    match_len: int = 0
    """Length of the longest match, at most 32 tokens; 0 where there is none."""
    grounds: tuple[Ground, ...] = ()

    def cut(self, num_rows: int) -> "Look":
        """Look with only the first rows."""
        tree = self.tree
        if num_rows >= len(tree):
            return self
        kept = TokenTree(tree.token_ids[:num_rows], tree.parents[:num_rows], values=tree.values[:num_rows])
        return Look(kept, self.sources[:num_rows], self.match_len, self.grounds[:num_rows])


NOTHING = Look()


@dataclass(slots=True)
class Vote:
    """Count of all votes: the rate of each ground, and the last committed token, -1 where there is none."""

    means: Sequence[float]
    last_token_id: int
    table: NextTokens | None = None

    def grow(self, voters: list[Voter], max_rows: int, max_depth: int, least: float = 0.0, *, chain: bool) -> Look:
        """The rows of highest value above the least one, one after the other; as a chain only the best child of each
        row.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        values: list[float] = []
        grounds: list[Ground] = []
        # Of equal value what came first goes first; no entry after the order is ever compared.
        heap: list[tuple[float, int, int, tuple[int, ...], Child]] = []
        match_len = max([voter.length for voter in voters], default=0)
        row, value, order = 0, 1.0, 0
        path: tuple[int, ...] = ()
        while len(token_ids) < max_rows:
            if len(path) < max_depth:
                most = 1 if chain else max_rows - len(token_ids)
                for child in self._children(voters, path, value)[:most]:
                    if child[0] <= least:
                        break
                    order += 1
                    heappush(heap, (-child[0], order, row, path, child))
            if not heap:
                break
            _, _, parent, path, (value, token_id, number, share, voters) = heappop(heap)
            path = (*path, token_id)
            token_ids.append(token_id)
            parents.append(parent)
            values.append(value)
            grounds.append(Ground(number, share))
            row = len(token_ids)
        if not token_ids:
            return NOTHING
        tree = TokenTree(tuple(token_ids), tuple(parents), values=tuple(values))
        return Look(tree, tuple([NAMES[ground.number] for ground in grounds]), match_len, tuple(grounds))

    def _children(self, voters: list[Voter], path: tuple[int, ...], value: float) -> list[Child]:
        """Children that may follow a path, the best first; their values add up to the path's at most."""
        groups = _ballots(voters, path)
        if not groups:
            if self.table is None:
                return []
            scale = value * self.means[TABLE_GROUND]
            last = self.table.after(path[-1] if path else self.last_token_id)
            return [(scale * share, token_id, TABLE_GROUND, share, []) for token_id, share in last]
        children: dict[int, Child] = {}
        for number in groups if len(groups) == 1 else sorted(groups, key=self.means.__getitem__, reverse=True):
            group, scale = groups[number], value * self.means[number]
            total = sum([len(found) for token_id, found in group.items() if token_id not in children])
            for token_id, found in group.items():
                if token_id in children:
                    children[token_id][-1].extend(found)
                else:
                    share = len(found) / total
                    children[token_id] = (scale * share, token_id, number, share, found)
            value -= scale if total else 0
        return sorted(children.values(), key=VALUE_OF, reverse=True)


def _ballots(voters: list[Voter], path: tuple[int, ...]) -> dict[int, dict[int, list[Voter]]]:
    """Voters that name each token after a path, by what they stand on."""
    groups: dict[int, dict[int, list[Voter]]] = {}
    depth = len(path)
    for voter in voters:
        kind, tokens, place, length = voter
        place += depth
        if place < len(tokens):
            token_id = tokens[place]
        elif kind is Kind.OWN:
            # A text that repeats itself goes on with what was guessed of it.
            token_id = path[place - len(tokens)]
        else:
            continue
        if token_id < 0:
            continue
        length += depth
        number = GROUNDS[kind][length if length < LONGEST else LONGEST]
        if number not in groups:
            groups[number] = {token_id: [voter]}
        elif token_id in groups[number]:
            groups[number][token_id].append(voter)
        else:
            groups[number][token_id] = [voter]
    return groups
