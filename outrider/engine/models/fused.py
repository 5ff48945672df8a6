"""A transformer's forward as one call of the compiled kernels. Not another model: the bits are those of its forward.

Between two operations nothing of Python happens, and the interpreter's lock is free from the first to the last. The
structures hold addresses, so this object keeps the model and the cache whose tensors they point into.
"""

import ctypes
from importlib import import_module

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import ChainDraws, ChainingDecoder, LayeredDecoder, ProbedDecoder
from outrider.engine.models.transformer import Layer, Linear, Transformer
from outrider.engine.ops import Weight
from outrider.engine.ops.library import DecoderFields, LayerFields, MatrixFields, PlanFields, TapFields
from outrider.engine.ops.native import (
    FORMAT_F32,
    MAX_HEAD_DIM,
    NativeOps,
    address_of,
    expect,
    expect_caches,
    expert_fields,
    weight_fields,
)


class FusedTransformer(LayeredDecoder, ProbedDecoder, ChainingDecoder):
    """Computes what its Transformer would; belongs to one thread, because the activations are kept between calls."""

    def __init__(self, model: Transformer, ops: NativeOps) -> None:
        """Raises ValueError for tensors that the kernels would misread."""
        self.config: ModelConfig = model.config
        self.embedding, self.head = model.embedding, model.head
        self.ops: NativeOps = ops
        self._model = model
        self._windows = sorted({window for window in model.config.windows if window is not None})
        # The plan of whole lists comes first: every forward needs it, if only for its rows.
        places = {window: place for place, window in enumerate([None, *self._windows])}
        plans = (places[window] for window in model.config.windows)
        hidden = model.config.hidden_size
        # Addresses of these, and of the tables, are in the fields of their layers.
        self._experts = [None if each.experts is None else expert_fields(each.experts, hidden) for each in model.layers]
        experts = (None if each is None else ctypes.addressof(each) for each in self._experts)
        self._tables = model.tables
        columns = model.layers, self._tables, experts, plans
        layers = (_layer(*each, model.config) for each in zip(*columns, strict=True))
        self._layers = (LayerFields * len(model.layers))(*layers)
        self._plans_type = PlanFields * len(places)
        self._window_sizes = (ctypes.c_int64 * len(places))(0, *self._windows)
        self._decoder = _decoder(model, ctypes.addressof(self._layers))
        self._cache: KVCache | None = None
        self._features = torch.empty(0)
        self._scratch = torch.empty(0)

    @property
    def weights(self) -> list[Weight]:
        return self._model.weights

    def embed_more(self, rows: Tensor) -> None:
        """Adds embeddings like any ProbedDecoder."""
        self._model.embed_more(rows)
        self.embedding = self._model.embedding
        self._decoder = _decoder(self._model, ctypes.addressof(self._layers))
        self._cache = None

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        return self.forward_layers(plan, cache, wanted, range(self.config.num_layers))

    def forward_layers(self, plan: RowPlan, cache: KVCache, wanted: Tensor, layers: range) -> Tensor:
        if layers.start and layers.start not in cache.taps:
            raise ValueError(f"nothing is tapped at boundary {layers.start}")
        logits = torch.empty(wanted.shape[0], self.config.vocab_size)
        # Kept until the call is over: the fields hold addresses.
        plans = self._plans(plan, cache)
        fields = self._plans_type(*[plan_fields(each, wanted) for each in plans])
        model, places = ctypes.addressof(self._decoder), (self._keys, self._values, ctypes.addressof(self._taps))
        rooms = layers.start, layers.stop, self._scratch.data_ptr(), logits.data_ptr()
        self.ops.functions.outrider_forward(self.ops.pool, model, ctypes.addressof(fields), *places, *rooms)
        return logits

    def chain(self, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws) -> list[list[int]]:
        depth, num_wanted = len(draws.keys), wanted.shape[0]
        expect("temperatures", draws.temperatures, torch.float64, (num_wanted,))
        expect("keys", draws.keys, torch.int64, (depth, num_wanted))
        ids, logits = torch.empty(depth, num_wanted, dtype=torch.int64), torch.empty(num_wanted, self.config.vocab_size)
        plans = self._plans(plan, cache)
        fields = self._plans_type(*[plan_fields(each, wanted) for each in plans])
        model, places = ctypes.addressof(self._decoder), (self._keys, self._values, ctypes.addressof(self._taps))
        windows = ctypes.addressof(self._window_sizes), len(plans)
        rooms = self._scratch.data_ptr(), logits.data_ptr()
        inputs = draws.temperatures.data_ptr(), draws.keys.data_ptr(), ids.data_ptr(), depth, draws.num_tokens
        num_steps: int = self.ops.functions.outrider_forward_line(
            self.ops.pool, model, ctypes.addressof(fields), *windows, *places, *rooms, *inputs
        )
        found: list[list[int]] = ids[:num_steps].tolist()
        return found

    def _plans(self, plan: RowPlan, cache: KVCache) -> list[RowPlan]:
        """A plan of the same rows for each window, the whole one first; makes sure of addresses and room for them."""
        if cache is not self._cache or cache.features is not self._features:
            self._bind(cache)
        num_floats = self.ops.functions.outrider_forward_floats(ctypes.addressof(self._decoder), plan.num_rows)
        if num_floats > self._scratch.shape[0]:
            self._scratch = torch.empty(num_floats)
        return [plan, *(plan.windowed(window) for window in self._windows)]

    def _bind(self, cache: KVCache) -> None:
        shape = (cache.keys[0].shape[0], self.config.num_kv_heads, self.config.head_dim)
        numbers = {expect_caches(*each, shape) for each in zip(cache.keys, cache.values, strict=True)}
        if len(numbers) > 1:
            raise ValueError("layers keep their keys in different types")
        self._decoder.cache_format = numbers.pop()
        self._keys = (ctypes.c_void_p * len(cache.keys))(*(tensor.data_ptr() for tensor in cache.keys))
        self._values = (ctypes.c_void_p * len(cache.values))(*(tensor.data_ptr() for tensor in cache.values))
        num_slots, num_taps = cache.features.shape[0], len(cache.taps)
        expect("features", cache.features, torch.float32, (num_slots, num_taps * self.config.hidden_size))
        self._boundaries = (ctypes.c_int64 * num_taps)(*cache.taps)
        self._taps = TapFields(ctypes.addressof(self._boundaries), cache.features.data_ptr(), num_taps)
        self._cache, self._features = cache, cache.features


