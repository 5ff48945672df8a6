"""Asks a device whether a row has the same bits whatever is computed beside it, with a model's own weights.

That is a promise of our kernels, and of no compiler: what it makes of them may differ with its version and the
card. `match` rests on it, so it is looked at where a model is loaded, and not believed.
"""

import torch
from torch import Tensor

from outrider.engine.batching import CHUNK, Feed, RowPlan, build_batch
from outrider.engine.cache import BLOCK_SIZE, BlockPool, BlockTable, KVCache
from outrider.engine.models.transformer import Transformer
from outrider.engine.ops import Ops, Weight
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

# Rows beside which a row is computed: each number of rows for which kernels are made, and one more than some.
ROWS = (2, 9, 17, 33, 64, 65, 130)
# Three rows in a chain, and two more that share a part of it.
CHAIN = TokenTree((1, 2, 3), (0, 1, 2))
TREE = TokenTree((1, 2, 3, 4, 5), (0, 1, 2, 0, 1))
# Lengths within a chunk, at its end, and of a few.
LENGTHS = (CHUNK // 2, CHUNK - 2, 2 * CHUNK + 9)


def differing_operations(model: Transformer, tiles: tuple[int, ...]) -> list[str]:
    """Names of the operations whose rows differ with what is beside them; `tiles` as build_batch takes them."""
    ops, layer = model.ops, model.layers[0]
    weights: dict[str, Weight] = {
        "qkv": layer.qkv.weight,
        "output": layer.output.weight,
        "head": model.head,
    }
    for name, linear in (("gate_up", layer.gate_up), ("down", layer.down)):
        weights |= {} if linear is None else {name: linear.weight}
    if layer.experts is not None:
        weights["router"] = layer.experts.router
    device = model.embedding.device
    found = [name for name, weight in weights.items() if not _is_linear_steady(ops, weight, device)]
    return found if _Attention(model, tiles).is_steady() else [*found, "attention"]


def _is_linear_steady(ops: Ops, weight: Weight, device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(max(ROWS), weight.shape[1], device=device, generator=generator)
    # A row of its own at every place, of every number of rows.
    alone = ops.linear(rows[:1], weight)[0]
    for num_rows in ROWS:
        for place in {0, num_rows // 2, num_rows - 1}:
            batch = rows[:num_rows].roll(1, 0)
            batch[place] = rows[0]
            if not torch.equal(ops.linear(batch, weight)[place], alone):
                return False
    return True


class _Attention:
    """A cache of one layer with random keys and values, and sessions in it."""

    def __init__(self, model: Transformer, tiles: tuple[int, ...]) -> None:
        config = model.config
        self.model, self.tiles, self.device = model, tiles, model.embedding.device
        self.pool = BlockPool(4 * (max(LENGTHS) // BLOCK_SIZE + 4))
        dtype = torch.float32 if self.device.type == "cpu" else model.embedding.dtype
        sizes = 1, self.pool.num_blocks * BLOCK_SIZE, config.num_kv_heads, config.head_dim
        self.cache = KVCache(*sizes, dtype, self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        for tensor in (self.cache.keys[0], self.cache.values[0]):
            tensor.normal_(generator=generator)
        num_queries = max(LENGTHS) + len(TREE)
        self.queries = torch.randn(num_queries, config.num_heads, config.head_dim, device=self.device)

    def is_steady(self) -> bool:
        """Whether rows of a chain are those of a tree, those alone, those beside other sessions, and a prompt's."""
        return all(self._agrees(length, others) for length in LENGTHS for others in (0, 2))

    def _agrees(self, length: int, num_others: int) -> bool:
        session = self._session(length)
        others = [Feed(self._session(LENGTHS[-1])) for _ in range(num_others)]
        chain = self._attend([Feed(session, CHAIN), *others])[: 1 + len(CHAIN)]
        tree = self._attend([*others, Feed(session, TREE)])[num_others:][: 1 + len(CHAIN)]
        # The same rows, one after the other.
        steps = [self._attend([Feed(session)])]
        for token_id in CHAIN.token_ids:
            session.extend([token_id])
            session.advance(len(session), EMPTY)
            steps.append(self._attend([Feed(session)]))
        # A prompt that ends with these rows.
        session.truncate(length)
        session.extend(CHAIN.token_ids)
        session.reserve()
        session.advance(length - 9, EMPTY)
        prompt = self._attend([Feed(session), *others])[8 : 9 + len(CHAIN)]
        session.free()
        for other in others:
            other.session.free()
        return all(torch.equal(chain, rows) for rows in (tree, torch.cat(steps), prompt))

    def _session(self, length: int) -> Session:
        session = Session(BlockTable(self.pool, self.cache), range(1, length + 1), length)
        session.reserve(len(TREE))
        session.advance(length, EMPTY)
        return session

    def _attend(self, feeds: list[Feed]) -> Tensor:
        plan: RowPlan = build_batch(feeds, [feed.num_rows for feed in feeds], self.device, self.tiles).plan
        query = self.queries.index_select(0, plan.positions)
        return self.model.ops.attention(
            query, plan, self.cache.keys[0], self.cache.values[0], self.model.scale, self.model.layers[0].sinks
        )
