"""Mixtures of experts: one expert after the other, without the rows that are computed for nobody.

transformers' quicker ways multiply the rows of all experts at once, in an order that depends on how many there are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from outrider.engine.fallback.padding import pad_rows

NAME = "outrider"


class Company:
    """How many rows of the running forward are somebody's; one object for the experts of one model."""

    def __init__(self) -> None:
        self.num_rows = 0


def introduce(model: nn.Module, company: Company) -> None:
    """Gives the experts of a model what they look at, because transformers hands them nothing but rows."""
    for module in model.modules():
        if hasattr(type(module), "_apply_gate"):
            setattr(module, "company", company)  # noqa: B010 - declared nowhere in torch


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
