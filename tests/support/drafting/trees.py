"""For tests of the rules on trees: every tree that a drafter may send, every outcome of every test, many requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from support.drafting.rules import Floats, Language, Rounds, Words, mixed, pick, round_keys
from torch import Tensor

from outrider.engine.noise import GAMMA, MASK, Purpose, first_uniforms
from outrider.engine.sampling.draft_distribution import DraftDistributions
from outrider.engine.sampling.draw import draw_from
from outrider.token_tree import TokenTree
from target_service.rules.tree_probs import TreeOutcome, TreeProbs

Ints = npt.NDArray[np.int64]
TreeRule = Callable[[TreeProbs, Floats], TreeOutcome]
SHAPES: dict[str, tuple[int, ...]] = {"2": (2,), "4": (4,), "2x2": (2, 2), "3x1": (3, 1)}
# Ends of the uniforms, of which the one passes wherever anything does and the other only where everything does.
LEAST, MOST = 2.0**-60, 1 - 2.0**-53
HALVINGS = 54


def parents_of(expansions: Sequence[int]) -> tuple[int, ...]:
    """Parents of a tree in which every row of a depth has as many children, depth by depth."""
    parents: list[int] = []
    level = [0]
    for count in expansions:
        above = [row for row in level for _ in range(count)]
        level = [len(parents) + number for number in range(1, len(above) + 1)]
        parents += above
    return tuple(parents)


@dataclass(frozen=True, slots=True, eq=False)
class TreePair:
    """Distributions of a target [V + 1, V] and weights of drafters [M, V + 1, V]: row v after token v, the last row
    after the prefix.
    """

    target: Floats
    weights: Ints

    @classmethod
    def random(cls, num_tokens: int = 6, support: int = 3, num_drafters: int = 2, seed: int = 5) -> "TreePair":
        """Drafters know `support` of the tokens, others after each token; the target has most of all."""
        dice = np.random.default_rng(seed)
        rows = (num_drafters, num_tokens + 1, num_tokens)
        known = dice.random(rows).argsort(axis=2) < support
        target = dice.dirichlet([0.8] * num_tokens, num_tokens + 1)
        target[dice.random(target.shape) < 0.1] = 0
        target[:, 1] += 0.05
        return cls(target / target.sum(axis=1, keepdims=True), known * dice.integers(1, 1000, rows))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, V."""
        return self.target.shape[1]

    def distribution(self, length: int) -> Floats:
        """The target's joint distribution [V, V, ...] of `length` tokens."""
        joint = self.target[-1]
        for _ in range(length - 1):
            joint = joint[..., None] * self.target[:-1]
        return joint


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """B trees of one shape, each with its probability [B]; tokens [B, R], and what each was drawn from [B, R, V]."""

    parents: tuple[int, ...]
    token_ids: Ints
    draft: Floats
    chances: Floats

    def chosen(self, which: npt.NDArray[np.bool_] | Ints) -> "Forest":
        """Some of the trees."""
        return Forest(self.parents, self.token_ids[which], self.draft[which], self.chances[which])

    def kept_rows(self, kept: npt.NDArray[np.bool_]) -> "list[Forest]":
        """The trees without rows, where kept [B, R] says which stay; a row goes with its parent."""
        kept = kept.copy()
        for row, parent in enumerate(self.parents, start=1):
            if parent:
                kept[:, row - 1] &= kept[:, parent - 1]
        forests = []
        for pattern in np.unique(kept, axis=0):
            rows = np.flatnonzero(pattern) + 1
            numbers = {0: 0, **{int(row): number for number, row in enumerate(rows, start=1)}}
            some = self.chosen((kept == pattern).all(axis=1))
            parents = tuple(numbers[self.parents[row - 1]] for row in rows)
            forests.append(Forest(parents, some.token_ids[:, rows - 1], some.draft[:, rows - 1], some.chances))
        return forests

    def of_tokens(self) -> Floats:
        """Probability [B, R] of each row's token under what it was drawn from."""
        return np.take_along_axis(self.draft, self.token_ids[:, :, None], axis=2)[:, :, 0]


