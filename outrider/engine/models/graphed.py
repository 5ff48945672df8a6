"""A transformer's forward as few kernels of a GPU, recorded as graphs. Not another model: the bits are its forward's.

A step of few rows is one replay of a graph that was recorded for as many rows, or a few more. Neither
lengths nor sessions nor trees are part of a graph, because the kernels read them from the device. A forward of more
rows launches the same kernels one by one, which is no slower where each has much to do.
"""

from itertools import pairwise, takewhile

import structlog
import torch
import triton
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import ChainDraws, ChainingDecoder, LayeredDecoder, ProbedDecoder
from outrider.engine.models.transformer import Linear, Transformer
from outrider.engine.ops import Weight
from outrider.engine.ops.triton import layers
from outrider.engine.ops.triton_ops import OPTIONS, PARTIAL_FLOATS, TritonOps, norm_options
from outrider.engine.row_check import differing_operations

log = structlog.get_logger()

# Rows for which graphs are recorded.
GRAPH_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
# Of attention's tiles, token rows times the heads of a group: of few rows, of more, of a prompt. Larger ones of float32
# have no room in a multiprocessor's registers and shared memory.
TILES = (16, 32, 64)
WIDE_TILES = (16,)
# Numbers of work that graphs have room for, 16 MiB.
WORK_NUMBERS = 1 << 22


