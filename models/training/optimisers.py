"""Muon for matrices, AdamW for embeddings and norms, one schedule for both. Knows no data.

Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; its rate is scaled to AdamW's RMS
as in Liu et al. 2025, "Muon is scalable for LLM training", so one learning rate serves both.
"""

from typing import Any

import torch
from torch import nn

MAX_GRADIENT_NORM = 1.0
FINAL_RATE = 0.03  # of the learning rate, at the last step


def rate(step: int, steps: int, warm_up: int) -> float:
    """The share of the learning rate at a step: linear up, constant to half way, then linear down to FINAL_RATE."""
    rising = min(1.0, (step + 1) / max(1, warm_up))
    falling = min(1.0, 2 * (steps - 1 - step) / max(1, steps))
    return rising * (FINAL_RATE + (1 - FINAL_RATE) * falling)


class Optimisers:
    """Both optimisers of one model."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.parameters = list(model.parameters())
        matrices = [each for name, each in model.named_parameters() if is_matrix(name, each)]
        others = [each for name, each in model.named_parameters() if not is_matrix(name, each)]
        self.each: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
        )

    def step(self, share: float) -> None:
        """Moves the parameters along their gradients at a share of the learning rate, and clears the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        for optimiser in self.each:
            for group in optimiser.param_groups:
                group["lr"] = self.learning_rate * share
            optimiser.step()
            optimiser.zero_grad()

    def state(self) -> list[dict[str, Any]]:
        """Everything that `restore` needs."""
        return [optimiser.state_dict() for optimiser in self.each]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Goes on from a state, on whatever device the model is."""
        for optimiser, state in zip(self.each, states, strict=True):
            optimiser.load_state_dict(state)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon moves it. The embedding is a table of vectors, and the output matrix is tied to it."""
    return parameter.ndim == 2 and "embed_tokens" not in name