Scheme = Callable[[TreePair, int, Ints, list[Ints], int], Ints]
"""Weights [B, V] that a child is drawn from: of a pair, the root's child above it (its number, from 0), the parent's
tokens (-1 for the root), those of the earlier siblings, and how many siblings there will be."""


def independent(pair: TreePair, _branch: int, above: Ints, _earlier: list[Ints], _count: int) -> Ints:
    """All of one drafter, with replacement."""
    return pair.weights[0, above]


def without_replacement(pair: TreePair, _branch: int, above: Ints, earlier: list[Ints], _count: int) -> Ints:
    """All of one drafter, each token once."""
    weights = pair.weights[0, above].copy()
    for token_ids in earlier:
        weights[np.arange(len(weights)), token_ids] = 0
    return weights


def certain(pair: TreePair, _branch: int, above: Ints, earlier: list[Ints], _count: int) -> Ints:
    """A guess that is looked up and not drawn: the likeliest token, the next one, and then the same two again."""
    order = pair.weights[0, above].argsort(axis=1, kind="stable")[:, ::-1]
    return np.eye(pair.num_tokens, dtype=np.int64)[order[:, len(earlier) % 2]]


def two_drafters(pair: TreePair, branch: int, above: Ints, earlier: list[Ints], _count: int) -> Ints:
    """The root's children by turns of two drafters, each of which goes on after its own; equal ones stay apart."""
    by_turns = (branch if (above >= 0).any() else len(earlier)) % 2
    return pair.weights[by_turns, above]


SCHEMES: dict[str, Scheme] = {
    "independent": independent,
    "without replacement": without_replacement,
    "certain": certain,
    "two drafters": two_drafters,
}


def forest_of(pair: TreePair, expansions: Sequence[int], scheme: Scheme) -> Forest:
    """Every tree that may be drawn."""
    parents = parents_of(expansions)
    every = Forest(parents, np.zeros((1, 0), dtype=np.int64), np.zeros((1, 0, pair.num_tokens)), np.ones(1))
    for row, parent in enumerate(parents, start=1):
        earlier = [every.token_ids[:, other - 1] for other in range(1, row) if parents[other - 1] == parent]
        above = every.token_ids[:, parent - 1] if parent else np.full(len(every.chances), -1)
        top = row
        while parents[top - 1]:
            top = parents[top - 1]
        weights = scheme(pair, top - 1, above, earlier, parents.count(parent))
        draft = weights / weights.sum(axis=1, keepdims=True)
        trees, token_ids = draft.nonzero()
        every = Forest(
            parents,
            np.concatenate((every.token_ids[trees], token_ids[:, None]), axis=1),
            np.concatenate((every.draft[trees], draft[trees, None]), axis=1),
            every.chances[trees] * draft[trees, token_ids],
        )
    return every


def probs_of(pair: TreePair, forest: Forest) -> TreeProbs:
    """What a rule compares, with a place for every token that any draft knows; the others are the target's alone."""
    behind = np.concatenate((np.full((len(forest.chances), 1), -1), forest.token_ids), axis=1)
    places = np.flatnonzero(forest.draft.any(axis=(0, 1)))
    numbers = np.zeros(pair.num_tokens, dtype=np.int64)
    numbers[places] = np.arange(len(places))
    target = pair.target[behind]
    others = target.sum(axis=2) - target[:, :, places].sum(axis=2)
    return TreeProbs(
        forest.parents,
        target[:, :, places],
        np.maximum(others, 0),
        forest.draft[:, :, places],
        numbers[forest.token_ids],
    )


def next_probs(pair: TreePair, forest: Forest, outcome: TreeOutcome) -> Floats:
    """What the next token of each tree follows [B, V]."""
    behind = np.concatenate((np.full((len(forest.chances), 1), -1), forest.token_ids), axis=1)
    every = np.arange(len(behind))
    probs = pair.target[behind[every, outcome.rows]]
    places = np.flatnonzero(forest.draft.any(axis=(0, 1)))
    replaced = probs.copy()
    replaced[:, places] = outcome.left
    inner = np.isin(outcome.rows, forest.parents) & (replaced.sum(axis=1) > 0)
    probs[inner] = replaced[inner]
    return probs / probs.sum(axis=1, keepdims=True)


