"""What a model is taught: the text itself, or what another model says of it. Moves no weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from training.blocks import IGNORED

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""The sum over all targets [B, L] but the IGNORED ones, given the inputs [B, L]."""


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """[B, L, V] float32, computed in bfloat16 wherever that is safe."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        result: Tensor = model(input_ids=inputs, use_cache=False).logits
    return result.float()


def next_token(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy against the text."""
    return cross_entropy(logits(model, inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def distillation(teacher: nn.Module) -> Loss:
    """Cross-entropy against a teacher's whole distributions at temperature 1.

    Its gradient is that of the divergence KL(teacher || model), which bounds how often a draft is refused: the total
    variation is at most sqrt(KL / 2).
    """

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        learnt = targets.flatten() != IGNORED
        with torch.no_grad():
            wanted = logits(teacher, inputs).flatten(0, 1)[learnt].softmax(-1)
        return cross_entropy(logits(model, inputs).flatten(0, 1)[learnt], wanted, reduction="sum")

    return loss
