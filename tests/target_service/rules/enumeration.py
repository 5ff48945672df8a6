"""What a rule for chains commits, by going through every outcome of every draw: laws without sampling.

A little language whose next token depends on the last one, target and draft, and every chain of K tokens behind one
prefix. Coins are taken at the edges of what can happen: between two neighbouring thresholds a rule answers the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from target_service.rules.outcome import Outcome

Floats = npt.NDArray[np.float64]
# Searches of so many steps each, by which the place of a threshold is known to 52 bits.
WIDTH, SEARCHES = 130, 8
RuleFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Outcome]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Target laws and the draft's weights, both [V + 1, V]: row v behind token v, the last row behind the prefix."""

    target: Floats
    weights: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.target.shape[1]

    @property
    def draft(self) -> Floats:
        """The draft's laws [V + 1, V]."""
        return self.weights / self.weights.sum(axis=1, keepdims=True)

    def law(self, length: int) -> Floats:
        """The target's joint law [V, V, ...] of `length` tokens."""
        joint = self.target[-1]
        for _ in range(length - 1):
            joint = joint[..., None] * self.target[:-1]
        return joint


def chains(pair: Pair, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every chain of `count` tokens that the draft may draw, with its probability."""
    for chain in product(range(pair.num_tokens), repeat=count):
        rows = (-1, *chain[:-1])
        chance = float(np.prod([pair.draft[row, token_id] for row, token_id in zip(rows, chain, strict=True)]))
        if chance > 0:
            yield chain, chance


def ask(rule: RuleFunction, pair: Pair, chain: tuple[int, ...], coins: Floats) -> Outcome:
    """The rule's answers about one chain for many coins [B, K]."""
    rows = torch.tensor((-1, *chain))
    width = len(coins)
    target_probs = torch.from_numpy(pair.target)[rows].expand(width, -1, -1)
    ids = torch.arange(pair.num_tokens).expand(width, len(chain), -1)
    weights = torch.from_numpy(pair.weights)[rows[:-1]].expand(width, -1, -1)
    return rule(target_probs, torch.tensor(chain).expand(width, -1), ids, weights, torch.from_numpy(coins))


def acceptance(rule: RuleFunction, pair: Pair, chain: tuple[int, ...]) -> list[tuple[int, float, Floats]]:
    """(accepted count, its probability over the coins, law of the next token) for every count that can happen.

    Each coin is compared with one threshold, which is found to the last bit while the others stay where they are.
    """
    found: dict[int, tuple[float, Floats]] = {}
    for cell in _cells(rule, pair, chain):
        outcome = ask(rule, pair, chain, np.array([[middle for middle, _ in cell]]))
        count = int(outcome.accepted_count)
        probs = outcome.probs[0].numpy()
        chance = float(np.prod([width for _, width in cell]))
        found[count] = found.get(count, (0.0,))[0] + chance, probs / probs.sum()
    return [(count, *rest) for count, rest in found.items()]


def _cells(rule: RuleFunction, pair: Pair, chain: tuple[int, ...]) -> Iterator[tuple[tuple[float, float], ...]]:
    """Boxes of coins, (middle, width) for each: below and above the threshold of every place."""
    sides = [[(edge / 2, edge), ((1 + edge) / 2, 1 - edge)] for edge in _edges(rule, pair, chain)]
    yield from (cell for cell in product(*sides) if all(width > 0 for _, width in cell))


def _edges(rule: RuleFunction, pair: Pair, chain: tuple[int, ...]) -> list[float]:
    """For each place the chance that its test succeeds, by a search that asks for many coins at once."""
    edges = []
    for place in range(len(chain)):
        low, high = 0.0, 1.0
        for _ in range(SEARCHES):
            coins = np.linspace(low, high, WIDTH)
            place_of_low = int(_successes(rule, pair, chain, place, coins[1:-1]).sum())
            low, high = coins[place_of_low], coins[place_of_low + 1]
        edges.append(round(float(low), 15))
    return edges


def _successes(
    rule: RuleFunction, pair: Pair, chain: tuple[int, ...], place: int, coins: Floats
) -> npt.NDArray[np.bool_]:
    """Whether a test succeeds with each coin: it decides where those before it succeed and those behind it fail."""
    every = np.full((len(coins), len(chain)), 1 - 2.0**-53)
    every[:, :place] = 2.0**-60
    every[:, place] = coins
    return ask(rule, pair, chain, every).accepted_count.numpy() > place


def committed_law(rule: RuleFunction, pair: Pair, count: int, length: int) -> Floats:
    """The joint law [V, V, ...] of the first `length` tokens: a round with chains of `count`, then the target alone."""
    joint = np.zeros((pair.num_tokens,) * length)
    for chain, drawn in chains(pair, count):
        for accepted, chance, next_law in acceptance(rule, pair, chain):
            _add(joint, pair, chain[:accepted], drawn * chance * next_law)
    return joint


def mean_accepted(rule: RuleFunction, pair: Pair, count: int) -> float:
    """Expected number of draft tokens that are kept."""
    return sum(
        drawn * chance * accepted
        for chain, drawn in chains(pair, count)
        for accepted, chance, _ in acceptance(rule, pair, chain)
    )


def _add(joint: Floats, pair: Pair, kept: tuple[int, ...], next_law: Floats) -> None:
    """Adds what one outcome commits, cut or continued to the length of `joint`."""
    if len(kept) >= joint.ndim:
        joint[kept[: joint.ndim]] += next_law.sum()
        return
    tail = next_law
    for _ in range(joint.ndim - len(kept) - 1):
        tail = tail[..., None] * pair.target[:-1]
    joint[kept] += tail
