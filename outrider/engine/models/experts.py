"""Experts of a model: which layers have them, by its keys, and how its files name and lay out their tensors."""

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.mxfp4 import matrix_of, packed_shapes
from outrider.engine.ops import Experts, Ops, Weight
from outrider.engine.ops.native import NativeOps
from outrider.model_files.safetensors_header import BLOCKS, SCALES

# Far above any model's: what is refused is a number that alone would fill the memory with names.
MAX_EXPERTS = 1 << 12
EXPERTS = ".mlp.experts."
ROUTER, GATE, UP, DOWN = "gate", "experts.gate_proj", "experts.up_proj", "experts.down_proj"
_ONE = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_BIAS = re.compile(r".+\.mlp\.experts\.(gate_up_proj|down_proj)_bias")
_ALL = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_PACKED = re.compile(rf"(.+\.mlp\.experts\.(?:gate_up_proj|down_proj))({BLOCKS}|{SCALES})")


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Experts of one layer."""

    num_experts: int
    num_chosen: int
    """Experts of a row."""
    size: int
    """Neurons of an expert."""
    is_normalised: bool
    """Whether the shares of the chosen ones add up to 1."""
    clamp: tuple[float, float] | None = None
    """Slope and limit of the gate of gpt-oss."""
    has_biases: bool = False
    """Whether router, gate, up and down have biases."""
    is_interleaved: bool = False
    """Whether gate and up take turns in a folder, where all experts are one tensor with inputs before outputs."""

    def biases(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the layer's biases, by the names of `shapes`."""
        if not self.has_biases:
            return {}
        wide = self.num_experts, self.size
        return {ROUTER: (self.num_experts,), GATE: wide, UP: wide, DOWN: (self.num_experts, hidden)}

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shapes of the layer's matrices, by their names after "mlp."; those of all experts stand below each other."""
        wide = (self.num_experts * self.size, hidden)
        down = (self.num_experts * hidden, self.size)
        return {ROUTER: (self.num_experts, hidden), GATE: wide, UP: wide, DOWN: down}


ExpertRule = Callable[[JsonKeys, int], tuple[ExpertSizes | None, ...]]


def experts_of_qwen(keys: JsonKeys, num_layers: int) -> tuple[ExpertSizes | None, ...]:
    """Qwen's rule: each "decoder_sparse_step"-th layer has experts, if "mlp_only_layers" does not name it.

    Raises ModelRefused.
    """
    num_experts = _num_experts(keys, ("num_experts", "num_local_experts"), 0)
    step, dense = keys.integer("decoder_sparse_step", 1), keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(each) is not int or not 0 <= each < num_layers for each in dense):
        raise keys.refuse("mlp_only_layers", f"is {dense!r}, but must be a list of layers from 0 to {num_layers - 1}")
    if not num_experts:
        return (None,) * num_layers
    sizes = ExpertSizes(
        num_experts,
        keys.integer("num_experts_per_tok", 8, maximum=num_experts),
        keys.integer("moe_intermediate_size", 768),
        keys.flag("norm_topk_prob"),
    )
    return tuple(None if (layer + 1) % step or layer in dense else sizes for layer in range(num_layers))


def experts_of_gpt_oss(keys: JsonKeys, num_layers: int) -> tuple[ExpertSizes | None, ...]:
    """The rule of gpt-oss: all layers have experts. Raises ModelRefused."""
    num_experts = _num_experts(keys, ("num_local_experts", "num_experts"), 1)
    sizes = ExpertSizes(
        num_experts,
        keys.integer("num_experts_per_tok", 4, maximum=num_experts),
        keys.integer("intermediate_size"),
        is_normalised=True,
        clamp=(keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)),
        has_biases=True,
        is_interleaved=True,
    )
    return (sizes,) * num_layers


def _num_experts(keys: JsonKeys, spellings: tuple[str, str], minimum: int) -> int:
    """By the first spelling where that says something, else by the second."""
    first, second = spellings
    name = first if keys.values.get(first) is not None else second
    return keys.integer(name, 128, minimum=minimum, maximum=MAX_EXPERTS)


def take_experts(ops: Ops, tensors: MutableMapping[str, Any], prefix: str, sizes: ExpertSizes) -> Experts:
    """Takes a layer's experts out of `tensors`. The router stays as it is, because it decides."""
    router = tensors.pop(f"{prefix}{ROUTER}.weight")
    gate, up, down = (ops.stack([tensors.pop(f"{prefix}{name}.weight")]) for name in (GATE, UP, DOWN))
    chosen = sizes.num_experts, sizes.num_chosen, sizes.is_normalised
    made = Experts(router, gate, up, down, *chosen, clamp=sizes.clamp)
    if not sizes.has_biases:
        return made
    router_bias, *wide, down_bias = (tensors.pop(f"{prefix}{name}.bias").float() for name in (ROUTER, GATE, UP, DOWN))
    return replace(made, router_bias=router_bias, gate_up_bias=torch.cat(wide, 1), down_bias=down_bias)


