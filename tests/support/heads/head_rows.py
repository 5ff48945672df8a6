"""Runs a head row by row outside of any runner: its own cache, its own plans, slots in no order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.heads.head import Head, HeadRows


def head_cache(head: Head, num_slots: int) -> KVCache:
    """A cache for one text; NaN in all slots, so that reading one that nothing wrote shows."""
    facts = head.facts
    cpu = torch.device("cpu")
    cache = KVCache(facts.num_kv_layers, num_slots, facts.num_kv_heads, facts.head_dim, torch.float32, cpu)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    return cache


def rows_plan(token_ids: Sequence[int], first: int, slots: Tensor) -> RowPlan:
    """Rows of a chain at the positions from `first` on; row j sees the slots of the positions 1 to j."""
    positions = torch.arange(first, first + len(token_ids))
    return RowPlan(
        token_ids=torch.tensor(list(token_ids)),
        positions=positions,
        slots=slots[positions].contiguous(),
        key_slots=slots[1 : first + len(token_ids)].int(),
        key_starts=torch.zeros(len(token_ids), dtype=torch.int64),
        key_counts=positions.int(),
        max_key_count=int(positions[-1]),
    )


def run_head(head: Head, token_ids: Sequence[int], boundaries: Tensor, drafted: Sequence[int]) -> Tensor:
    """Logits [tokens - 1 + drafted, V] of the rows of all tokens but the first, in one step, and of drafted ones.

    boundaries [N + 1, tokens, H] are what the target knew; the last is what left its final norm.
    """
    total = len(token_ids) + len(drafted)
    slots = torch.randperm(total + 7, generator=torch.Generator().manual_seed(total))[:total]
    cache = head_cache(head, total + 7)
    features = torch.cat([boundaries[tap] for tap in head.facts.taps], 1)
    count = len(token_ids) - 1
    plan = rows_plan(token_ids[1:], 1, slots)
    outputs, states = head.step(HeadRows(plan, cache, head.states_of(features[:-1].contiguous()), [0] * count))
    rows, state = [head.logits(outputs, [0] * count)], states[-1:]
    for depth, token_id in enumerate(drafted, start=1):
        plan = rows_plan([token_id], len(token_ids) + depth - 1, slots)
        outputs, state = head.step(HeadRows(plan, cache, state, [depth]))
        rows.append(head.logits(outputs, [depth]))
    return torch.cat(rows)
