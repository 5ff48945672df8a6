"""The compiled kernels' own business: arguments, threads, processes, and the choice among builds."""

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.engine_cases import BUILT, attention_case, native
from torch import Tensor

from outrider.engine.ops import KERNELS, choose_ops, library, triton_missing
from outrider.engine.ops.native import NativeOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.errors import InvalidRequest
from outrider.model_files.gguf.types import KINDS


def product_inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Large enough to be shared between threads."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 512, generator=generator), torch.randn(700, 512, generator=generator).bfloat16()


def test_the_cpu_gets_the_fastest_build() -> None:
    """choose_ops takes the first build that the processor can run, and its name is the kernel set's."""
    ops = choose_ops(torch.device("cpu"), 2)
    assert isinstance(ops, NativeOps if BUILT else ReferenceOps)
    assert ops.name == (BUILT or ["reference"])[0]
    assert choose_ops(torch.device("cuda"), 2).name == "eager"


@pytest.mark.parametrize(
    ("device", "kernels", "words"),
    [
        ("cpu", "fast", "kernels is 'fast', but must be one of auto, eager, triton, graphs"),
        ("cpu", "graphs", "kernels is 'graphs', but must be \"auto\" on the CPU"),
        ("cpu", "eager", "kernels is 'eager', but must be \"auto\" on the CPU"),
        ("cuda:0", "triton", 'kernels is \'triton\', but must be "auto" or "eager" here: It sees no CUDA device'),
    ],
)
def test_kernels_that_are_not_to_be_had_are_refused(device: str, kernels: str, words: str) -> None:
    """With what may be asked for there, and why."""
    if device != "cpu" and torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(InvalidRequest) as refused:
        choose_ops(torch.device(device), 2, kernels=kernels)
    assert refused.value.message.startswith(words)


@pytest.mark.parametrize(
    ("capability", "hip", "words"),
    [
        ((7, 5), None, r"our kernels need compute capability 8\.0, and cuda:0 has 7\.5"),
        ((9, 4), "6.4.43484", "Triton's kernels are for CUDA, and this torch is built for ROCm"),
    ],
    ids=["an old card", "ROCm"],
)
def test_where_our_kernels_do_not_run_plain_torch_computes(
    capability: tuple[int, int], hip: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, and on request; who asks for ours is told why not. A torch for ROCm calls its cards cuda too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    card = torch.device("cuda:0")
    assert [choose_ops(card, 2, kernels=kernels).name for kernels in ("auto", "eager")] == ["eager"] * 2
    for kernels in ("triton", "graphs"):
        with pytest.raises(InvalidRequest, match=f'"auto" or "eager" here: {words}'):
            choose_ops(card, 2, kernels=kernels)


def test_a_new_card_has_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs, or launched one by one on request."""
    if triton_missing() is not None:
        pytest.skip(str(triton_missing()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    chosen = {kernels: choose_ops(torch.device("cuda:0"), 2, kernels=kernels) for kernels in KERNELS}
    assert ["triton" in ops.name for ops in chosen.values()] == [True, False, True, True]
    assert [getattr(ops, "has_graphs", False) for ops in chosen.values()] == [True, False, False, True]


def test_without_kernels_the_reference_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A processor below every build, or one that says nothing about itself, gets the torch operations."""
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "CPU_INFO", tmp_path / "cpuinfo")
    assert isinstance(choose_ops(torch.device("cpu"), 2), ReferenceOps)
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu sse sse2 avx2\n")
    assert isinstance(choose_ops(torch.device("cpu"), 2), ReferenceOps)


