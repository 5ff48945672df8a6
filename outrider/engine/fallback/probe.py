"""Runs a loaded model once with rows of many sequences and again with single ones, and compares every bit.

The survey refuses what it knows to mix rows; this finds what it does not know, on the machine where it would matter.
"""

import torch
from torch import Tensor

from outrider.engine.fallback.decoder import FallbackDecoder
from outrider.engine.kv_cache import KVCache
from outrider.engine.plan import RowPlan

# Neither a multiple of a vector nor of a tile.
NUM_ROWS = 37


def rows_are_independent(decoder: FallbackDecoder) -> bool:
    """Whether first and last of 37 one-token sequences have the logits that they have alone."""
    config, device = decoder.config, decoder.embedding.device
    cache = KVCache(config.num_layers, NUM_ROWS, config.num_kv_heads, config.head_dim, torch.float32, device)
    token_ids = torch.arange(NUM_ROWS, device=device) % config.vocab_size
    positions = torch.arange(NUM_ROWS, device=device) % config.context_len
    everyone = torch.arange(NUM_ROWS, device=device)

    def logits(rows: Tensor) -> Tensor:
        wanted = torch.arange(rows.shape[0], device=device)
        return decoder.forward(_plan(token_ids[rows], positions[rows], rows), cache, wanted)

    together = logits(everyone)
    return all(torch.equal(logits(everyone[row : row + 1])[0], together[row]) for row in (0, NUM_ROWS - 1))


def _plan(token_ids: Tensor, positions: Tensor, slots: Tensor) -> RowPlan:
    """Every row sees itself alone."""
    starts = torch.arange(slots.shape[0], device=slots.device)
    return RowPlan(token_ids, positions, slots, slots.int(), starts, torch.ones_like(slots).int(), 1)
