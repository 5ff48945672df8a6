"""Places that 32 bits do not count, as caches and logits have them on a card with much memory.

The memory here is asked for and hardly touched. A place that was counted in 32 bits lies in front of the tensor, where
there is memory that holds nothing.
"""

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.devices.kernels import CPU, KernelOps, altered, assert_same
from support.models import engine_cases
from torch import Tensor

from outrider.engine.batching import CHUNK, build_batch
from outrider.engine.ops import triton_ops
from outrider.engine.ops.triton import attention, choose, rows

pytestmark = pytest.mark.early

FAR = 1 << 31
MAP_NORESERVE = 0x4000  # of Linux, which Python does not name
HEADS, GROUPS, HEAD_DIM, NUM_SLOTS, NUM_TOKENS = 4, 2, 128, 400 * 16, 200
# Slots from this one on have places that are no numbers of 32 bits.
FIRST = FAR // (GROUPS * HEAD_DIM)


def memory(numbers: int, dtype: torch.dtype) -> Tensor:
    """So many zeros, with FAR others in front of them; only what is written to takes memory."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, (FAR + numbers) * dtype.itemsize, kind), dtype=dtype)[FAR:]


def caches() -> Sequence[Tensor]:
    """Keys and values with NUM_SLOTS slots after the first FIRST."""
    numbers = (FIRST + NUM_SLOTS) * GROUPS * HEAD_DIM
    return [memory(numbers, torch.float16).view(-1, GROUPS, HEAD_DIM) for _ in range(2)]


def check_attention() -> None:
    """Of far slots it has the bits of near ones, by chunks of its own and by shared ones."""
    generator, ops = torch.Generator().manual_seed(1), KernelOps()
    feeds = engine_cases.make_feeds((1, 0, 0), (CHUNK + 3, CHUNK, 0), tree=engine_cases.TREE)[1:]
    grants = [feed.num_rows for feed in feeds]
    query = torch.randn(sum(grants), HEADS, HEAD_DIM, generator=generator)
    near = [torch.randn(NUM_SLOTS, GROUPS, HEAD_DIM, generator=generator).half() for _ in range(2)]
    far = caches()
    for each, written in zip(far, near, strict=True):
        each[FIRST:] = written
    for tiles in ((), (8,)):
        plan = build_batch(feeds, grants, CPU, tiles).plan
        expected = ops.attention(query.clone(), plan, *near, HEAD_DIM**-0.5)
        # A view of the work, where there is some.
        plan.key_slots.add_(FIRST)
        assert_same(ops.attention(query.clone(), plan, *far, HEAD_DIM**-0.5), expected)


def check_stores() -> None:
    """Keys and values of rows are written to far slots, and nowhere else."""
    case, far = engine_cases.attention_case(3, HEADS, GROUPS, HEAD_DIM), caches()
    near = [torch.zeros(len(each), GROUPS, HEAD_DIM, dtype=torch.float16) for each in (case.key_cache,) * 2]
    tensors = case.query, case.key, case.value, case.plan, case.cos, case.sin
    expected = KernelOps().rotate_and_store(*tensors, *near)
    slots = case.plan.slots.clone()
    case.plan.slots.add_(FIRST)
    assert_same(KernelOps().rotate_and_store(*tensors, *far), expected)
    for each, written in zip(far, near, strict=True):
        assert_same(each[FIRST + slots], written[slots])
        assert int(each[FIRST:].count_nonzero()) == int(written.count_nonzero())


def check_choices() -> None:
    """Rows of logits that lie far apart have the choices of rows that do not."""
    generator = torch.Generator().manual_seed(2)
    near = 20 * torch.randn(3, NUM_TOKENS, generator=generator)
    far = memory(FAR + NUM_TOKENS, torch.float32).as_strided((3, NUM_TOKENS), (FAR // 2, 1))
    far.copy_(near)
    rest = torch.tensor([0.0, 1.0, 0.7], dtype=torch.float64), torch.arange(3), NUM_TOKENS
    assert_same(KernelOps().choose(far, *rest), KernelOps().choose(near, *rest))


CHECKS = {"attention": check_attention, "stores": check_stores, "choices": check_choices}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_far_places_are_as_good_as_near_ones(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    [
        (attention, "mask=is_column, other=0).to(tl.int64)", "mask=is_column, other=0)", check_attention),
        (rows, "(tl.load(slots + row) * num_groups", "(tl.load(slots + row).to(tl.int32) * num_groups", check_stores),
        (choose, "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", check_choices),
    ],
    ids=CHECKS,
)
def test_places_of_32_bits_are_found(
    module: object,
    old: str,
    new: str,
    check: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each planted by taking a kernel's longer numbers away."""
    name = module.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    monkeypatch.setattr(triton_ops, name, altered(module, old, new, tmp_path))  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        check()
