"""Experts of a model: which layers have them, by its keys, and how its files name and lay out their tensors."""

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.ops import Experts, Ops, Weight

# Far above any model's: what is refused is a number that alone would fill the memory with names.
MAX_EXPERTS = 1 << 12
EXPERTS = ".mlp.experts."
ROUTER, GATE, UP, DOWN = "gate", "experts.gate_proj", "experts.up_proj", "experts.down_proj"
_ONE = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_ALL = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


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
    name = "num_experts" if keys.values.get("num_experts") is not None else "num_local_experts"
    num_experts = keys.integer(name, 128, minimum=0, maximum=MAX_EXPERTS)
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


def take_experts(ops: Ops, tensors: MutableMapping[str, Any], prefix: str, sizes: ExpertSizes) -> Experts:
    """Takes a layer's experts out of `tensors`. The router stays as it is, because it decides."""
    router = tensors.pop(f"{prefix}{ROUTER}.weight")
    gate, up, down = (ops.stack([tensors.pop(f"{prefix}{name}.weight")]) for name in (GATE, UP, DOWN))
    return Experts(router, gate, up, down, sizes.num_experts, sizes.num_chosen, sizes.is_normalised)


def file_shapes(
    shapes: Mapping[str, tuple[int, ...]], experts: ExpertSizes | None, names: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that a folder of safetensors has: a tensor for each expert, or two for all of a layer.

    experts are those of any layer, shapes the model's own; names those in the files, which decide.
    """
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


class ExpertRooms:
    """Puts the experts of a layer below each other as they are read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], keep: Callable[[str, Tensor], Weight]) -> None:
        """shapes are the model's own; keep makes of a matrix that is whole what stays of it."""
        self.tensors: dict[str, Weight] = {}
        self._shapes, self._keep = shapes, keep
        self._rooms: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    def take(self, name: str, tensor: Tensor) -> bool:
        """Takes a tensor of a file that holds experts; returns whether it does."""
        one, whole = _ONE.fullmatch(name), _ALL.fullmatch(name)
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
