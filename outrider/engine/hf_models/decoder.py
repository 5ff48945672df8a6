"""transformers' modelling code as a decoder: with our paged attention, our linear products, and rows padded alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.devices import one_thread
from outrider.engine.models.config import DecoderFacts
from outrider.engine.models.decoder import TappedDecoder
from outrider.engine.ops import Ops

# Two AVX-512 vectors of float32: the step of torch's loops; those of AVX2 and NEON divide it.
STEP = 32


def padded(num_rows: int, device: torch.device) -> int:
    """Number of rows to compute for num_rows; more only on the CPU, because elsewhere nothing is promised."""
    return -(-max(num_rows, 1) // STEP) * STEP if device.type == "cpu" else max(num_rows, 1)


def pad_index(column: Tensor, num_rows: int) -> Tensor:
    """column [R] made as long as num_rows by repeating its last entry, or zeros when it is empty."""
    missing = num_rows - column.shape[0]
    if not missing:
        return column
    last = column[-1:] if column.shape[0] else column.new_zeros(1)
    return torch.cat((column, last.expand(missing)))


def pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """rows [R, N] with zeros after them, [num_rows, N]."""
    if rows.shape[0] == num_rows:
        return rows
    output = rows.new_zeros(num_rows, rows.shape[1])
    output[: rows.shape[0]] = rows
    return output


class Products(TorchFunctionMode):
    """One forward of num_rows rows, computed as num_padded, of which num_wanted go through the head."""

    def __init__(self, ops: Ops, head: Tensor, num_rows: int, num_padded: int, num_wanted: int) -> None:
        super().__init__()
        self._ops, self._head = ops, head
        self._num_rows, self._num_padded, self._num_wanted = num_rows, num_padded, num_wanted
        self._ours: Mapping[object, Callable[..., object]] = {
            functional.linear: self._linear,
            functional.embedding: lambda *args, **kwargs: functional.embedding(*args, **kwargs).float(),
        }

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return self._ours.get(func, func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
        padded_rows = input.reshape(-1, input.shape[-1]).float()
        num_padded, is_head = padded_rows.shape[0], weight is self._head
        num_used = self._num_rows if num_padded == self._num_padded else num_padded
        rows = padded_rows[: self._num_wanted if is_head else num_used]
        output = rows.new_empty(0, weight.shape[0])
        if rows.shape[0]:
            bias = None if bias is None else bias.float()
            output = self._ops.linear(rows.contiguous(), weight.detach(), bias)
        if is_head and rows.shape[0] < num_padded:
            # Zeros would be written for no use, and a row of a large vocabulary is a megabyte.
            wanted, output = output, rows.new_empty(num_padded, weight.shape[0])
            output[: rows.shape[0]] = wanted
        return pad_rows(output, num_padded).view(*input.shape[:-1], weight.shape[0])


# The implementation's name in transformers, and the keyword that carries the attender.
NAME = "outrider"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of one layer's attention; queries are [1, H, R, D], keys and values [1, G, R, D], rotated already."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    window: int | None
    others: Mapping[str, object]
    """Keywords that nothing here looks at."""


Attend = Callable[[AttentionCall], Tensor]
"""Answers the layers of one forward; returns [1, R, H, D]."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The cache in one forward of R rows, to which a model may have added some that are not read."""

    plan: RowPlan
    cache: KVCache
    ops: Ops

    def attend(self, call: AttentionCall) -> Tensor:
        """Stores the rows' keys and values, and lets each row look at its own list, or the end of it in the window."""
        num_rows, num_padded = self.plan.num_rows, call.query.shape[2]
        keys, values = self.cache.keys[layer_of(call)], self.cache.values[layer_of(call)]
        for stored, heads in ((keys, call.key), (values, call.value)):
            stored.index_copy_(0, self.plan.slots, _rows(heads, num_rows).to(stored.dtype))
        query = _rows(call.query, num_rows).float().contiguous()
        output = self.ops.attention(query, self.plan.windowed(call.window), keys, values, call.scale)
        return pad_rows(output, num_padded).view(1, num_padded, *query.shape[1:])


def layer_of(call: AttentionCall) -> int:
    layer = call.module.layer_idx
    if not isinstance(layer, int):
        raise TypeError(f"its attention layers have the number {layer!r}")
    return layer


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    outrider: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention for transformers, which calls it; a scaling of None means one over the root of the heads' size."""
    if outrider is None:
        raise TypeError("it does not hand keywords down to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(module, query, key, value, attention_mask, scale, sliding_window, others)
    return outrider(call), None


def _rows(heads: Tensor, num_rows: int) -> Tensor:
    return heads[0, :, :num_rows].transpose(0, 1)


# The registry is transformers' own and for the whole process; there is no other way to give it a function.
AttentionInterface.register(NAME, _attend)


@dataclass(slots=True)
class Company:
    """Number of rows of the running forward that are not padding; one object for the experts of one model."""

    num_rows: int = 0


def _experts(module: nn.Module, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """rows [R, hidden], for each of which some experts and their weights are chosen, [R, k]; returns [R, hidden]."""
    if rows.device.type == "meta":
        # Which experts are chosen is not known there, and the result has this shape whatever they are.
        return torch.empty_like(rows)
    company = module.company
    assert isinstance(company, Company)
    count = company.num_rows
    # What `use_experts_implementation` wrapped: the loop over experts that every class of them brings along.
    one_by_one: Any = type(module).forward
    output: Tensor = one_by_one.__wrapped__(module, rows[:count], top_k_index[:count], top_k_weights[:count])
    return pad_rows(output, rows.shape[0])


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


class HfDecoder(TappedDecoder):
    """transformers' modelling code with our attention, cache and products; belongs to the device thread."""

    def __init__(self, config: DecoderFacts, model: PreTrainedModel, ops: Ops) -> None:
        """Takes a model whose weights are those that ops read (outrider.engine.hf_models.checkpoint)."""
        self.config = config
        self.ops = ops
        self._model = model
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.head: Tensor = model.get_output_embeddings().weight
        self._company = Company()
        for module in model.modules():
            # To transformers' experts, which get nothing but rows.
            if hasattr(type(module), "_apply_gate"):
                setattr(module, "company", self._company)  # noqa: B010 - declared nowhere in torch

    @property
    def weights(self) -> list[Tensor]:
        return list(self._model.parameters())

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        num_rows, num_wanted = plan.num_rows, wanted.shape[0]
        num_padded = padded(num_rows, plan.token_ids.device)
        self._company.num_rows = num_rows
        # More rows of logits where the width of one leaves something over after whole vectors.
        is_whole = num_wanted and self.config.vocab_size % STEP == 0
        kept = wanted if is_whole else pad_index(wanted, padded(num_wanted, wanted.device))
        with Products(self.ops, self.head, num_rows, num_padded, num_wanted), one_thread():
            output = self._model(
                input_ids=pad_index(plan.token_ids, num_padded)[None],
                position_ids=pad_index(plan.positions, num_padded)[None],
                use_cache=False,
                logits_to_keep=kept,
                output_hidden_states=bool(cache.taps),
                outrider=Pages(plan, cache, self.ops).attend,
            )
        for boundary in set(cache.taps):
            # The last of transformers' hidden states has gone through the final norm.
            cache.store_tap(boundary, plan.slots, output.hidden_states[boundary][0, :num_rows])
        logits: Tensor = output.logits[0, :num_wanted].float()
        return logits