@pytest.mark.skipif(not BUILT, reason="no kernels are built")
def test_kernels_that_take_blocks_for_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another version, by the facts of the first type that differs and of all there are."""
    changed = KINDS | {"Q4_K": replace(KINDS["Q4_K"], block_bytes=145)}
    monkeypatch.setattr(library, "KINDS", changed)
    with pytest.raises(
        RuntimeError, match=r"describes Q4_K as \[256, 144, .* the engine has 13 and \[256, 145, .*build"
    ):
        library.load_kernels()
    monkeypatch.setattr(library, "KINDS", dict(list(KINDS.items())[:-1]))
    with pytest.raises(RuntimeError, match=r"has 13 types .* the engine has 12"):
        library.load_kernels()


@pytest.mark.parametrize("num_threads", [0, -1, 257])
def test_thread_counts_are_checked(num_threads: int) -> None:
    """1 to 256 threads, and nothing else."""
    with pytest.raises(ValueError, match="num_threads"):
        native(num_threads=num_threads)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.zeros(2, 8), torch.zeros(3, 9), None),
        (torch.zeros(2, 8).double(), torch.zeros(3, 8), None),
        (torch.zeros(2, 8), torch.zeros(3, 8).half(), None),
        (torch.zeros(8, 2).T, torch.zeros(3, 8), None),
        (torch.zeros(2, 8), torch.zeros(8, 3).T, None),
        (torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(2)),
        (torch.zeros(2, 0), torch.zeros(3, 0), None),
        (torch.zeros(8), torch.zeros(3, 8), None),
    ],
)
def test_products_that_do_not_fit_are_refused(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """C never sees a shape, a type or a layout that it would misread."""
    with pytest.raises(ValueError, match="must"):
        native().linear(x, weight, bias)


def test_other_operations_check_too() -> None:
    """Norms, gates, scores, keys and caches of the wrong size or type are refused."""
    ops, case = native(), attention_case(3, 4, 2, 32)
    with pytest.raises(ValueError, match="weight"):
        ops.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match="even"):
        ops.gate_multiply(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="even"):
        ops.gate_multiply(torch.zeros(2, 7), is_gelu=True)
    with pytest.raises(ValueError, match="even"):
        ops.clamped_multiply(torch.zeros(2, 7), 1.0, 1.0)
    with pytest.raises(ValueError, match="scores"):
        ops.softmax(torch.zeros(2, 7).double())
    with pytest.raises(ValueError, match="keys"):
        ops.draw(torch.zeros(2, 7), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="value_cache"):
        ops.attention(case.query.contiguous(), case.plan, case.key_cache, case.value_cache[:, :1], 1.0)
    with pytest.raises(ValueError, match="groups"):
        ops.attention(case.query[:, :3].contiguous(), case.plan, case.key_cache, case.value_cache, 1.0)
    caches = case.key_cache, case.value_cache
    for sinks in (torch.zeros(3), torch.zeros(4).double()):
        with pytest.raises(ValueError, match="sinks"):
            ops.attention(case.query.contiguous(), case.plan, *caches, 1.0, sinks)
    tables = case.cos[:, :3], case.sin
    with pytest.raises(ValueError, match="cos"):
        ops.rotate_and_store(case.query, case.key, case.value, case.plan, *tables, case.key_cache, case.value_cache)


def test_no_rows_are_no_work() -> None:
    """Zero rows give an empty result."""
    ops = native()
    assert ops.linear(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (0, 3)
    assert ops.draw(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_unaligned_tensors_are_read_as_they_lie() -> None:
    """Views that begin at odd addresses, as in a mapped checkpoint, give the bits of an aligned copy."""
    x, weight = product_inputs()
    shifted = torch.cat((torch.zeros(1).bfloat16(), weight.flatten()))[1:].view(weight.shape)
    moved = torch.cat((torch.zeros(3), x.flatten()))[3:].view(x.shape)
    assert torch.equal(native().linear(moved, shifted), native().linear(x, weight))


def test_objects_work_side_by_side() -> None:
    """Four Python threads on two objects, of which two share one, all get their own results."""
    shared, own = native(num_threads=2), native(num_threads=3)
    start = threading.Barrier(4)

    def work(index: int) -> bool:
        x, weight = product_inputs(index)
        expected = native(num_threads=1).linear(x, weight)
        ops = shared if index % 2 else own
        start.wait()
        return all(torch.equal(ops.linear(x, weight), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_threads_wake_up_after_sleeping() -> None:
    """Workers that never spin sleep between any two calls, and no call is lost or waits for ever."""
    expected = native(num_threads=1).linear(*product_inputs())
    kernels = library.load_kernels()
    assert kernels is not None
    ops, (x, weight) = NativeOps(kernels, 4, spin_us=0), product_inputs()
    assert all(torch.equal(ops.linear(x, weight), expected) for _ in range(300))


def thread_count() -> int:
    """Threads of this process as the system counts them."""
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted through /proc")
def test_threads_end_with_their_object() -> None:
    """Objects that are gone leave no thread."""
    before = thread_count()
    ops = native(num_threads=5)
    assert thread_count() == before + 4
    del ops
    assert thread_count() == before


def in_a_child(ops: NativeOps, x: Tensor, weight: Tensor, expected: Tensor) -> None:
    """Exit code 0 if the kernels still give the same bits."""
    raise SystemExit(0 if torch.equal(ops.linear(x, weight), expected) else 1)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_computes_alone() -> None:
    """After a fork the workers are gone; the caller does their share and nothing hangs."""
    ops, (x, weight) = native(num_threads=2), product_inputs()
    expected = ops.linear(x, weight)
    child = multiprocessing.get_context("fork").Process(target=in_a_child, args=(ops, x, weight, expected))
    child.start()
    child.join(30)
    assert child.exitcode == 0
