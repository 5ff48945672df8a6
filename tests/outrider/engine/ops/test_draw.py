"""Drawing tokens: the argmax of scores plus the noise of outrider.engine.noise, the same one everywhere."""

import numpy as np
import pytest
import torch
from support.models.engine_cases import every_ops, keys_of, native, numpy_gumbel
from torch import Tensor

from outrider.engine.ops import Ops

EVERY_OPS = pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)
# One stretch, two of them, and a vocabulary that fills neither blocks nor vectors.
NUM_TOKENS = [1, 5, 64, 4096, 20011]


def numpy_draw(scores: Tensor, keys: Tensor) -> Tensor:
    noise = numpy_gumbel(keys.numpy().view(np.uint64), scores.shape[1])
    return torch.from_numpy(np.argmax(scores.numpy().astype(np.float64) + noise, axis=1))


@EVERY_OPS
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_draws_are_the_argmax(ops: Ops, num_tokens: int, spread: float) -> None:
    """Flat, usual and peaked scores, most of them -inf in every second row."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.randn(60, num_tokens, generator=generator) * spread
    scores[1::2, 1 + num_tokens // 10 :] = -torch.inf
    keys = keys_of(60, generator)
    assert torch.equal(ops.draw(scores, keys), numpy_draw(scores, keys))


@pytest.mark.parametrize("peak", [0, 8191, 8192, 20010])
def test_a_certain_token_always_wins(peak: int) -> None:
    """A one-hot row draws its token for every key, wherever it lies: temperature 0 is no special case."""
    scores = torch.full((50, 20011), -torch.inf)
    scores[:, peak] = 0.0
    drawn = native().draw(scores, keys_of(50, torch.Generator().manual_seed(peak)))
    assert drawn.tolist() == [peak] * 50


def test_skipping_hides_no_winner() -> None:
    """A block that cannot win is not computed; a rising row, where each block nearly wins, still draws exactly."""
    scores = torch.linspace(0, 12, 8192).repeat(200, 1)
    keys = keys_of(200, torch.Generator().manual_seed(5))
    assert torch.equal(native().draw(scores, keys), numpy_draw(scores, keys))


@EVERY_OPS
def test_ties_go_to_the_lowest_id(ops: Ops) -> None:
    """Scores so large that the noise is rounded away leave nothing but ties."""
    scores = torch.full((4, 20000), 1e30)
    scores[:, :3] = -torch.inf
    assert ops.draw(scores, torch.arange(4)).tolist() == [3] * 4


@EVERY_OPS
@pytest.mark.parametrize("fault", [-torch.inf, torch.nan, torch.inf])
def test_rows_without_a_distribution_are_refused(ops: Ops, fault: float) -> None:
    """A row of -inf only, with a NaN or with +inf is an error, not a token."""
    scores = torch.zeros(3, 9000)
    scores[1, 8999:] = fault
    scores[1, : 0 if fault != -torch.inf else 8999] = fault
    with pytest.raises(ValueError, match="finite"):
        ops.draw(scores, torch.arange(3))
    with pytest.raises(ValueError, match="finite"):
        ops.softmax(scores)
