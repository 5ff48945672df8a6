"""Weights of a checked checkpoint into a model of transformers, in the types and layouts that our operations read."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from outrider.engine.fallback.configuration import PACKAGE, first_line
from outrider.engine.fallback.survey import Unfit
from outrider.engine.ops import Ops
from outrider.engine.weights import StoredTensor
from outrider.errors import ModelRefused

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
