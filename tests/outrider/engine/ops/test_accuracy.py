"""Each implementation of each operation against the same mathematics in float64."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.models.engine_cases import attend, attention_case, every_ops, rotate, rows_of
from support.rounding import allowed, share_of
from torch import Tensor
from torch.nn import functional

from outrider.engine.ops import Ops

EVERY_OPS = pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)


def assert_near(found: Tensor, exact: Tensor, terms: int, growth: float = 1.0) -> None:
    """What sums of so many terms may be off, and how much that grows."""
    assert float((found.double() - exact).abs().max()) <= allowed(exact, terms) * growth


@EVERY_OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(1, 1), (15, 5), (16, 4), (37, 13), (384, 640), (1000, 333), (2816, 70)]
)
def test_linear_is_the_product(ops: Ops, dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    """x times the transpose of weight plus bias, for every number of rows from 1 to 20 and odd sizes."""
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator)
    x = torch.randn(20, num_inputs, generator=generator)
    exact = x.double() @ weight.double().T
    for num_rows in range(1, 21):
        assert_near(ops.linear(x[:num_rows], weight, bias), exact[:num_rows] + bias, num_inputs + 1)
    assert_near(ops.linear(x, weight), exact, num_inputs)


@EVERY_OPS
@pytest.mark.parametrize("width", [1, 16, 50, 384])
def test_rms_norm_divides_by_the_root_mean_square(ops: Ops, width: int) -> None:
    """Each row has the mean square one before the weight."""
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(7, width, generator=generator) * 3, torch.randn(width, generator=generator)
    wide = x.double()
    exact = wide / torch.sqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight
    assert_near(ops.rms_norm(x, weight, 1e-6), exact, width + 4)  # the sum's root, its inverse, and two products


@EVERY_OPS
def test_silu_multiply_gates(ops: Ops) -> None:
    """silu(gate) * up, also far outside the range of exp."""
    gate_up = torch.randn(5, 2 * 77, generator=torch.Generator().manual_seed(1)) * 20
    gate_up[0, :4] = torch.tensor([-1000.0, 1000.0, -90.0, 0.0])
    gate, up = gate_up.double().chunk(2, dim=1)
    # An exponential of a vector library is right to four units, which count as 64 roundings of one.
    assert_near(ops.gate_multiply(gate_up), functional.silu(gate) * up, 64)


@EVERY_OPS
def test_gelu_multiply_gates(ops: Ops) -> None:
    """gelu(gate) * up in its tanh form, to a rounding of the gate where that is near nought."""
    gate_up = torch.randn(5, 2 * 77, generator=torch.Generator().manual_seed(1)) * 4
    gate_up[0, :6] = torch.tensor([-1000.0, 1000.0, -90.0, 0.0, -6.0, 1e-20])
    gate, up = gate_up.double().chunk(2, dim=1)
    exact = functional.gelu(gate, approximate="tanh")
    # 1 + tanh of a number below nought is what is left of two that are near each other.
    found, room = ops.gate_multiply(gate_up, is_gelu=True).double(), 64 * 2.0**-24 * gate.abs().clamp_max(8) * up.abs()
    assert bool(((found - exact * up).abs() <= room).all())


@EVERY_OPS
def test_clamped_multiply_gates(ops: Ops) -> None:
    """g sigmoid(slope g) (u + 1) of both in their limits; NaN stays, and nothing overflows."""
    gate_up = torch.randn(5, 2 * 77, generator=torch.Generator().manual_seed(1)) * 4
    gate_up[0, :6] = torch.tensor([-1000.0, 1000.0, -90.0, 0.0, 7.0, torch.inf])
    gate_up[0, 77:83] = torch.tensor([1000.0, -1000.0, -7.0, -1.0, 7.0, -torch.inf])
    gate, up = gate_up.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    assert_near(ops.clamped_multiply(gate_up, 1.5, 7.0), gate * torch.sigmoid(1.5 * gate) * (up + 1), 64)
    faults = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])
    assert bool(ops.clamped_multiply(faults, 1.5, 7.0).isnan().all())


@EVERY_OPS
@pytest.mark.parametrize(
    ("head_dim", "turning"), [(2, 2), (40, 40), (64, 64), (128, 128), (20, 12), (128, 96), (40, 2)]
)
def test_rotation_pairs_halves(ops: Ops, head_dim: int, turning: int) -> None:
    """Element i turns with i + T/2 of the first T by the row's own position, and the others stay.

    Keys and values land in its slot and nowhere else.
    """
    case = attention_case(8, 4, 2, head_dim, num_turning=turning)
    before = case.key_cache.clone()
    rotated = rotate(ops, case)
    cos, sin = (table[case.plan.positions, None].double().repeat(1, 1, 2) for table in (case.cos, case.sin))
    for heads, found in ((case.query, rotated), (case.key, case.key_cache[case.plan.slots])):
        turned = heads[:, :, :turning].double()
        first, second = turned.chunk(2, dim=2)
        assert_near(found[:, :, :turning], turned * cos + torch.cat((-second, first), dim=2) * sin, 3)
        assert torch.equal(found[:, :, turning:], heads[:, :, turning:])
    assert torch.equal(case.value_cache[case.plan.slots], case.value)
    untouched = torch.ones(len(before), dtype=torch.bool).index_fill(0, case.plan.slots, False)
    assert torch.equal(case.key_cache[untouched], before[untouched])


@EVERY_OPS
@pytest.mark.parametrize(("num_heads", "num_groups", "head_dim"), [(6, 2, 64), (2, 2, 20), (4, 1, 128), (3, 3, 80)])
def test_attention_reads_its_own_list(ops: Ops, num_heads: int, num_groups: int, head_dim: int) -> None:
    """Softmax over exactly the keys that the row's list names, 1 to 300 of them, grouped heads sharing them.

    With sinks over one score more for each head, from one that takes nearly all weight to one that takes none.
    """
    case = attention_case(12, num_heads, num_groups, head_dim)
    shared, sinks = num_heads // num_groups, torch.linspace(9, -50, num_heads)
    outputs = [(attend(ops, case, each), each) for each in (None, sinks, torch.full_like(sinks, -torch.inf))]
    assert torch.equal(outputs[2][0], outputs[0][0])
    for row, (output, given) in product(range(12), outputs[:2]):
        found = output.view(12, num_heads, head_dim)
        start, count = int(case.plan.key_starts[row]), int(case.plan.key_counts[row])
        slots = case.plan.key_slots[start : start + count].long()
        keys, values = (
            cache[slots].double().repeat_interleave(shared, 1) for cache in (case.key_cache, case.value_cache)
        )
        scores = torch.einsum("hd,lhd->hl", case.query[row].double(), keys) * head_dim**-0.5
        if given is not None:
            scores = torch.cat((scores, given.double()[:, None]), dim=1)
        exact = torch.einsum("hl,lhd->hd", torch.softmax(scores, dim=1)[:, :count], values)
        # A softmax makes of what a score is off a share of the weight.
        assert_near(found[row], exact, head_dim + count, growth=1 + float(scores.abs().max()))


@EVERY_OPS
def test_keys_and_values_of_bfloat16_are_the_nearest(ops: Ops) -> None:
    """They are rounded once, to even where two are equally near, and attention reads them as they are then."""
    case = attention_case(12, 4, 2, 72)
    case.value[0, 0, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, torch.nan, torch.inf])
    narrow = replace(case, key_cache=case.key_cache.bfloat16(), value_cache=case.value_cache.bfloat16())
    assert torch.equal(rotate(ops, narrow), rotate(ops, case))
    for found, exact in ((narrow.key_cache, case.key_cache), (narrow.value_cache, case.value_cache)):
        assert torch.equal(found.nan_to_num(7), exact.bfloat16().nan_to_num(7))
    sound = rows_of(narrow, slice(1, 12))
    sound.value_cache.nan_to_num_(0)
    widened = replace(sound, key_cache=sound.key_cache.float(), value_cache=sound.value_cache.float())
    assert torch.equal(attend(ops, sound), attend(ops, widened))


@EVERY_OPS
def test_attention_survives_large_scores(ops: Ops) -> None:
    """Scores of several hundreds overflow nothing, in whatever chunk the greatest one lies."""
    case = attention_case(6, 2, 1, 64)
    case.query.mul_(60)
    assert bool(torch.isfinite(attend(ops, case)).all())


@EVERY_OPS
@pytest.mark.parametrize("num_tokens", [1, 7, 4096, 5003])
def test_softmax_is_exact_to_float64(ops: Ops, num_tokens: int) -> None:
    """Probabilities in float64; -inf gives exactly zero."""
    scores = torch.randn(6, num_tokens, generator=torch.Generator().manual_seed(2)) * 8
    scores[:, 1::3] = -torch.inf
    probs = ops.softmax(scores)
    assert torch.allclose(probs, torch.softmax(scores.double(), dim=1), rtol=1e-13, atol=0)
    assert bool((probs[:, 1::3] == 0).all())
    assert torch.allclose(
        probs.sum(1), torch.ones(6, dtype=torch.float64), rtol=share_of(num_tokens + 4, torch.float64), atol=0
    )