def plan_fields(plan: RowPlan, wanted: Tensor) -> PlanFields:
    """Addresses in the plan's tensors, which must live as long; raises ValueError for what C would misread."""
    num_rows, num_wanted = plan.num_rows, wanted.shape[0]
    for name in ("token_ids", "positions", "slots", "key_starts"):
        expect(name, getattr(plan, name), torch.int64, (num_rows,))
    expect("key_counts", plan.key_counts, torch.int32, (num_rows,))
    expect("key_slots", plan.key_slots, torch.int32, (plan.key_slots.shape[0],))
    expect("wanted", wanted, torch.int64, (min(num_wanted, num_rows),))
    rows = plan.token_ids.data_ptr(), plan.positions.data_ptr(), plan.slots.data_ptr()
    lists = plan.key_slots.data_ptr(), plan.key_starts.data_ptr(), plan.key_counts.data_ptr()
    return PlanFields(*rows, *lists, wanted.data_ptr(), num_rows, plan.max_key_count, num_wanted)


def _decoder(model: Transformer, layers: int) -> DecoderFields:
    config = model.config
    shape = (config.vocab_size, config.hidden_size)
    if config.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"heads of {config.head_dim} do not fit the kernels")
    return DecoderFields(
        matrix_fields("embedding", Linear(model.embedding, None), (len(model.embedding), config.hidden_size)),
        matrix_fields("head", Linear(model.head, None), shape),
        address_of("norm", model.norm, (config.hidden_size,)),
        layers,
        *(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim),
        config.ropes[0].num_turning(config.head_dim),
        *(config.family.activation[1] != "silu", FORMAT_F32),
        *(config.norm_epsilon, model.scale, model.embedding_scale),
    )


def _layer(
    layer: Layer, tables: tuple[Tensor, Tensor], experts: int | None, plan: int, config: ModelConfig
) -> LayerFields:
    turns = (len(tables[0]), config.ropes[0].num_turning(config.head_dim) // 2)
    hidden, mlp, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return LayerFields(
        address_of("input_norm", layer.input_norm, (hidden,)),
        address_of("query_norm", layer.query_norm, (config.head_dim,)),
        address_of("key_norm", layer.key_norm, (config.head_dim,)),
        address_of("post_norm", layer.post_norm, (hidden,)),
        address_of("attended_norm", layer.attended_norm, (hidden,)),
        address_of("mlp_norm", layer.mlp_norm, (hidden,)),
        *(address_of(name, table, turns) for name, table in zip(("cos", "sin"), tables, strict=True)),
        matrix_fields("qkv", layer.qkv, (query + 2 * config.num_kv_heads * config.head_dim, hidden)),
        matrix_fields("output", layer.output, (hidden, query)),
        MatrixFields() if layer.gate_up is None else matrix_fields("gate_up", layer.gate_up, (2 * mlp, hidden)),
        MatrixFields() if layer.down is None else matrix_fields("down", layer.down, (hidden, mlp)),
        *(experts, plan),
        address_of("sinks", layer.sinks, (config.num_heads,)),
    )


def matrix_fields(name: str, linear: Linear, shape: tuple[int, int]) -> MatrixFields:
    """A matrix of this shape with its bias; raises ValueError for any other."""
    return weight_fields(name, linear.weight, linear.bias, shape)


def fused(model: Transformer, num_positions: int) -> LayeredDecoder:
    """The model itself, or its forward in fewer calls where its operations are compiled; for so many positions."""
    model.reserve(num_positions)
    if isinstance(model.ops, NativeOps):
        return FusedTransformer(model, model.ops)
    if "triton" in model.ops.name:
        # Not imported above, because it needs Triton, which many machines have not.
        graphed = import_module("outrider.engine.models.graphed").GraphedTransformer(model, model.ops)
        graphed.check_rows()
        found: LayeredDecoder = graphed
        return found
    return model
