"""Loads a model by transformers' code, and makes sure that its rows are computed as the engine needs them.

A survey watches one forward for what cannot be served, and a probe compares rows computed alone and together.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from outrider.engine.cache.block_table import KVCache
from outrider.engine.hf_models.config import PACKAGE, context_len, first_line, model_class, read_configuration
from outrider.engine.hf_models.decoder import AttentionCall, HfConfig, HfDecoder, layer_of
from outrider.engine.models.config import JsonKeys, read_eos_token_ids, read_json
from outrider.engine.models.weights import Shapes, StoredTensor, check_tensors, model_hash, stored_tensors
from outrider.engine.ops import Ops
from outrider.engine.plan import RowPlan
from outrider.errors import ModelRefused

SURVEY_ROWS = 3
# Keywords without a bearing on the result of an inference, and those that are none when they are None or false.
HARMLESS = ("dropout", "use_cache", "position_ids", "output_router_logits", "output_attentions")
PRODUCTS = (torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.tensordot,
            Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__,
            functional.scaled_dot_product_attention)  # fmt: skip
ACROSS_ROWS = (torch.conv1d, torch.conv2d, functional.conv1d, functional.conv2d, torch.cumsum, Tensor.cumsum)


class Unfit(Exception):
    """A model does something that cannot be served; says what, without a subject."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model embeds, and what its layers store."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


