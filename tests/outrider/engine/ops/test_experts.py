"""Experts by the compiled kernels: the bits of the other operations one by one, for any rows beside and any build."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.engine_cases import BUILT, native
from support.models.gguf_blocks import FORMS, random_blocks
from torch import Tensor

from outrider.engine.ops import Experts, Ops
from outrider.engine.ops.blocks import BlockMatrix
from outrider.engine.ops.experts import routed
from outrider.engine.ops.library import FOLDER, load_kernels, processor_levels
from outrider.engine.ops.native import NativeOps
from outrider.engine.ops.reference import ReferenceOps

NUM_EXPERTS, HIDDEN, SIZE, NUM_ROWS = 7, 256, 40, 61
KERNELS = FOLDER / "kernels"
FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-pthread", "-Wno-psabi")
CUTS = [0, 1, 2, 5, 11, 28, 61]


def experts_of(ops: NativeOps, kinds: tuple[str, str, str], has_biases: bool = False, **fields: int) -> Experts:
    """Random experts whose three matrices are of these kinds: of GGUF, or "float32" or "bfloat16"."""
    generator = torch.Generator().manual_seed(9)

    def matrix(kind: str, num_outputs: int, num_inputs: int) -> Tensor | BlockMatrix:
        if kind in FORMS:
            made = ops.blocks(kind, num_outputs, num_inputs)
            ops.fill(made, torch.from_numpy(random_blocks(kind, num_outputs, num_inputs)), 0)
            return made
        return (0.1 * torch.randn(num_outputs, num_inputs, generator=generator)).to(getattr(torch, kind))

    wide, down = NUM_EXPERTS * fields.get("size", SIZE), NUM_EXPERTS * HIDDEN
    biases = {
        "router_bias": torch.randn(NUM_EXPERTS, generator=generator),
        "gate_up_bias": torch.randn(NUM_EXPERTS, 2 * wide // NUM_EXPERTS, generator=generator),
        "down_bias": torch.randn(NUM_EXPERTS, HIDDEN, generator=generator),
    }
    return Experts(
        torch.randn(NUM_EXPERTS, HIDDEN, generator=generator),
        matrix(kinds[0], wide, HIDDEN),
        matrix(kinds[1], wide, HIDDEN),
        matrix(kinds[2], down, wide // NUM_EXPERTS),
        NUM_EXPERTS,
        fields.get("num_chosen", 3),
        bool(fields.get("is_normalised", 1)),
        **(biases if has_biases else {}),
    )


X = torch.randn(NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(2))
KINDS = [
    ("float32", "float32", "float32"),
    ("bfloat16", "Q8_0", "bfloat16"),
    *((kind, "Q4_0", "Q5_1") for kind in FORMS),
    ("Q4_0", "float32", "IQ4_NL"),
]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("has_biases", [False, True])
def test_experts_have_the_bits_of_operations_one_by_one(kinds: tuple[str, str, str], has_biases: bool) -> None:
    """Matrices of any kind and mix; experts of 40 rows, of which most begin within a block."""
    ops = native()
    # Down has groups of 32.
    experts = experts_of(ops, kinds, has_biases, size=SIZE if kinds[2] in ("float32", "bfloat16") else 96)
    for fields in ({}, {"is_normalised": False}, {"num_chosen": 1}, {"num_chosen": NUM_EXPERTS}):
        each = replace(experts, **fields)
        assert torch.equal(ops.experts(X, each), routed(ops, X, each))
        assert torch.equal(ops.experts(X[:1], each), routed(ops, X[:1], each))


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kinds", [("bfloat16",) * 3, ("Q4_K", "Q6_K", "Q8_0")], ids=["floats", "blocks"])
def test_a_row_of_experts_is_its_own(name: str, num_threads: int, kinds: tuple[str, str, str]) -> None:
    """Pieces of 1 to 33 rows, and rows in another order, have the bits of all at once by any build."""
    whole = native().experts(X, experts_of(native(), kinds, size=96))
    ops = native(name, num_threads)
    experts = experts_of(ops, kinds, size=96)
    pieces = [ops.experts(X[start:end], experts) for start, end in pairwise(CUTS)]
    assert torch.equal(torch.cat(pieces), whole)
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.experts(X[order], experts), whole[order])
    for row in (0, 17, 60):
        assert torch.equal(ops.experts(X[row : row + 1], experts), whole[row : row + 1])
    assert ops.experts(X[:0], experts).shape == (0, HIDDEN)


@pytest.mark.grid
@pytest.mark.parametrize("flags", [(), ("-march=x86-64-v3", "-DWITHOUT_FAST")], ids=["portable", "AVX2 alone"])
def test_processors_without_special_instructions_have_the_same_bits(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Kernels that are compiled without what this processor has beyond that."""
    if "native-v3" not in processor_levels() or shutil.which("gcc") is None:
        pytest.skip("needs gcc, and a processor with AVX2")
    sources = [str(path) for path in KERNELS.glob("*.c")]
    words = ["gcc", *FLAGS, *flags, "-shared", "-fPIC", *sources, "-o", str(tmp_path / "_native_v3.so"), "-lm"]
    subprocess.run(words, check=True)
    kernels = load_kernels("native-v3", folder=tmp_path)
    assert kernels is not None
    for kinds in (("bfloat16",) * 3, ("Q4_K", "Q6_K", "Q8_0"), ("IQ4_XS", "Q5_K", "MXFP4")):
        found = NativeOps(kernels, 2).experts(X, experts_of(native(), kinds, size=96))
        assert torch.equal(found, native().experts(X, experts_of(native(), kinds, size=96)))


