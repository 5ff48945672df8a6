"""What every drafting head has in common: a state after each token, and one step from a state and a token to the next.

A row is a token x_j together with the state after the token before it: of a committed token that is what the target
knew there (its features), of a guess what the head itself made of it. Row j has position j, and the first token of a
text has no row that anything reads. A guess drawn after row j is for position j + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.config import Masks
from outrider.engine.ops import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Sizes of a head, and what it reads of the target."""

    method: str
    """"eagle1", "eagle3", "mtp", "kangaroo", "mlp_speculator", "hydra", "medusa", "bpd" or
    "dflash"."""
    taps: tuple[int, ...]
    """Boundaries of the target whose residuals it reads, side by side in this order: b is what enters layer b, and N,
    the number of layers, is what leaves the final norm."""
    state_size: int
    """0 for one without states."""
    num_kv_layers: int
    """Layers with keys and values of their own."""
    num_kv_heads: int
    head_dim: int
    context_len: int
    """Longest text that it guesses after; the target's, or fewer tokens where its own positions end."""
    max_draft_count: int | None = None
    """Most guesses that it has heads for; None for one that goes on as long as it is asked."""
    reads_own: bool = False
    """Whether a row's state is that of its own token, of a guess too: then the target's layers below the tap compute
    each guess first, and a text's first token has a row like all others."""
    masks: Masks | None = None
    """Masks of one whose rows are blocks, and whose keys and values of committed tokens are made of features alone."""


class HeadRows(NamedTuple):
    """R rows of one step. The lists of the plan name no slot of a text's first token, except that row's own."""

    plan: RowPlan
    cache: KVCache
    states: Tensor
    """States [R, state_size] float32, after the token before each row's own, or after that (HeadFacts.reads_own)."""
    depths: Sequence[int]
    """0 for a row whose state is the target's own, d for one after d guesses; none of a head without a
    max_draft_count, whose step is the same for all."""


class Head(Protocol):
    """One head on one device, op by op, so that a row's bits depend on nothing but the row where the ops promise it."""

    @property
    def facts(self) -> HeadFacts: ...

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the head, without those that are the target's."""

    def states_of(self, features: Tensor) -> Tensor:
        """States [R, state_size] that the target's features [R, sum of the taps' sizes] mean."""

    def step(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        """Outputs of each row [R, any], which `logits` reads, and the state after each row [R, state_size]."""

    def logits(self, outputs: Tensor, depths: Sequence[int]) -> Tensor:
        """Logits [W, V] over the target's ids of outputs [W, any] of rows of these depths; -inf where it has none."""


class TargetParts(NamedTuple):
    """Parts of the target that a head shares, or is checked against."""

    embedding: Weight
    """[V, H]: what tokens are looked up in."""
    output: Weight
    """[V, H]: the matrix that makes logits of f."""
    num_layers: int
    context_len: int

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]


def over_target_ids(logits: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [R, N] that are about these ids [N] of the target as logits [R, V], -inf for all others; None: as is."""
    if target_ids is None:
        return logits
    return logits.new_full((logits.shape[0], vocab_size), -torch.inf).index_copy_(1, target_ids, logits)