def thresholds(rule: TreeRule, probs: TreeProbs) -> Floats:
    """For each row the chance [B, R] that its test succeeds where it is made, by a search: nothing else is known.

    Where it cannot be made, because a row above it cannot pass or a sibling cannot fail, anything.
    """
    count = len(probs.parents)
    tree = TokenTree((1,) * count, probs.parents)
    found = np.zeros((len(probs.drawn), count))
    for row in range(1, count + 1):
        uniforms = np.full(found.shape, MOST)
        uniforms[:, [above - 1 for above in tree.path(row)]] = LEAST
        # A row whose descendant cannot fail has passed by it.
        below = [other for other in range(row, count + 1) if row in tree.path(other)]
        low, high = np.zeros(len(found)), np.ones(len(found))
        for _ in range(HALVINGS):
            uniforms[:, row - 1] = middle = (low + high) / 2
            passed = np.isin(rule(probs, uniforms).rows, below)
            low, high = np.where(passed, middle, low), np.where(passed, high, middle)
        # A search cannot distinguish 1 from the number before it.
        found[:, row - 1] = np.where(high == 1, 1, low)
    return found


def outcomes(rule: TreeRule, pair: TreePair, forest: Forest) -> Iterator[tuple[Forest, TreeOutcome]]:
    """Every pattern of tests that succeed and fail: the trees, with the probability of both, and the outcomes."""
    if not forest.parents:
        nothing = TreeOutcome(np.zeros(len(forest.chances), dtype=np.int64), np.zeros((len(forest.chances), 0)))
        yield forest, nothing
        return
    probs = probs_of(pair, forest)
    edges = thresholds(rule, probs)
    for pattern in product((False, True), repeat=len(forest.parents)):
        uniforms = np.where(pattern, edges / 2, (1 + edges) / 2)
        weights = np.where(pattern, edges, 1 - edges).prod(axis=1) * forest.chances
        # The places stay those of all trees.
        some = replace(forest, chances=weights)
        yield some, rule(probs, uniforms)


def committed_distribution(rule: TreeRule, pair: TreePair, forests: Sequence[Forest], length: int) -> Floats:
    """The joint distribution [V, V, ...] of `length` tokens: a round with these trees, then the target alone."""
    joint = np.zeros((pair.num_tokens,) * length)
    for forest in forests:
        tree = TokenTree((1,) * len(forest.parents), forest.parents)
        for some, outcome in outcomes(rule, pair, forest):
            following = next_probs(pair, some, outcome) * some.chances[:, None]
            for row in np.unique(outcome.rows).tolist():
                which, path = outcome.rows == row, tree.path(row)
                tokens = some.token_ids[which][:, [each - 1 for each in path]]
                part = np.zeros((pair.num_tokens,) * (len(path) + 1))
                np.add.at(part, tuple(tokens.T), following[which] if path else following[which].sum(axis=0))
                for _ in range(length - part.ndim):
                    part = part[..., None] * pair.target[:-1]
                joint += part.sum(axis=tuple(range(length, part.ndim)))
    return joint


def mean_kept(rule: TreeRule, pair: TreePair, forest: Forest) -> float:
    """Expected number of draft tokens that are kept."""
    depths = np.array(TokenTree((1,) * len(forest.parents), forest.parents).depths)
    return sum(float(some.chances @ depths[outcome.rows]) for some, outcome in outcomes(rule, pair, forest))


def lane_keys(seeds: Words, base_len: int, position: int, purpose: Purpose, lane: int) -> Words:
    """`round_key` of many seeds in a lane, bit for bit."""
    keys = round_keys(seeds, base_len, position, purpose)
    return mixed(~keys + np.uint64(GAMMA * lane & MASK)) if lane else keys


@cache
def lane_keys_of_all(base_len: int, position: int, purpose: Purpose, lane: int, num_seeds: int) -> Tensor:
    """Keys [num_seeds] of the seeds 0, 1, 2, ..., as the engine takes them."""
    return torch.from_numpy(
        lane_keys(np.arange(num_seeds, dtype=np.uint64), base_len, position, purpose, lane).view(np.int64)
    )


