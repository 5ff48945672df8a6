"""Drawing with a temperature alone: what the transforms followed by a draw would draw, by every implementation."""

import pytest
import torch
from support.models.engine_cases import every_ops, keys_of, native
from torch import Tensor

from outrider.engine.ops import Ops
from outrider.engine.sampling.transforms import RowContext, divisor, transform
from outrider.parameters import SamplingParameters

EVERY_OPS = pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)
# The last two are 1 and 0 in float32, and are neither.
TEMPERATURES = (0.0, 1.0, 0.7, 100.0, 1 + 1e-12, 1e-300)


def plain(count: int) -> list[SamplingParameters]:
    """One request a row, with each temperature in turn."""
    return [SamplingParameters(temperature=TEMPERATURES[row % len(TEMPERATURES)]) for row in range(count)]


def chosen(ops: Ops, logits: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
    column = torch.tensor([divisor(sampling) for sampling in plain(len(keys))], dtype=torch.float64)
    return ops.choose(logits, column, keys, num_tokens)


def transformed(ops: Ops, logits: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
    rows = [RowContext(sampling, (1,), (), 1, frozenset()) for sampling in plain(len(keys))]
    return ops.draw(transform(logits, rows, num_tokens, ops), keys)


@EVERY_OPS
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 3), (5, 5), (300, 333), (4090, 4096), (20011, 20011)])
def test_choosing_is_transforming_and_drawing(ops: Ops, num_tokens: int, width: int) -> None:
    """All temperatures, tied rows and padding that holds anything: the same tokens as by way of scores."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(36, width, generator=generator) * 4
    logits[6:12] = logits[6:12].round()
    logits[12:18] = 1.5
    logits[18:24, 1:] = -torch.inf
    logits[:, num_tokens:] = torch.nan
    keys = keys_of(36, generator)
    expected = transformed(ops, logits, keys, num_tokens)
    assert torch.equal(chosen(ops, logits, keys, num_tokens), expected)
    if num_tokens == 4090:
        # A row by itself, because the other rows must not matter.
        alone = [ops.choose(logits[row : row + 1], torch.zeros(1).double(), keys[:1], num_tokens) for row in range(36)]
        assert torch.cat(alone).tolist() == [int(logits[row, :num_tokens].argmax()) for row in range(36)]


@EVERY_OPS
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("fault", [-torch.inf, torch.nan, torch.inf])
def test_rows_without_a_distribution_are_refused(ops: Ops, temperature: float, fault: float) -> None:
    """A row of -inf only, with a NaN or with +inf is an error at every temperature."""
    logits = torch.zeros(3, 9000)
    logits[1, 8999:] = fault
    logits[1, : 0 if fault != -torch.inf else 8999] = fault
    column = torch.full((3,), divisor(SamplingParameters(temperature=temperature)), dtype=torch.float64)
    with pytest.raises(ValueError, match="finite"):
        ops.choose(logits, column, torch.arange(3), 9000)


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_widths_are_checked(num_tokens: int) -> None:
    """There is nothing to choose from outside the logits."""
    with pytest.raises(ValueError, match="num_tokens"):
        native().choose(torch.zeros(1, 8), torch.ones(1).double(), torch.zeros(1).long(), num_tokens)
    with pytest.raises(ValueError, match="temperatures"):
        native().choose(torch.zeros(1, 8), torch.ones(1), torch.zeros(1).long(), 8)
