"""How much of a device's memory a cache takes, and forwards for which there is none left."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.devices.pretend import pretend_device
from support.models.engine_cases import TREE, close, finish, random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from draft_service.server import DraftSettings
from outrider.engine.batching import Feed, RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.runner import MIN_PIECE_ROWS, Compute, ModelRunner, StepExtension
from outrider.errors import InvalidRequest
from target_service.server import TargetSettings

# Two layers of two groups of sixteen numbers in float32, as keys and as values.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
CONTEXT_LEN = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "llama", vocab_size=257, context_len=CONTEXT_LEN)


@pytest.mark.parametrize(("share", "num_blocks"), [(None, 56), (0.45, 28), (1.0, 62)])
def test_the_cache_takes_a_share_of_what_is_free(
    folder: Path, share: float | None, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the device has left beside the weights; in whole blocks of sixteen tokens."""
    with pretend_device(monkeypatch, free_bytes=1000 * TOKEN_BYTES):
        runner = ModelRunner.load(str(folder), device="cuda:0", dtype="float32", kv_memory_share=share)
    assert runner.pool.num_blocks == num_blocks


def test_a_share_without_room_for_a_context_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers, and with all that can be done about it; a shorter context has room."""
    with pretend_device(monkeypatch, free_bytes=400 * TOKEN_BYTES):
        with pytest.raises(InvalidRequest) as refused:
            ModelRunner.load(str(folder), device="cuda:0", dtype="float32", kv_memory_share=0.5)
        assert refused.value.message.startswith("kv_memory_share is 0.5, and of the 0.00 GiB that cuda:0 has free")
        assert "room for 192 tokens, but one context has 256" in refused.value.message
        assert refused.value.limit == ("at least 0.64 here",)
        loaded = ModelRunner.load(str(folder), device="cuda:0", dtype="float32", kv_memory_share=0.5, context_len=192)
    assert loaded.pool.num_blocks == 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_memory_share": 0.0}, "kv_memory_share is 0.0, but must be above 0 and at most 1"),
        ({"kv_memory_share": 1.5}, "kv_memory_share is 1.5, but must be above 0 and at most 1"),
        ({"kv_memory_share": float("nan")}, "kv_memory_share is nan, but must be above 0 and at most 1"),
        ({"kv_memory_share": 0.5}, "must be left out on the CPU, whose cache has kv_tokens"),
        ({"kv_memory_share": 0.5, "kv_tokens": 64}, "must be left out together with kv_tokens"),
    ],
)
def test_a_share_that_means_nothing_is_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    """Out of its range, on the CPU, and beside a number of tokens."""
    with pytest.raises(InvalidRequest, match=words):
        ModelRunner.load(str(folder), dtype="float32", **options)


def test_models_in_one_process_have_a_share_each(folder: Path) -> None:
    """A draft model, a head or a cascade beside a model on a device; what was given is for each of them."""
    place = {"model": str(folder), "device": "cuda:0"}
    shares = [
        TargetSettings(**place).memory_share,
        TargetSettings(**place, draft_model=str(folder)).memory_share,
        TargetSettings(**place, head=str(folder)).memory_share,
        DraftSettings(**place, cascade=str(folder)).memory_share,
        DraftSettings(**place, cascade="lookup").memory_share,
        TargetSettings(**place, head=str(folder), kv_memory_share=0.3).memory_share,
        TargetSettings(**place, head=str(folder), kv_tokens=64).memory_share,
        TargetSettings(str(folder), head=str(folder)).memory_share,
    ]
    assert shares == [None, 0.45, 0.45, 0.45, None, 0.3, None, None]
    with pytest.raises(InvalidRequest, match="--kv-memory-share"):
        TargetSettings(**place, kv_memory_share=1.5)


def test_prompts_are_read_in_smaller_pieces_where_memory_is_short(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same logits; later ones begin so, and a step whose rows cannot be fewer says that it found none."""
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024)
    prompt, forward, most_rows, sizes = runner.open(random_ids(200, 1, 257), 200), runner.model.forward, 60, []

    def forward_or_not(plan: RowPlan, *others: Any) -> Tensor:
        sizes.append(plan.num_rows)
        if plan.num_rows > most_rows:
            raise torch.OutOfMemoryError
        return forward(plan, *others)

    expected = finish(runner, Feed(prompt, TREE))
    prompt.free()
    monkeypatch.setattr(runner.model, "forward", forward_or_not)
    with capture_logs() as logs:
        assert torch.equal(finish(runner, Feed(prompt, TREE))[0], expected[0])
    assert sizes == [208, 104, 52, 52, 52, 52]
    assert [line["rows"] for line in logs] == [104, 52]
    assert {line["log_level"] for line in logs} == {"warning"}
    most_rows = MIN_PIECE_ROWS - 1
    other = runner.open(random_ids(40, 2, 257), 40)
    with capture_logs(), pytest.raises(torch.OutOfMemoryError):
        runner.forward([Feed(other)])
    most_rows = 8
    with pytest.raises(torch.OutOfMemoryError):
        runner.forward([Feed(prompt, TREE)])
    most_rows = 9
    assert torch.equal(finish(runner, Feed(prompt, TREE))[0], expected[0])
    close(runner, prompt, other)


def test_a_smaller_piece_is_computed_as_its_own_rows_are(folder: Path) -> None:
    """What an extension has said of the rows that found no memory is not believed of fewer."""

    class FirstPiece(StepExtension):
        def compute(self, feeds: Sequence[Feed], grants: Sequence[int]) -> Compute | None:
            return without_memory if grants[0] > 100 else None

    def without_memory(_plan: RowPlan, _cache: KVCache, _wanted: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024)
    prompt = runner.open(random_ids(200, 1, 257), 200)
    expected = finish(runner, Feed(prompt, TREE))[0]
    prompt.free()
    FirstPiece.in_forwards_of(runner)
    with capture_logs():
        assert torch.equal(finish(runner, Feed(prompt, TREE))[0], expected)
    close(runner, prompt)
