"""A feature head's step as one call of the compiled kernels, with the bits of its step op by op.

A step of a small head is over sooner than Python has called its operations one by one.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache, Slots
from outrider.engine.heads.decoder import HeadDecoder
from outrider.engine.heads.feature_head import FeatureHead, Fuse
from outrider.engine.heads.head import Head, TargetParts
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.fused import matrix_fields, plan_fields
from outrider.engine.models.transformer import Linear
from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.library import DecoderFields, HeadFields, LayerFields, MatrixFields
from outrider.engine.ops.native import FORMAT_F32, MAX_HEAD_DIM, NativeOps, address_of, expect


class LineDraws(NamedTuple):
    """What is drawn after each of several steps, one below the other, of W rows."""

    depth: int
    num_children: int
    """Tokens that are wanted after each row."""
    temperatures: Tensor
    """[W] float64, above 0."""
    scales: Tensor
    """[W] float64: see Ops.rank."""
    keys: Tensor | None
    """Keys [depth, W] int64 of the noise; None for none."""


class FusedHead(Decoder):
    """Computes what a HeadDecoder of its head would; belongs to one thread."""

    def __init__(self, head: FeatureHead, target: TargetParts, ops: NativeOps) -> None:
        """Raises ValueError for tensors that the kernels would misread."""
        self.config = HeadDecoder(head, target, ops).config
        self.embedding = target.embedding
        self.ops: NativeOps = ops
        self._head = head
        self._scratch = torch.empty(0)
        self._sums = torch.empty(0, dtype=torch.float64)
        self._cache: KVCache | None = None
        self._features = torch.empty(0)
        self._layer = _layer(head)
        self._model = _model(head, ctypes.addressof(self._layer))
        self._fields = _fields(head, ctypes.addressof(self._model))
        self._projection = MatrixFields()
        if head.features is not None:
            num_outputs, num_inputs = head.features.shape
            self._projection = matrix_fields("features", Linear(head.features, None), (num_outputs, num_inputs))

    @property
    def weights(self) -> Sequence[Weight]:
        return self._head.weights

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes rows like a HeadDecoder."""
        logits = torch.empty(wanted.shape[0], self.config.vocab_size)
        rows, places = plan_fields(plan, wanted), self._places(plan, cache, len(logits))
        self.ops.functions.outrider_head_forward(
            self.ops.pool, ctypes.addressof(self._fields), ctypes.addressof(rows), *places, logits.data_ptr()
        )
        return logits

    def line(self, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: LineDraws) -> tuple[Tensor, Tensor]:
        """Computes rows, and rows below each wanted one, of the first token that follows the row above; W are wanted.

        What may follow each, as `Ops.rank` has it: ids [S, W, num_children] int64 and shares [S, W, num_children]
        float64 of S steps: draws.depth, or fewer where all rows of the next are less likely than some beside those
        above them, or one has nothing to draw. The lists of wanted rows go on with the slots of the rows below; see
        Feed.num_below.
        """
        depth, count, num_wanted = draws.depth, draws.num_children, wanted.shape[0]
        expect("temperatures", draws.temperatures, torch.float64, (num_wanted,))
        expect("scales", draws.scales, torch.float64, (num_wanted,))
        if draws.keys is not None:
            expect("keys", draws.keys, torch.int64, (depth, num_wanted))
        ids = torch.empty(depth, num_wanted, count, dtype=torch.int64)
        shares = torch.empty(depth, num_wanted, count, dtype=torch.float64)
        faults, num_sums = torch.empty(num_wanted, dtype=torch.int32), num_wanted * self._head.head.shape[0]
        if num_sums > self._sums.shape[0]:
            self._sums = torch.empty(num_sums, dtype=torch.float64)
        rows, places = plan_fields(plan, wanted), self._places(plan, cache, num_wanted)
        keys = None if draws.keys is None else draws.keys.data_ptr()
        found = (self._sums.data_ptr(), ids.data_ptr(), shares.data_ptr(), faults.data_ptr())
        num_steps = self.ops.functions.outrider_head_line(
            *(self.ops.pool, ctypes.addressof(self._fields), ctypes.addressof(rows), *places),
            *(draws.temperatures.data_ptr(), keys, draws.scales.data_ptr(), *found, depth, count),
        )
        return ids[:num_steps], shares[:num_steps]

    def _places(self, plan: RowPlan, cache: KVCache, num_wanted: int) -> tuple[int, ...]:
        """Addresses of the cache's keys, values and features, and of scratch."""
        if cache is not self._cache or cache.features is not self._features:
            self._bind(cache)
        fields = ctypes.addressof(self._fields)
        num_floats = self.ops.functions.outrider_head_floats(fields, plan.num_rows, num_wanted)
        if num_floats > self._scratch.shape[0]:
            self._scratch = torch.empty(num_floats)
        return (*self._kept, self._scratch.data_ptr())

    def _bind(self, cache: KVCache) -> None:
        num_slots, law = cache.features.shape[0], self._head.law
        expect("features", cache.features, torch.float32, (num_slots, law.hidden_size + 1))
        for name, tensor in (("keys", cache.keys[0]), ("values", cache.values[0])):
            expect(name, tensor, torch.float32, (num_slots, law.num_kv_heads, law.head_dim))
        self._kept = cache.keys[0].data_ptr(), cache.values[0].data_ptr(), cache.features.data_ptr()
        self._cache, self._features = cache, cache.features

    def copy_states(self, source: Tensor, source_slots: Slots, own: Tensor, slots: Slots) -> bool:
        """Makes states of features [S, F] of a target in the cache features `own`, as FeatureHead.states_of does.

        False where that has norms, which are not among the compiled steps: nothing is done then.
        """
        if self._head.has_feature_norms:
            return False
        width, num_rows = self._projection.num_inputs or self._head.law.hidden_size, len(slots)
        expect("source", source, torch.float32, (source.shape[0], width))
        expect("own", own, torch.float32, (own.shape[0], self._head.law.hidden_size + 1))
        functions = self.ops.functions
        num_floats = num_rows * (width + self._head.law.hidden_size)
        num_floats += functions.outrider_linear_scratch(num_rows, width) // 4
        if num_floats > self._scratch.shape[0]:
            self._scratch = torch.empty(num_floats)
        # Kept until the call is over.
        indices = torch.from_numpy(source_slots), torch.from_numpy(slots)
        places = source.data_ptr(), indices[0].data_ptr(), own.data_ptr(), indices[1].data_ptr()
        projection = ctypes.addressof(self._projection)
        functions.outrider_head_states(self.ops.pool, projection, width, *places, num_rows, self._scratch.data_ptr())
        return True