class GraphedTransformer(LayeredDecoder, ProbedDecoder, ChainingDecoder):
    """Computes what its Transformer would; belongs to one thread, because the activations are kept between calls."""

    def __init__(self, model: Transformer, ops: TritonOps) -> None:
        self.config: ModelConfig = model.config
        self.embedding, self.head = model.embedding, model.head
        self.ops: TritonOps = ops
        self._model = model
        self._tables = model.tables
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._cache: KVCache | None = None
        self._features = torch.empty(0)
        self._heads_each = triton.next_power_of_2(self.config.num_heads // self.config.num_kv_heads)
        self._work = torch.zeros(WORK_NUMBERS, dtype=torch.int32, device=self.embedding.device)
        self._room = PARTIAL_FLOATS // (self.config.num_heads * (self.config.head_dim + 2))
        self._partials = ops.room_for_chunks(self._room, self.config.num_heads, self.config.head_dim)
        # Nothing is promised that was not looked at.
        self._is_checked_steady = False

    @property
    def is_row_invariant(self) -> bool:
        return self._is_checked_steady

    def check_rows(self) -> None:
        """Looks at whether rows keep their bits beside others, which takes a second or two, and logs what does not."""
        differing = differing_operations(self._model, self.tiles)
        self._is_checked_steady = not differing
        if differing:
            log.error("rows differ with what is computed beside them", operations=differing, kernels=self.ops.name)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Rows of a tile; none where a layer sees only a window, because its lists begin elsewhere.

        None too where layers have steps that these kernels lack: the forward is then op by op.
        """
        tiles = WIDE_TILES if self.embedding.dtype is torch.float32 else TILES
        each = sorted({max(1, tile // self._heads_each) for tile in tiles})
        lacks = any(self.config.windows) or self.config.family.norms_outputs or any(self.config.experts)
        return () if lacks else tuple(each)

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """Rows of all sessions and of the longest, for each graph that there may be."""
        shapes = [(rows, tile) for rows in GRAPH_ROWS for before, tile in pairwise((0, *self.tiles)) if rows > before]
        return [(rows, min(rows, tile)) for rows, tile in shapes] if self.ops.has_graphs else []

    @property
    def weights(self) -> list[Weight]:
        return self._model.weights

    def embed_more(self, rows: Tensor) -> None:
        """Adds embeddings like any ProbedDecoder."""
        self._model.embed_more(rows)
        self.embedding = self._model.embedding
        self._graphs.clear()

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        if plan.work is None:
            return self._model.forward(plan, cache, wanted)
        if cache is not self._cache or cache.features is not self._features:
            self._graphs.clear()
            self._cache, self._features = cache, cache.features
        fits = plan.work.shape[0] <= WORK_NUMBERS and plan.num_row_chunks <= self._room
        if self.ops.has_graphs and fits and plan.num_rows <= GRAPH_ROWS[-1]:
            self._work[: plan.work.shape[0]].copy_(plan.work)
            key = next(size for size in GRAPH_ROWS if size >= plan.num_rows), plan.tile_rows
            if key not in self._graphs:
                self._graphs[key] = self._record(*key, cache)
            graph, logits = self._graphs[key]
            graph.replay()
            return logits[: plan.num_rows] if wanted.shape[0] == plan.num_rows else logits.index_select(0, wanted)
        x = self._compute(plan.work, plan.num_rows, plan.num_row_chunks, plan.tile_rows, cache)
        if not wanted.shape[0]:
            return x.new_empty(0, self.config.vocab_size)
        return self._logits(x if wanted.shape[0] == plan.num_rows else x.index_select(0, wanted))

    def chain(self, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws) -> list[list[int]]:
        below, (depth, num_wanted) = plan.below, draws.keys.shape
        if below is None or below.work is None:
            return []
        found = torch.empty_like(draws.keys)
        logits, every = self.forward(plan, cache, wanted), torch.arange(num_wanted, device=wanted.device)
        for step in range(depth):
            if step:
                by = 2 - depth if step == 1 else 1
                layers.go_down[(num_wanted,)](below.work, found[step - 1], by, **OPTIONS)
                logits = self.forward(below, cache, every)
            found[step] = self.ops.choose(logits, draws.temperatures, draws.keys[step], draws.num_tokens)
        # Only now the device is waited for.
        levels: list[list[int]] = found.tolist()
        return [*takewhile(lambda level: min(level) >= 0, levels)]

    def forward_layers(self, plan: RowPlan, cache: KVCache, wanted: Tensor, layers: range) -> Tensor:
        return self._model.forward_layers(plan, cache, wanted, layers)

    def _record(self, size: int, tile_rows: int, cache: KVCache) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of so many rows and the logits that it leaves; computes what the work says now, too."""

        def compute() -> Tensor:
            return self._logits(self._compute(self._work, size, self._room, tile_rows, cache))

        # What is compiled, loaded or allocated for the first time would end a recording.
        stream = torch.cuda.Stream(self.embedding.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.embedding.device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self.embedding.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((each.pool() for each, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            logits = compute()
        return graph, logits

    def _compute(self, work: Tensor, num_rows: int, num_row_chunks: int, tile_rows: int, cache: KVCache) -> Tensor:
        """What leaves the final norm [R, H]."""
        config, model, ops = self.config, self._model, self.ops
        dtype, device, size = model.embedding.dtype, model.embedding.device, config.hidden_size
        x = torch.empty(num_rows, size, device=device)
        hidden = torch.empty(num_rows, size, dtype=dtype, device=device)
        query = torch.empty(num_rows, config.num_heads, config.head_dim, dtype=cache.keys[0].dtype, device=device)
        attended = torch.empty(num_rows, config.num_heads * config.head_dim, dtype=dtype, device=device)
        partials = self._partials
        if num_row_chunks > self._room:
            partials = ops.room_for_chunks(num_row_chunks, config.num_heads, config.head_dim)
        norms = [layer.input_norm for layer in model.layers[1:]] + [model.norm]
        layers.embed[(num_rows,)](
            model.embedding,
            work,
            model.layers[0].input_norm,
            x,
            hidden,
            size,
            config.norm_epsilon,
            **norm_options(size),
            **ops.overlap,
        )
        for place, (layer, next_norm) in enumerate(zip(model.layers, norms, strict=True)):
            self._store_tap(place, x, work, cache)
            heads = ops.parts_of_product(hidden, layer.qkv.weight)
            self._split_heads(place, heads, work, query, cache)
            ops.attend_together(
                query,
                work,
                tile_rows,
                cache.keys[place],
                cache.values[place],
                model.scale,
                partials,
                attended,
                layer.sinks,
            )
            self._add_and_norm(x, layer.output, attended, layer.post_norm, hidden)
            first, second = layer.mlp
            gate_up = ops.parts_of_product(hidden, first.weight)
            width = gate_up.shape[2] // 2
            multiplied = torch.empty(num_rows, width, dtype=dtype, device=device)
            bias = first.bias
            layers.multiply_silu[(num_rows, triton.cdiv(width, 1024))](
                gate_up,
                gate_up if bias is None else bias,
                multiplied,
                num_rows,
                width,
                NUM_PARTS=gate_up.shape[0],
                HAS_BIAS=bias is not None,
                BLOCK=1024,
                **ops.options,
            )
            self._add_and_norm(x, second, multiplied, next_norm, hidden)
        if config.num_layers in cache.taps:
            normed = ops.rms_norm(x, model.norm, config.norm_epsilon)
            self._store_tap(config.num_layers, normed, work, cache)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self._model.head)

    def _add_and_norm(self, x: Tensor, linear: Linear, inputs: Tensor, norm: Tensor, hidden: Tensor) -> None:
        parts = self.ops.parts_of_product(inputs, linear.weight)
        num_parts, num_rows, size = parts.shape
        bias = linear.bias
        layers.add_and_norm[(num_rows,)](
            x,
            parts,
            parts if bias is None else bias,
            norm,
            hidden,
            num_rows,
            size,
            self.config.norm_epsilon,
            NUM_PARTS=num_parts,
            HAS_BIAS=bias is not None,
            **norm_options(size),
            **self.ops.overlap,
        )

    def _split_heads(self, place: int, parts: Tensor, work: Tensor, query: Tensor, cache: KVCache) -> None:
        layer, config = self._model.layers[place], self.config
        bias, has_norm = layer.qkv.bias, layer.query_norm is not None
        num_parts, num_rows, _ = parts.shape
        head_dim = config.head_dim
        layers.split_heads[(num_rows, config.num_heads + 2 * config.num_kv_heads)](
            parts,
            parts if bias is None else bias,
            layer.query_norm if has_norm else parts,
            layer.key_norm if has_norm else parts,
            *self._tables[place],
            work,
            query,
            cache.keys[place],
            cache.values[place],
            num_rows,
            config.num_heads,
            config.num_kv_heads,
            head_dim,
            config.norm_epsilon,
            NUM_PARTS=num_parts,
            HAS_BIAS=bias is not None,
            HAS_NORM=has_norm,
            HEAD_DIM=head_dim,
            TURNING=config.ropes[0].num_turning(head_dim),
            BLOCK=triton.next_power_of_2(head_dim),
            HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
            **self.ops.options,
        )

    def _store_tap(self, boundary: int, rows: Tensor, work: Tensor, cache: KVCache) -> None:
        num_rows, size = rows.shape
        for place, tap in enumerate(cache.taps):
            if tap == boundary:
                layers.store_rows[(num_rows, triton.cdiv(size, 1024))](
                    rows,
                    work,
                    cache.features,
                    size,
                    place * size,
                    cache.features.stride(0),
                    BLOCK=1024,
                    **self.ops.options,
                )