def file_shapes(
    shapes: Mapping[str, tuple[int, ...]], experts: ExpertSizes | None, names: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that a folder of safetensors has: a tensor for each expert, or two for all of a layer.

    experts are those of any layer, shapes the model's own; names those in the files, which decide. Raises ModelRefused.
    """
    if experts is not None and experts.is_interleaved:
        return _interleaved_shapes(shapes, experts, is_packed=are_packed(names))
    found, is_stacked = dict[str, tuple[int, ...]](), any(_ALL.fullmatch(name) for name in names)
    for name, shape in shapes.items():
        if experts is None or EXPERTS not in name:
            found[name] = shape
            continue
        stem, kind = name.removesuffix(".weight").rsplit(".", 1)
        rows = shape[0] // experts.num_experts
        if not is_stacked:
            found |= {f"{stem}.{each}.{kind}.weight": (rows, shape[1]) for each in range(experts.num_experts)}
        elif kind == "down_proj":
            found[f"{stem}.{kind}"] = (experts.num_experts, rows, shape[1])
        else:
            found[f"{stem}.gate_up_proj"] = (experts.num_experts, 2 * rows, shape[1])
    return found


def are_packed(names: Iterable[str]) -> bool:
    """Whether tensors of these names are experts in MXFP4."""
    return any(_PACKED.fullmatch(name) for name in names)


def _interleaved_shapes(
    shapes: Mapping[str, tuple[int, ...]], experts: ExpertSizes, *, is_packed: bool
) -> dict[str, tuple[int, ...]]:
    """Two tensors for all experts of a layer, inputs before outputs, with gate and up by turns; four in MXFP4."""
    found, count, size = dict[str, tuple[int, ...]](), experts.num_experts, experts.size
    for name, shape in shapes.items():
        if EXPERTS not in name:
            found[name.replace(f".mlp.{ROUTER}.", ".mlp.router.")] = shape
            continue
        stem, kind, of = name.rsplit(".", 2)
        is_down, is_bias = kind == "down_proj", of == "bias"
        inputs, outputs = (size, shape[-1] if is_bias else shape[0] // count) if is_down else (shape[-1], 2 * size)
        together = f"{stem}.{kind if is_down else 'gate_up_proj'}"
        if is_packed and not is_bias:
            found |= packed_shapes(together, count, outputs, inputs)
        else:
            found |= {f"{together}_bias": (count, outputs)} if is_bias else {together: (count, inputs, outputs)}
    return found


class ExpertRooms:
    """Puts the experts of a layer below each other as they are read: those of a file may come in any order."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        keep: Callable[[str, Weight], Weight],
        experts: ExpertSizes | None,
        dtype: torch.dtype,
        native: NativeOps | None,
    ) -> None:
        """shapes are the model's own; keep makes of a matrix that is whole what stays of it.

        Experts in MXFP4 become numbers of dtype, or stay in blocks with compiled operations.
        """
        self._is_interleaved = experts is not None and experts.is_interleaved
        self._dtype, self._native = dtype, native
        self._packed: dict[str, Tensor] = {}
        self.tensors: dict[str, Weight] = {}
        self._shapes, self._keep = shapes, keep
        self._rooms: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    def take(self, name: str, tensor: Tensor) -> bool:
        """Takes a tensor of a file that holds experts; returns whether it does. Raises ModelRefused."""
        packed = _PACKED.fullmatch(name)
        if packed is not None:
            self._packed[name] = tensor
            if all(f"{packed[1]}{part}" in self._packed for part in (BLOCKS, SCALES)):
                # Both parts of a matrix of all experts are there.
                blocks, scales = (self._packed.pop(f"{packed[1]}{part}") for part in (BLOCKS, SCALES))
                stem, kind = packed[1].rsplit(".", 1)
                turns = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
                for part, rows in (turns if kind == "gate_up_proj" else {kind: slice(None)}).items():
                    own = f"{stem}.{part}.weight"
                    made = matrix_of(packed[1], blocks[:, rows], scales[:, rows], self._dtype, self._native)
                    self.tensors[own] = self._keep(own, made)
            return True
        one, whole, bias = _ONE.fullmatch(name), _ALL.fullmatch(name), _BIAS.fullmatch(name)
        if self._is_interleaved and (whole or bias) is not None:
            # Weights [E, inputs, outputs] and biases [E, outputs], where gate and up take turns.
            of = "bias" if name.endswith("_bias") else "weight"
            stem, kind = name.removesuffix("_bias").rsplit(".", 1)
            outputs = tensor if of == "bias" else tensor.transpose(1, 2)
            parts = {"down_proj": outputs}
            if kind == "gate_up_proj":
                parts = {"gate_proj": outputs[:, ::2], "up_proj": outputs[:, 1::2]}
            for part, numbers in parts.items():
                shape = self._shapes[f"{stem}.{part}.{of}"]
                self._put(f"{stem}.{part}.{of}", 0, numbers.reshape(shape))
            return True
        router = name.replace(".mlp.router.", f".mlp.{ROUTER}.")
        if self._is_interleaved and router != name:
            self._put(router, 0, tensor)
            return True
        if one is not None:
            self._put(f"{one[1]}.{one[3]}.weight", int(one[2]) * len(tensor), tensor)
        elif whole is not None and whole[2] == "down_proj":
            self._put(f"{whole[1]}.down_proj.weight", 0, tensor.flatten(0, 1))
        elif whole is not None:
            for kind, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                self._put(f"{whole[1]}.{kind}.weight", 0, half.flatten(0, 1))
        return one is not None or whole is not None

    def _put(self, name: str, first: int, rows: Tensor) -> None:
        if name not in self._rooms:
            self._rooms[name] = torch.empty(self._shapes[name], dtype=rows.dtype, device=rows.device)
            self._missing[name] = len(self._rooms[name])
        self._rooms[name][first : first + len(rows)] = rows
        self._missing[name] -= len(rows)
        if not self._missing[name]:
            self.tensors[name] = self._keep(name, self._rooms.pop(name))