def head_decoder(head: Head, target: TargetParts, ops: Ops) -> Decoder:
    """The head as a model: its step in one call where that is compiled, and op by op elsewhere."""
    if isinstance(head, FeatureHead) and isinstance(ops, NativeOps) and not head.facts.reads_own:
        return FusedHead(head, target, ops)
    return HeadDecoder(head, target, ops)


def _layer(head: FeatureHead) -> LayerFields:
    law = head.law
    h, query, key = law.hidden_size, law.num_heads * law.head_dim, law.num_kv_heads * law.head_dim
    tables = (law.context_len, law.head_dim // 2)
    if head.gate_up is None or head.down is None:
        raise ValueError("a layer without a multilayer perceptron does not fit the kernels")
    mlp = head.down.weight.shape[1]
    if law.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"heads of {law.head_dim} do not fit the kernels")
    return LayerFields(
        address_of("input_norm", head.input_norm, (h,)),
        address_of("query_norm", head.query_norm, (law.head_dim,)),
        address_of("key_norm", head.key_norm, (law.head_dim,)),
        address_of("post_norm", head.post_norm, (h,)),
        *(None, None),
        address_of("cos", head.cos, tables),
        address_of("sin", head.sin, tables),
        matrix_fields("qkv", head.qkv, (query + 2 * key, h * (2 if law.fuse is Fuse.WIDE else 1))),
        matrix_fields("output", head.output, (h, query)),
        matrix_fields("gate_up", head.gate_up, (2 * mlp, h)),
        matrix_fields("down", head.down, (h, mlp)),
        None,
        0,
    )


def _model(head: FeatureHead, layer: int) -> DecoderFields:
    law = head.law
    h = law.hidden_size
    return DecoderFields(
        matrix_fields("embedding", Linear(head.embedding, None), (head.vocab_size, h)),
        matrix_fields("head", Linear(head.head, None), (head.head.shape[0], h)),
        address_of("out_norm", head.out_norm, (h,)),
        layer,
        *(1, law.num_heads, law.num_kv_heads, law.head_dim, law.head_dim, False, FORMAT_F32),
        *(law.norm_epsilon, law.head_dim**-0.5, 1.0),
    )


def _fields(head: FeatureHead, model: int) -> HeadFields:
    law, ids = head.law, head.target_ids
    h = law.hidden_size
    if ids is not None:
        expect("target_ids", ids, torch.int64, (head.head.shape[0],))
        if (np.diff(ids.numpy()) <= 0).any():
            raise ValueError("target_ids do not rise")
    return HeadFields(
        model,
        address_of("embedding_norm", head.embedding_norm, (h,)),
        address_of("state_norm", head.state_norm, (h,)),
        MatrixFields() if head.fuse is None else matrix_fields("fuse", Linear(head.fuse, head.fuse_bias), (h, 2 * h)),
        None if ids is None else ids.data_ptr(),
        *(head.vocab_size, law.fuse is Fuse.REVERSED, law.normed_residual, law.feeds_normed),
    )
