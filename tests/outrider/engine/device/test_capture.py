"""What of a step could be captured as a CUDA graph: all but what this list names, which may only become shorter."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support.devices.pairs import load
from support.devices.recorder import Recorder, record
from support.models.engine_cases import finish, random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.batching import Batch, Feed, build_batch
from outrider.engine.models.transformer import Transformer
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ModelRunner
from outrider.token_tree import EMPTY, TokenTree

# The places whose calls depend on the lengths of the texts, and so on more than the number of rows.
FROZEN = {
    # The longest list, a number of the host's, is the width of every row's temporaries, and how many pieces there are.
    "eager.py:EagerOps.attention",
}
WINDOWED = {
    *FROZEN,
    # Whether anything is cut depends on the longest list.
    "batching.py:RowPlan.windowed",
}
CHAIN = TokenTree.chain((7, 8, 9))


def batch_of(runner: ModelRunner, lengths: Sequence[int], seed: int = 0, tree: TokenTree = EMPTY) -> Batch:
    """The next step of sessions of these lengths, whose other tokens are cached."""
    sessions = [runner.open(random_ids(length, seed + place, 257), 1) for place, length in enumerate(lengths)]
    finish(runner, *map(Feed, sessions))
    feeds = [Feed(session, tree) for session in sessions]
    for feed in feeds:
        feed.session.reserve(feed.num_proposed, feed.start)
    return build_batch(feeds, [feed.num_rows for feed in feeds], runner.device)


def fill(batch: Batch, other: Batch) -> None:
    """Writes another batch of the same shapes where this one lies, as a graph's inputs are written."""
    for field in fields(batch.plan):
        mine, theirs = getattr(batch.plan, field.name), getattr(other.plan, field.name)
        if isinstance(mine, Tensor):
            mine.copy_(theirs)
    batch.wanted.copy_(other.wanted)


def recorded(runner: ModelRunner, batch: Batch) -> tuple[Recorder, Tensor]:
    return record(lambda: runner.model.forward(batch.plan, runner.cache, batch.wanted))


@pytest.fixture(params=["qwen2", "qwen3", "mistral"])
def runner(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    special = {"sliding_window": 32} if request.param == "mistral" else {}
    loaded = load(write_tiny_model(tmp_path / "model", request.param, vocab_size=257, **special), monkeypatch)
    loaded.tap((1, loaded.config.num_layers))
    return loaded


def test_a_recorded_step_serves_other_texts_of_its_lengths(runner: ModelRunner) -> None:
    """Tokens, slots and lists come through memory: the replay's logits, keys and features are a forward's, bitwise."""
    batch, other = batch_of(runner, (20, 31, 9)), batch_of(runner, (31, 9, 20), seed=50)
    recorder, logits = recorded(runner, batch)
    expected = runner.model.forward(other.plan, runner.cache, other.wanted)
    stored = [tensor.clone() for tensor in (*runner.cache.keys, *runner.cache.values, runner.cache.features)]
    for tensor in (*runner.cache.keys, *runner.cache.values, runner.cache.features):
        tensor.index_fill_(0, other.plan.slots, 7)
    fill(batch, other)
    recorder.replay()
    assert torch.equal(logits, expected)
    found = (*runner.cache.keys, *runner.cache.values, runner.cache.features)
    assert all(
        torch.equal(one[other.plan.slots], two[other.plan.slots]) for one, two in zip(found, stored, strict=True)
    )


def test_a_longer_text_shows_what_is_frozen(runner: ModelRunner) -> None:
    """As many slots in all, and a longer list among them: the replay cuts it off."""
    batch, other = batch_of(runner, (20, 20)), batch_of(runner, (9, 31), seed=50)
    recorder, logits = recorded(runner, batch)
    expected = runner.model.forward(other.plan, runner.cache, other.wanted)
    fill(batch, other)
    recorder.replay()
    assert not torch.allclose(logits[1], expected[1], atol=1e-3)


def test_a_replaced_tensor_shows_too(runner: ModelRunner) -> None:
    """A recording goes on writing the features that the cache had."""
    batch = batch_of(runner, (20, 31))
    recorder, _ = recorded(runner, batch)
    runner.cache.keep_features(runner.cache.features.shape[1], runner.cache.taps)
    runner.cache.features.fill_(torch.nan)
    recorder.replay()
    assert bool(runner.cache.features.isnan().all())


@pytest.mark.parametrize("tree", [EMPTY, CHAIN], ids=["steps", "chains"])
def test_what_stands_in_the_way_of_capture_becomes_less(runner: ModelRunner, tree: TokenTree) -> None:
    """The same number of rows at other lengths: calls differ in the listed places alone, and none waits."""
    short, long = (recorded(runner, batch_of(runner, lengths, tree=tree))[0] for lengths in ((20, 22), (60, 45)))
    assert short.waits == long.waits == []
    model = runner.model
    assert isinstance(model, Transformer)
    assert short.frozen(long) == (WINDOWED if model.config.windows[0] else FROZEN)


def test_a_wait_in_a_step_is_named(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a norm that the host skips where all is nought, which would end a capture."""
    norm = EagerOps.rms_norm
    monkeypatch.setattr(EagerOps, "rms_norm", lambda ops, x, *others: norm(ops, x, *others) if x.any() else x)
    recorder, _ = recorded(runner, batch_of(runner, (20, 22)))
    assert {wait.partition(": ")[0] for wait in recorder.waits} >= {"transformer.py:Transformer.forward_layers"}
