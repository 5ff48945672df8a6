"""What lies in slots that no row sees changes no bit and leaks nowhere: on a device they hold whatever was there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.basics import spec_of
from support.devices.story import tapped, tell
from support.heads.heads import random_head
from support.models.engine_cases import every_ops
from support.models.tiny_models import write_tiny_model
from support.services.stepped_target import PROMPT, OwnTarget
from torch import Tensor

from outrider.drafters.hosted import host_head
from outrider.engine import runner as runner_module
from outrider.engine.batching import RowPlan
from outrider.engine.cache import BLOCK_SIZE, KVCache
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.ops import Ops
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.engine.session import Session

ALL_OPS = pytest.mark.parametrize("ops", [EagerOps(), *every_ops()], ids=lambda ops: ops.name)
FAMILIES = {"qwen3": {}, "mistral": {"sliding_window": 19}}


def load(folder: Path, ops: Ops, patch: pytest.MonkeyPatch) -> ModelRunner:
    patch.setattr(runner_module, "choose_ops", lambda *_, **__: ops)
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024)


def fill(cache: KVCache, number: float, slots: Tensor | slice = slice(None)) -> None:
    """Writes a number into slots, all by default: keys, values and features."""
    for tensor in (*cache.keys, *cache.values, cache.features):
        tensor[slots] = number


def watch(runner: ModelRunner, number: float, patch: pytest.MonkeyPatch) -> None:
    """Before each forward every slot gets the number that no session has computed, and none finds among prefixes."""
    sessions: list[Session] = []
    forward, open_, fork = runner.forward, runner.open, Session.fork

    def known(session: Session) -> Session:
        sessions.append(session)
        return session

    def watched(feeds: Sequence[object], *args: object) -> ForwardResult:
        is_free = torch.ones(runner.cache.features.shape[0], dtype=torch.bool)
        for session in sessions:
            length = min(session.cached_len + len(session.tree), session.table.capacity)
            is_free[session.table.slots(0, length)] = False
        for block in range(runner.pool.num_blocks):
            if block in runner.pool.prefixes:
                is_free[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = False
        fill(runner.cache, number, is_free)
        result: ForwardResult = forward(feeds, *args)  # type: ignore[arg-type]
        return result

    patch.setattr(runner, "open", lambda *args: known(open_(*args)))
    patch.setattr(runner, "forward", watched)
    patch.setattr(Session, "fork", lambda own, *args: known(fork(own, *args)))


@ALL_OPS
@pytest.mark.parametrize("family", FAMILIES)
def test_unused_slots_change_no_bit(tmp_path: Path, family: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN for nought, in blocks never used, cut-off tails, forks, windows, trees and features."""
    folder = write_tiny_model(tmp_path / "model", family, vocab_size=257, num_hidden_layers=3, **FAMILIES[family])
    found = []
    for number in (0.0, torch.nan, torch.inf):
        with monkeypatch.context() as patch:
            runner = tapped(load(folder, ops, patch))
            watch(runner, number, patch)
            found.append(tell(runner))
    assert all(bool(each.isfinite().all()) for each in found[0])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True))


@ALL_OPS
@pytest.mark.parametrize("fuse", [Fuse.WIDE, Fuse.PAIR, Fuse.REVERSED])
def test_unused_states_of_a_head_change_no_guess(
    tmp_path: Path, fuse: Fuse, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache holds states beside keys, of which a text's first token has none."""
    folder = write_tiny_model(tmp_path / "model", "llama", vocab_size=257, num_hidden_layers=3)
    spec = spec_of(PROMPT, 40, seed=3, eos=(), temperature=1.0)
    told: list[list[object]] = []
    for number in (0.0, torch.nan):
        runner = load(folder, ops, monkeypatch)
        hosting = host_head(runner, random_head(runner, fuse), "")
        own = OwnTarget(runner, hosting)
        fill(runner.cache, number)
        fill(hosting.runner.cache, number)
        told.append([(each.content.token_ids, each.content.hosted.tree) for each in own.to_the_end(spec, 4)])
        own.table.clear()
    assert told[0] == told[1]
    assert any(tree for _, tree in told[0])


def unmasked(ops: EagerOps) -> Callable[..., Tensor]:
    """Attention that multiplies what it does not see with nought."""

    def attention(query: Tensor, plan: RowPlan, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
        clean = EagerOps.attention(ops, query, plan, keys, values, *others)
        return clean + (0 * values.float()).sum()

    return attention


def test_a_leak_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unused number times nought is enough."""
    ops = EagerOps()
    monkeypatch.setattr(ops, "attention", unmasked(ops))
    folder = write_tiny_model(tmp_path / "model", "llama", vocab_size=257)
    runner = tapped(load(folder, ops, monkeypatch))
    watch(runner, torch.nan, monkeypatch)
    assert any(bool(each.isnan().any()) for each in tell(runner))
