"""A drafting head as a model that a runner computes: its states lie in its cache, beside keys and values.

The features of a slot are the state after the token in it, and the number of guesses that it stands on. For committed
tokens the drafter copies them from the target; for the last token of a text and for guesses the forward writes what
the head makes of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.heads.head import Head, HeadRows, TargetParts
from outrider.engine.models.config import DecoderFacts
from outrider.engine.models.decoder import Decoder
from outrider.engine.ops import Ops, Weight


class HeadDecoder(Decoder):
    """Rows of a head; its cache has keep_features(state_size + 1)."""

    def __init__(self, head: Head, target: TargetParts, ops: Ops) -> None:
        """`ops` are those that the head computes with."""
        self._drafting = head
        self.ops = ops
        self.embedding = target.embedding
        facts = head.facts
        self.config = DecoderFacts(
            vocab_size=target.vocab_size,
            num_layers=facts.num_kv_layers,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            context_len=facts.context_len,
            eos_token_ids=frozenset(),
            masks=facts.masks,
        )

    @property
    def weights(self) -> Sequence[Weight]:
        return self._drafting.weights

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes rows like any Decoder. Only wanted rows' states are written: the others' are the target's."""
        if self._drafting.facts.reads_own or self._drafting.facts.masks is not None:
            # All states are the target's, or there are none.
            states = cache.features.index_select(0, plan.slots)[:, :-1].float().contiguous()
            outputs, _ = self._drafting.step(HeadRows(plan, cache, states, ()))
            return self._drafting.logits(outputs.index_select(0, wanted), ())
        # The second last of a row's list; the first token of a text has none before it, and its row is never read.
        before = plan.key_slots.index_select(0, plan.key_starts + (plan.key_counts - 2).clamp_min(0))
        found = cache.features.index_select(0, before.long()).float().masked_fill((plan.key_counts == 1)[:, None], 0)
        depths, wanted_depths = self._depths(found[:, -1], wanted)
        # Rows do not see the first token of their text; that one's own row sees itself.
        is_later = plan.key_counts > 1
        later = plan.with_lists(
            plan.key_starts + is_later, plan.key_counts - is_later.int(), max(plan.max_key_count - 1, 1)
        )
        outputs, states = self._drafting.step(HeadRows(later, cache, found[:, :-1].contiguous(), depths))
        behind = torch.cat((states.index_select(0, wanted), found[:, -1:].index_select(0, wanted) + 1), 1)
        cache.features.index_copy_(0, plan.slots.index_select(0, wanted), behind.to(cache.features.dtype))
        return self._drafting.logits(outputs.index_select(0, wanted), wanted_depths)

    def _depths(self, column: Tensor, wanted: Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Depths of all rows and of the wanted ones, for heads that compute each in its own way; else none."""
        if self._drafting.facts.max_draft_count is None:
            return (), ()
        # In one, because a device is waited for.
        both = torch.cat((column, column.index_select(0, wanted))).int().tolist()
        return both[: len(column)], both[len(column) :]
