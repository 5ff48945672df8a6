"""The best tokens of a row under noise, and their shares: the first is the draw, whatever computes it."""

import pytest
import torch
from support.models.engine_cases import every_ops, keys_of
from torch import Tensor

from outrider.engine.noise import gumbel
from outrider.engine.ops import Ops
from outrider.engine.ops.eager import EagerOps

EVERY_OPS = pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)


def case(num_tokens: int, num_rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all kinds, scales and keys."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.randn(num_rows, num_tokens, generator=generator) * 4
    scores[3] = scores[3].round()
    scores[4] = 1.5
    scores[5, 2:] = -torch.inf
    return scores, torch.rand(num_rows, generator=generator).double() * 2 + 0.1, keys_of(num_rows, generator)


@EVERY_OPS
@pytest.mark.parametrize("num_tokens", [2, 7, 64, 333, 4096, 20011])
@pytest.mark.parametrize("with_noise", [False, True])
def test_tokens_stand_in_the_order_of_their_sums(ops: Ops, num_tokens: int, with_noise: bool) -> None:
    """A full sort with ties to the lowest id finds the same, and a softmax over all tokens the shares."""
    scores, scales, keys = case(num_tokens)
    ids, shares = ops.rank(scores, scales, 8, keys if with_noise else None)
    sums = scores.double() + (gumbel(keys, num_tokens) if with_noise else 0)
    expected = sums.sort(dim=1, descending=True, stable=True)
    probs = torch.softmax(sums / scales[:, None], dim=1).gather(1, expected.indices)
    assert ids.shape == shares.shape == (12, 8)
    for row in range(12):
        count = min(8, 2 if row == 5 else num_tokens)
        assert ids[row].tolist() == [*expected.indices[row, :count].tolist(), *[-1] * (8 - count)]
        assert torch.allclose(shares[row, :count], probs[row, :count], rtol=1e-9, atol=0)
        assert not shares[row, count:].any()
        assert (shares[row].diff() <= 0).all()


@pytest.mark.slow
@EVERY_OPS
def test_the_first_is_the_draw(ops: Ops) -> None:
    """Of 2,000 rows under noise, and without noise the lowest id of the greatest scores."""
    generator = torch.Generator().manual_seed(1)
    scores, keys = torch.randn(2000, 300, generator=generator), keys_of(2000, generator)
    scales = torch.ones(2000, dtype=torch.float64)
    assert torch.equal(ops.rank(scores, scales, 3, keys)[0][:, 0], ops.draw(scores, keys))
    rounded = scores.round()
    assert torch.equal(ops.rank(rounded, scales, 1)[0][:, 0], rounded.argmax(dim=1))


@EVERY_OPS
def test_a_row_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    """Alone and among others it has the same tokens and the same shares, bit for bit."""
    if type(ops) is EagerOps:
        pytest.skip("eager operations promise nothing of the kind")
    scores, scales, keys = case(4096)
    ids, shares = ops.rank(scores, scales, 8, keys)
    for row in range(12):
        one = slice(row, row + 1)
        alone = ops.rank(scores[one], scales[one], 8, keys[one])
        assert torch.equal(alone[0], ids[one])
        assert torch.equal(alone[1], shares[one])


@EVERY_OPS
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), None])
def test_a_row_that_cannot_be_drawn_is_refused(ops: Ops, fault: float | None) -> None:
    """NaN, +inf and nothing finite, as in `draw`."""
    scores, scales, keys = case(100)
    if fault is None:
        scores[7] = -torch.inf
    else:
        scores[7, 99] = fault
    with pytest.raises(ValueError, match="finite"):
        ops.rank(scores, scales, 8, keys)