def survey(model: PreTrainedModel) -> Shape:
    """The shape of a model on the meta device; raises Unfit."""
    vocab_size = _vocab_size(model)
    if any(getattr(module, "is_transposed", False) for module in model.modules()):
        raise Unfit("keeps its experts transposed, and multiplies them in sums that depend on the number of rows")
    calls = _Calls()
    rows = torch.zeros(1, SURVEY_ROWS, dtype=torch.int64, device="meta")
    wanted = torch.zeros(2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _Watch():
            model(input_ids=rows, position_ids=rows, use_cache=False, logits_to_keep=wanted, outrider=calls)
    except Unfit:
        raise
    except Exception as error:  # any code may run here
        raise Unfit(f"cannot be run with our attention: {first_line(error)}") from error
    return Shape(vocab_size, *calls.stored())


class _Calls:
    """Stands where the cache stands in a real forward."""

    def __init__(self) -> None:
        self._stored: list[tuple[int, int, int]] = []

    def attend(self, call: AttentionCall) -> Tensor:
        """Looks at a layer; returns no numbers."""
        _check_call(call)
        self._stored.append((layer_of(call), call.key.shape[1], call.key.shape[3]))
        return torch.empty_like(call.query.transpose(1, 2))

    def stored(self) -> tuple[int, int, int]:
        """Layers that have called, which must be alike, their key-value heads, and a head's size; raises Unfit."""
        if sorted(layer for layer, *_ in self._stored) != list(range(len(self._stored))) or not self._stored:
            raise Unfit("does not call our attention once in every layer")
        sizes = sorted({(heads, size) for _, heads, size in self._stored})
        if len(sizes) > 1:
            raise Unfit("stores keys of different shapes in its layers: " + " and ".join(map(str, sizes)))
        return len(self._stored), *sizes[0]


def _vocab_size(model: PreTrainedModel) -> int:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or head.weight.shape[0] != embedding.weight.shape[0]:
        raise Unfit("does not embed the tokens that it predicts")
    size: int = head.weight.shape[0]
    return size


def _check_call(call: AttentionCall) -> None:
    if call.key.shape != call.value.shape or call.query.shape[3] != call.key.shape[3]:
        sizes = call.query.shape[3], call.key.shape[3], call.value.shape[3]
        raise Unfit(f"has heads of {sizes[0]}, {sizes[1]} and {sizes[2]} for queries, keys and values, not of one size")
    if call.key.shape[2] != SURVEY_ROWS or call.query.shape[0] != 1:
        raise Unfit("stores other rows than those of its tokens")
    if call.mask is not None:
        raise Unfit("makes an attention mask of its own")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise Unfit("looks at tokens behind a token, and is no decoder")
    _check_window(call)
    if not isinstance(call.scale, int | float) or not 0 < call.scale < inf:
        raise Unfit(f"multiplies its attention scores by {call.scale!r}, which is no positive number")
    given = {name for name, value in call.others.items() if value is not None and value is not False}
    strange = sorted(given - {*HARMLESS, "is_causal"})
    if strange:
        names = {"softcap": "a cap on attention scores", "s_aux": "attention sinks"}
        raise Unfit(f"needs {names.get(strange[0], strange[0])} in its attention, which ours has not")


def _check_window(call: AttentionCall) -> None:
    types: Sequence[str] | None = getattr(getattr(call.module, "config", None), "layer_types", None)
    if types and (types[layer_of(call)] == "sliding_attention") and call.window is None:
        raise Unfit(f"does not say how wide the window of layer {layer_of(call)} is")
    if call.window is not None and call.window < 1:
        raise Unfit(f"has a window of {call.window} in layer {layer_of(call)}, but it must be at least 1")


class _Watch(TorchFunctionMode):
    """Refuses what would make a row depend on its neighbours or their number."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Torch's own result, unless it is one that no other operation here computes."""
        name = getattr(func, "__name__", str(func))
        if func in PRODUCTS and not _is_outer(args):
            raise Unfit(f"multiplies matrices with torch's {name}, whose sums depend on the number of rows")
        if func in ACROSS_ROWS:
            raise Unfit(f"mixes rows with torch's {name}")
        return func(*args, **(kwargs or {}))


def _is_outer(args: tuple[object, ...]) -> bool:
    """Whether a product has one term in each sum, as in rotary frequencies times positions."""
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    return first is not None and first.dim() > 1 and first.shape[-1] == 1


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names and shapes of what a model's files must and may hold, in the form in which files hold it."""

    expected: Shapes
    tied: Shapes
    """Those that are another one, and may be left out."""
    prefix: str
    """What the names of a base model begin with, with or without which files have them."""
    ignored: tuple[str, ...]
    """Patterns of what older files hold besides."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Of a model without numbers; raises Unfit when files cannot hold it."""
        try:
            # Mixtures of experts are stored one by one, and computed as one tensor.
            stored = revert_weight_conversion(model, dict(model.state_dict()))
        except Exception as error:  # what goes wrong with no expert at all has no common type
            raise Unfit(f"cannot be stored: {first_line(error)}") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        tied = set(model.all_tied_weights_keys)
        return cls(
            {name: shape for name, shape in shapes.items() if name not in tied},
            {name: shape for name, shape in shapes.items() if name in tied},
            f"{model.base_model_prefix}.",
            tuple(model._keys_to_ignore_on_load_unexpected or ()),
        )

    def check(self, folder: Path, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
        """The stored tensors by the model's names; raises ModelRefused."""
        known = {self._name(tensor.name): tensor for tensor in stored if not self._is_ignored(tensor.name)}
        check_tensors(folder, known, self.expected, self.tied)
        return known

    def _name(self, stored: str) -> str:
        names = (stored, self.prefix + stored, stored.removeprefix(self.prefix))
        return next((name for name in names if name in self.expected or name in self.tied), stored)

    def _is_ignored(self, stored: str) -> bool:
        if self._name(stored) in self.expected:
            return False
        return any(re.search(pattern, stored) for pattern in self.ignored)


# What transformers has to say goes to stderr, where a service has one line of JSON for each event.
logging.set_verbosity_error()
logging.disable_progress_bar()


def without_numbers(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device, which has shapes and takes no memory; raises Unfit when it cannot be made."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind(config)
    except Exception as error:  # what a class says about its configuration has no common type
        raise Unfit(f"cannot be made: {first_line(error)}") from error
    return model.eval()


def straighten(model: nn.Module) -> None:
    """Replaces GPT-2's transposed layers by ordinary ones, whose products are the same."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                setattr(module, name, _linear(child))


def load(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    folder: Path,
    stored: Mapping[str, StoredTensor],
    placement: tuple[torch.device, torch.dtype, Ops],
) -> PreTrainedModel:
    """The model with its numbers: matrices in the placement's type, vectors in float32. stored has been checked."""
    device, dtype, ops = placement
    try:
        model, report = kind.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:  # it reads generation_config.json too
        raise ModelRefused(f"{folder} is refused by {PACKAGE}: {first_line(error)}", folder=folder) from error
    # The headers were right, so this is about a layout that is not read as it was written.
    invented = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
    if invented:
        raise ModelRefused(f"{folder}: transformers has no numbers for {invented[0]}", tensor=invented[0])
    straighten(model)
    _restore_vectors(model, stored)
    for tensor in (*model.parameters(), *model.buffers()):
        # Always a copy: the file's memory is mapped, unaligned, and changes if someone overwrites it.
        copied = tensor.detach().to(device=device, dtype=_kept_dtype(tensor), copy=True)
        tensor.data = ops.stack([copied]) if copied.ndim > 1 else copied
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(requires_grad=False)
    return loaded


def _linear(transposed: Conv1D) -> nn.Linear:
    num_inputs, num_outputs = transposed.weight.shape
    with torch.device("meta"):
        linear = nn.Linear(num_inputs, num_outputs)
    linear.weight = nn.Parameter(transposed.weight.detach().t().contiguous(), requires_grad=False)
    linear.bias = nn.Parameter(transposed.bias.detach(), requires_grad=False)
    return linear


def _kept_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.ndim == 1 and tensor.is_floating_point() else tensor.dtype


def _restore_vectors(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Norms and biases as the files have them; transformers has rounded them to the type of the matrices."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, found in stored.items():
        if len(found.shape) == 1 and found.dtype != "BF16" and name in tensors:
            with safe_open(found.file, framework="pt") as file:
                tensors[name].data = file.get_tensor(found.name).float()


# Neither a multiple of a vector nor of a tile.
PROBE_ROWS = 37


def rows_are_independent(decoder: HfDecoder) -> bool:
    """Whether first and last of 37 one-token sequences have the logits that they have alone."""
    config, device = decoder.config, decoder.embedding.device
    cache = KVCache(config.num_layers, PROBE_ROWS, config.num_kv_heads, config.head_dim, torch.float32, device)
    token_ids = torch.arange(PROBE_ROWS, device=device) % config.vocab_size
    positions = torch.arange(PROBE_ROWS, device=device) % config.context_len
    everyone = torch.arange(PROBE_ROWS, device=device)

    def logits(rows: Tensor) -> Tensor:
        wanted = torch.arange(rows.shape[0], device=device)
        return decoder.forward(_plan(token_ids[rows], positions[rows], rows), cache, wanted)

    together = logits(everyone)
    return all(torch.equal(logits(everyone[row : row + 1])[0], together[row]) for row in (0, PROBE_ROWS - 1))


def _plan(token_ids: Tensor, positions: Tensor, slots: Tensor) -> RowPlan:
    """Every row sees itself alone."""
    starts = torch.arange(slots.shape[0], device=slots.device)
    return RowPlan(token_ids, positions, slots, slots.int(), starts, torch.ones_like(slots).int(), 1)


@dataclass(frozen=True, slots=True)
class HfCheckpoint:
    """Files on this machine; see outrider.engine.models.checkpoints.Checkpoint."""

    name: str
    folder: Path
    config: HfConfig
    kind: type[PreTrainedModel]
    configuration: PretrainedConfig
    tensors: TensorNames
    modelling: str = f"{PACKAGE}-torch-{torch.__version__.split('+')[0]}"
    """Both compute parts of a forward, and another version may do so with other low bits."""

    def build(self, device: torch.device, dtype: torch.dtype, ops: Ops) -> HfDecoder:
        """Reads the files; raises ModelRefused before it does where their headers do not fit."""
        stored = self.tensors.check(self.folder, stored_tensors(self.folder))
        model = load(self.kind, self.configuration, self.folder, stored, (device, dtype, ops))
        decoder = HfDecoder(self.config, model, ops)
        if device.type == "cpu" and not rows_are_independent(decoder):
            raise ModelRefused(f"{self.folder}: {self.kind.__name__} computes other bits for a row in other company")
        return decoder

    def digest(self) -> str:
        """Of configuration and samples of the weights."""
        return model_hash(self.folder)


def find(name: str, folder: Path) -> HfCheckpoint:
    """The model in a folder, with its shape read and nothing loaded. Raises ModelRefused."""
    if (folder / "adapter_config.json").exists():
        raise ModelRefused(f"{folder} is an adapter of another model; only whole models are served", folder=folder)
    configuration = read_configuration(folder)
    kind = model_class(folder)
    keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
    limits = context_len(folder, configuration), read_eos_token_ids(folder, keys)
    try:
        model = without_numbers(kind, configuration)
        tensors = TensorNames.of(model)
        straighten(model)
        shape = survey(model)
    except Unfit as error:
        raise ModelRefused(f"{folder}: {kind.__name__} {error}", folder=folder) from error
    sizes = shape.vocab_size, shape.num_layers, shape.num_kv_heads, shape.head_dim
    return HfCheckpoint(name, folder, HfConfig(*sizes, *limits), kind, configuration, tensors)
