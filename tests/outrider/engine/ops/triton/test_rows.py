"""Norms, gates and rotation of the kernels for CUDA, each a function of one row."""

import pytest
import torch
from support.devices.kernels import KernelOps, amid_nan, assert_same
from support.models.engine_cases import attention_case, rotate
from torch.nn import functional

from outrider.engine.ops.reference import ReferenceOps


@pytest.mark.parametrize("width", [48, 100, 576, 1024])
def test_norms_and_gates_are_near_float64(width: int) -> None:
    """Also where a row is no whole block, with NaN around it; a row alone has the same bits."""
    generator = torch.Generator().manual_seed(width)
    x, weight = (amid_nan(torch.randn(*shape, generator=generator) * 3) for shape in ((5, width), (width,)))
    gate_up = amid_nan(torch.randn(5, 2 * width, generator=generator) * 5)
    ops = KernelOps()
    normed, multiplied = ops.rms_norm(x, weight, 1e-6), ops.gate_multiply(gate_up)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    gate, up = gate_up.double().chunk(2, dim=1)
    assert float((normed - exact).norm() / exact.norm()) < 1e-6
    gated, also = ops.gate_multiply(gate_up, is_gelu=True), functional.gelu(gate, approximate="tanh") * up
    assert float((gated - also).norm() / also.norm()) < 1e-6
    clamped = ops.clamped_multiply(gate_up, 1.702, 4.0)
    low = gate.clamp(max=4)
    exact = low * torch.sigmoid(1.702 * low) * (up.clamp(-4, 4) + 1)
    assert float((clamped - exact).norm() / exact.norm()) < 1e-6
    expected = functional.silu(gate) * up
    assert float((multiplied - expected).norm() / expected.norm()) < 1e-6
    for row in range(5):
        part = slice(row, row + 1)
        assert_same(ops.rms_norm(x[part], weight, 1e-6), normed[part])
        assert_same(ops.gate_multiply(gate_up[part]), multiplied[part])
        assert_same(ops.gate_multiply(gate_up[part], is_gelu=True), gated[part])
        assert_same(ops.clamped_multiply(gate_up[part], 1.702, 4.0), clamped[part])


def test_a_row_of_zeros_and_large_gates_stay_finite() -> None:
    """No division by nought, and no infinity times it."""
    ops = KernelOps()
    assert not bool(ops.rms_norm(torch.zeros(1, 48), torch.ones(48), 1e-6).any())
    gate_up = torch.tensor([[-200.0, 200.0, -90.0, 0.0, 3.0, 3.0, 3.0, 3.0]])
    assert torch.allclose(ops.gate_multiply(gate_up), torch.tensor([[0.0, 600.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "groups", "head_dim", "turning"), [(6, 2, 64, 64), (4, 1, 80, 80), (3, 3, 20, 12)])
def test_rotation_and_stored_keys_are_those_of_the_reference(
    heads: int, groups: int, head_dim: int, turning: int, dtype: torch.dtype
) -> None:
    """Of views into one product, heads that turn in part too, rounded to the cache's type.

    Slots of no row keep what they hold.
    """
    case = attention_case(7, heads, groups, head_dim, num_turning=turning)
    expected = rotate(ReferenceOps(), case)
    caches = [cache.to(dtype) for cache in (case.key_cache, case.value_cache)]
    written = torch.zeros(len(caches[0]), dtype=torch.bool)
    written[case.plan.slots] = True
    for cache in caches:
        cache[written] = torch.nan
    before = [cache.clone() for cache in caches]
    heads_of = case.query, case.key, case.value
    found = KernelOps().rotate_and_store(*heads_of, case.plan, case.cos, case.sin, *caches)
    assert_same(found, expected)
    for cache, exact, old in zip(caches, (case.key_cache, case.value_cache), before, strict=True):
        assert_same(cache[written], exact[written].to(dtype))
        assert torch.equal(cache[~written], old[~written])
