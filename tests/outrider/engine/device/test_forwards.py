"""Forwards on a device: no host tensor comes among its own, and the host waits for nothing."""

from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from support.devices.pairs import load
from support.devices.pretend import HOST, pretend_device
from support.devices.story import tapped, tell
from support.models.tiny_models import FAMILIES, write_tiny_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from outrider.engine import batching, cache
from outrider.engine.batching import RowPlan
from outrider.engine.models import transformer
from outrider.engine.models.rope import Rope
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ModelRunner

# Which experts have rows is known to the device alone.
WAITS = {family: {"synchronize", "cpu"} for family in ("qwen3_moe", "gpt_oss")}
# Some of torch's operations sum in another order for a matrix of another layout.
NEAR = {"rtol": 1e-4, "atol": 1e-4}
ATTENTION, NORM, TABLES = EagerOps.attention, EagerOps.rms_norm, transformer.rotary_tables


def are_near(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether the numbers agree; logits of padding may be -inf."""
    pairs = zip(found, expected, strict=True)
    return all(one.shape == other.shape and torch.allclose(one.cpu(), other, **NEAR) for one, other in pairs)


def check_forwards(folder: Path, patch: pytest.MonkeyPatch, waits: Set[str] = frozenset({"synchronize"})) -> None:
    """The whole story on the device has the CPU's numbers, and the host waits with nothing else."""
    with patch.context() as own:
        expected = tell(tapped(load(folder, own)))
        with pretend_device(own) as device:
            runner = tapped(load(folder, own, "cuda:0"))
            device.waits.clear()
            found = tell(runner)
            assert set(device.waits) <= waits
            assert are_near(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_stays_on_its_device(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, chains, prompts, biases, norms of heads, windows, taps, forks; it waits after pieces, and for experts."""
    special = {"sliding_window": 19} if family == "mistral" else {}
    folder = write_tiny_model(tmp_path / "model", family, vocab_size=257, num_hidden_layers=3, **special)
    check_forwards(folder, monkeypatch, WAITS.get(family, {"synchronize"}))


def kept_here(values: NDArray[Any], _: torch.device) -> Tensor:
    """Takes the place of what sends to a device, and forgets the device."""
    return torch.from_numpy(values)


def tables_here(rope: Rope, head_dim: int, count: int, _: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary tables that are made on the host."""
    return TABLES(rope, head_dim, count, HOST)


def counting(ops: EagerOps, query: Tensor, plan: RowPlan, *others: Any) -> Tensor:
    """Attention that asks the device for the longest list, which the host knows."""
    return ATTENTION(ops, query, replace(plan, max_key_count=int(plan.key_counts.max())), *others)


def cleaned(ops: EagerOps, x: Tensor, *others: Any) -> Tensor:
    """A norm that writes where a mask says, whose size the device alone knows."""
    x = x.clone()
    x[x.isnan()] = 0.0
    return NORM(ops, x, *others)


@pytest.mark.parametrize(
    ("place", "name", "planted"),
    [
        (batching, "send", kept_here),
        (cache, "send", kept_here),
        (transformer, "rotary_tables", tables_here),
    ],
    ids=["the plan", "slots that are copied", "rotary tables"],
)
def test_a_host_tensor_in_a_forward_is_found(
    tmp_path: Path, place: object, name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in a whole forward: one of what a device has to be given stays with the host."""
    folder = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=257)
    monkeypatch.setattr(place, name, planted)
    with pytest.raises(RuntimeError, match="on cuda:0 and on the CPU"):
        check_forwards(folder, monkeypatch)


@pytest.mark.parametrize(
    ("place", "name", "planted", "wait"),
    [
        (batching, "send", lambda values, device: torch.from_numpy(values).to(device), "to"),
        (EagerOps, "attention", counting, "int"),
        (EagerOps, "rms_norm", cleaned, "setitem"),
    ],
    ids=["a copy", "a number", "a mask"],
)
def test_a_wait_in_a_forward_is_found(
    tmp_path: Path, place: object, name: str, planted: object, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in a whole forward: each changes no number."""
    folder = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=257)
    monkeypatch.setattr(place, name, planted)
    check_forwards(folder, monkeypatch, {"synchronize", wait})
    with pytest.raises(AssertionError):
        check_forwards(folder, monkeypatch)


@pytest.mark.parametrize("family", ["gpt2", "olmo2"])
def test_code_of_transformers_stays_on_its_device(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention and its products are ours."""
    folder = write_tiny_model(tmp_path / "model", family, vocab_size=257)
    expected = tell(tapped(ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)))
    with monkeypatch.context() as patch, pretend_device(patch) as device:
        runner = tapped(load(folder, patch, "cuda:0"))
        device.waits.clear()
        found = tell(runner)
        assert set(device.waits) <= {"synchronize"}
        assert are_near(found, expected)


def test_a_forward_in_bfloat16_stays_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and cache have the type of the weights there."""
    folder = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=257)
    with pretend_device(monkeypatch) as device:
        runner = load(folder, monkeypatch, "cuda:0", dtype="bfloat16")
        assert runner.cache.keys[0].dtype is torch.bfloat16
        device.waits.clear()
        assert all(bool(logits.isfinite().all()) for logits in tell(runner)[:4])


@pytest.mark.parametrize(
    "mix",
    [
        lambda own, other: own + other,
        lambda own, other: own.index_select(0, other.long()),
        lambda own, other: torch.cat((own, other)),
        lambda own, other: own.gather(0, other.long()),
        lambda own, other: own.scatter(0, other.long(), own),
        lambda own, other: own.index_copy(0, other.long(), own),
        lambda own, other: torch.where(own > 0, own, other),
        torch.searchsorted,
        lambda own, other: own @ other,
    ],
)
def test_the_device_that_is_not_there_refuses_what_torch_says_that_one_does(
    mix: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own fake tensors say it too, for all of its operations that they can run without CUDA."""
    with FakeTensorMode(), pytest.raises(RuntimeError):
        mix(torch.empty(3, device="cuda:0"), torch.empty(3))
    with pretend_device(monkeypatch):
        own, other = torch.arange(3.0, device="cuda:0"), torch.arange(3.0)
        assert (own.device.type, own.is_cpu, other.is_cpu) == ("cuda", False, True)
        with pytest.raises(RuntimeError, match="on cuda:0 and on the CPU"):
            mix(own, other)
        mix(own, other.to("cuda:0"))


@pytest.mark.parametrize(
    ("ask", "wait"),
    [
        (lambda own: own.cpu(), "cpu"),
        (lambda own: own.tolist(), "tolist"),
        (lambda own: own[0].item(), "item"),
        (lambda own: bool(own[0]), "bool"),
        (lambda own: int(own[0]), "int"),
        (lambda own: own.nonzero(), "nonzero"),
        (lambda own: own[own > 0], "getitem"),
        (lambda own: own[[0, 1]], "getitem"),
        (lambda _: torch.tensor([1], device="cuda:0"), "tensor"),
        (lambda own: torch.ones(2).to(own.device), "to"),
        (lambda own: own.to("cpu"), "cpu"),
        (lambda own: own.masked_select(own > 0), "masked_select"),
    ],
)
def test_the_device_that_is_not_there_counts_what_is_waited_with(
    ask: Callable[[Tensor], object], wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these makes the host wait for all that the device has been given."""
    with pretend_device(monkeypatch) as device:
        own = torch.arange(3.0, device="cuda:0")
        ask(own + 1)
        assert device.waits == [wait]
        torch.ones(2).to("cuda:0", non_blocking=True)
        assert device.waits == [wait]
