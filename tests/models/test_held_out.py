"""Held-out losses are those of the right tokens after the right context."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from training.data import HeldOut
from training.learn import measure
from training.model import PRESETS, new_model

TOKENS = torch.randint(300, (640,), generator=torch.Generator().manual_seed(4))
MODEL = new_model(PRESETS["tiny"], "target", 3)


def loss(tokens: Tensor, tail: int) -> float:
    """Nats a token of the last tokens of one window, in float32."""
    with torch.no_grad():
        logits = MODEL(tokens[None]).logits[0]
    return float(cross_entropy(logits[-tail - 1 : -1], tokens[-tail:]))


def test_the_same_tokens_behind_more_and_more() -> None:
    """Of block 9 all but the first token, and its second half at the ends of three windows."""
    found = measure(MODEL, HeldOut(TOKENS, torch.tensor([9]), 32, 128))
    assert found[0] == pytest.approx(loss(TOKENS[288:320], 31), abs=0.01)
    expected = [loss(TOKENS[320 - length : 320], 16) for length in (32, 64, 128)]
    assert found[1:] == pytest.approx(expected, abs=0.01)


def test_a_block_without_enough_before_it_is_in_no_window() -> None:
    """Or the lengths would be compared on different text; blocks alone count all the same."""
    found = measure(MODEL, HeldOut(TOKENS, torch.tensor([2]), 32, 128))
    assert math.isfinite(found[0])
    assert all(math.isnan(value) for value in found[1:])
    both = measure(MODEL, HeldOut(TOKENS, torch.tensor([2, 9]), 32, 128))
    alone = measure(MODEL, HeldOut(TOKENS, torch.tensor([9]), 32, 128))
    assert both[1:] == pytest.approx(alone[1:])