class TreeRounds(Rounds):
    """Requests with the seeds 0, 1, 2, ... under one rule, with a tree of one shape in every round."""

    def __init__(
        self,
        language: Language,
        rule: TreeRule,
        expansions: Sequence[int],
        *,
        num_seeds: int,
        replacement: bool = False,
        top_n: int = 256,
    ) -> None:
        super().__init__(language, num_seeds=num_seeds, draft_count=len(expansions), top_n=top_n)
        self.tree_rule, self.replacement = rule, replacement
        parents = parents_of(expansions)
        self.tree = TokenTree((1,) * len(parents), parents)
        depths = self.tree.depths[1:]
        # Each row's number among those of its depth.
        self.lanes = {
            purpose: [depths[:place].count(depth) for place, depth in enumerate(depths)] for purpose in Purpose
        }

    def play(self, seeds: Tensor, last: Tensor, base_len: int) -> Tensor:
        """One round of the requests with these seeds: what it commits [B, D + 1], -1 after the last token."""
        token_ids, distributions = self.draft_trees(seeds, last, base_len)
        rows = torch.cat((last[:, None], token_ids), dim=1)
        uniforms = np.stack(
            [
                first_uniforms(self.lane_keys(seeds, base_len, row, Purpose.ACCEPTANCE).tolist())
                for row in range(1, len(self.tree) + 1)
            ],
            axis=1,
        )
        target = self.target_probs[rows].numpy()
        draft = np.stack([self.dense(each) for each in distributions], axis=1)
        probs = TreeProbs(self.tree.parents, target, np.zeros(target.shape[:2]), draft, token_ids.numpy())
        outcome = self.tree_rule(probs, uniforms)
        accepted = torch.from_numpy(outcome.rows)
        behind = self.target_probs[rows.gather(1, accepted[:, None])[:, 0]]
        inner = torch.from_numpy(np.isin(outcome.rows, self.tree.parents) & (outcome.left.max(axis=1) > 0))
        following = torch.where(inner[:, None], torch.from_numpy(outcome.left), behind)
        committed = torch.full((len(seeds), self.draft_count + 1), -1)
        for row in accepted.unique().tolist():
            which, path = accepted == row, self.tree.path(row)
            key = self.residual_key if self.tree.children(row) else self.token_key
            keys = self.keys(key, base_len, base_len + len(path))[seeds[which]]
            committed[which, : len(path)] = rows[which][:, list(path)]
            committed[which, len(path)] = draw_from(following[which], keys)
        return committed

    def draft_trees(self, seeds: Tensor, last: Tensor, base_len: int) -> tuple[Tensor, list[DraftDistributions]]:
        """The trees' tokens [B, R], and what those of each row were drawn from."""
        token_ids: list[Tensor] = []
        distributions: list[DraftDistributions] = []
        siblings: dict[int, int] = {}
        for row, parent in enumerate(self.tree.parents, start=1):
            sibling = siblings.get(parent)
            if sibling is None:
                distributions.append(pick(self.distributions, token_ids[parent - 1] if parent else last))
            elif self.replacement:
                distributions.append(distributions[sibling - 1])
            else:
                distributions.append(distributions[sibling - 1].without(token_ids[sibling - 1]))
            siblings[parent] = row
            token_ids.append(distributions[-1].draw(self.lane_keys(seeds, base_len, row, Purpose.DRAFT)))
        return torch.stack(token_ids, dim=1), distributions

    def lane_keys(self, seeds: Tensor, base_len: int, row: int, purpose: Purpose) -> Tensor:
        """Keys of the draw or the test of a row."""
        position, lane = base_len + self.tree.depths[row] - 1, self.lanes[purpose][row - 1]
        return lane_keys_of_all(base_len, position, purpose, lane, self.num_seeds)[seeds]

    def dense(self, distributions: DraftDistributions) -> Floats:
        """Probabilities [B, V]."""
        weights = distributions.weights.double()
        spread = torch.zeros(len(weights), self.num_tokens, dtype=torch.float64)
        probs: Floats = spread.scatter_add(
            1, distributions.token_ids, weights / weights.sum(dim=1, keepdim=True)
        ).numpy()
        return probs