def test_rows_of_the_reference_are_independent() -> None:
    """The same without compiled kernels, which agree up to float32's rounding."""
    reference, experts = ReferenceOps(), experts_of(native(), ("float32",) * 3)
    whole = reference.experts(X[:20], experts)
    assert torch.equal(torch.cat([reference.experts(row, experts) for row in X[:20].split(1)]), whole)
    found = native().experts(X[:20], experts)
    assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("make", [native, ReferenceOps], ids=["compiled", "torch"])
def test_equal_scores_choose_the_lowest_experts(make: Callable[[], Ops]) -> None:
    """A router of zeros gives each row the first experts, in equal shares."""
    ops = make()
    experts = replace(experts_of(native(), ("float32",) * 3), router=torch.zeros(NUM_EXPERTS, HIDDEN))
    first = replace(
        experts,
        router=torch.zeros(3, HIDDEN),
        gate=experts.gate[: 3 * SIZE],
        up=experts.up[: 3 * SIZE],
        down=experts.down[: 3 * HIDDEN],
        num_experts=3,
    )
    assert torch.equal(ops.experts(X[:5], experts), ops.experts(X[:5], first))


def test_rows_that_are_no_numbers_harm_no_others() -> None:
    """NaN and infinity stay in their rows, whatever experts they choose."""
    experts = experts_of(native(), ("Q8_0", "bfloat16", "bfloat16"))
    spoilt = X[:9].clone()
    spoilt[2], spoilt[5, 7], spoilt[6] = torch.nan, torch.inf, 1e38
    found, whole = native().experts(spoilt, experts), native().experts(X[:9], experts)
    sound = [0, 1, 3, 4, 7, 8]
    assert torch.equal(found[sound], whole[sound])
    assert not np.isfinite(found[2].numpy()).any()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_chosen": 8}, "8 experts are chosen of 7"),
        ({"down": torch.zeros(NUM_EXPERTS * HIDDEN - 1, SIZE)}, "down is"),
        ({"gate_up_bias": torch.zeros(NUM_EXPERTS, SIZE)}, "bias of gate and up is"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], fault: str) -> None:
    """Before C could misread it."""
    experts = replace(experts_of(native(), ("float32",) * 3), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=fault):
        native().experts(X, experts)
