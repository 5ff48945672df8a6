"""What tests allow for rounding: enough for any order of additions, and no more than errors need."""

import numpy as np
import pytest
import torch
from support.rounding import NUM_DRAWS, reach, share_of

NUM_ORDERS = 300


@pytest.mark.parametrize("terms", [2, 48, 700, 5000])
def test_sums_in_any_order_stay_within_their_share(terms: int) -> None:
    """Random products one after another in 300 orders: the worst is off by less, and by more than a thirtieth."""
    chance = np.random.default_rng(terms)
    products = (chance.normal(size=(NUM_ORDERS, terms)) * chance.normal(size=terms)).astype(np.float32)
    sums = np.array([np.add.accumulate(chance.permutation(row))[-1] for row in products])
    exact = products.astype(np.float64).sum(1)
    worst = np.abs(sums - exact).max() / np.abs(exact).max()
    assert share_of(terms) / 30 < worst < share_of(terms)


@pytest.mark.parametrize("steepness", [1.0, 100.0])
def test_the_reach_grows_with_what_a_computation_makes_of_rounding(steepness: float) -> None:
    """A steep function magnifies what its inputs are off; float32's errors stay below, and weights are as before."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(40, 64, generator=generator), torch.randn(64, generator=generator)
    held, calls = weight.clone(), []

    def compute() -> torch.Tensor:
        calls.append(None)
        return (weight.double() @ x.double() * steepness).sin()

    limit = reach([weight], compute)
    error = (weight @ x * steepness).double().sin() - compute()
    assert float(error.abs().max()) < limit
    assert torch.equal(weight, held)
    assert len(calls) == 1 + NUM_DRAWS + 1
    assert steepness / 2 < limit / share_of(64) < 50 * steepness
