"""Features that a target keeps: the residuals between its layers, bit for bit, wherever their tokens go."""

from pathlib import Path

import pytest
import torch
from support.models.engine_cases import TREE, finish, random_ids
from support.models.model_cases import reference
from support.models.tiny_models import FAMILIES, HF_FAMILIES, write_tiny_model
from support.rounding import reach
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.models.transformer import Transformer
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.errors import InvalidRequest, ModelRefused

TAPS = (0, 1, 2)


def load(folder: Path, max_rows: int = 512, taps: tuple[int, ...] = TAPS) -> ModelRunner:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=640)
    runner.max_rows = max_rows
    runner.tap(taps)
    return runner


def features(runner: ModelRunner, session: Session) -> Tensor:
    """Features of the cached tokens, [tokens, taps, H]."""
    slots = torch.from_numpy(session.table.slots(0, session.cached_len).copy())
    return runner.cache.features[slots].view(session.cached_len, len(runner.cache.taps), -1)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *HF_FAMILIES])
def test_features_are_the_hidden_states_of_transformers(tmp_path: Path, family: str) -> None:
    """What enters each layer, and what leaves the final norm."""
    folder = write_tiny_model(tmp_path / "model", family, seed=11)
    runner, token_ids = load(folder), random_ids(40, vocab_size=300)
    session = runner.open(token_ids, 40)
    finish(runner, Feed(session))
    model = reference(folder)

    @torch.no_grad()
    def expected() -> Tensor:
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.stack([states[boundary][0] for boundary in TAPS], 1)

    torch.testing.assert_close(features(runner, session), expected(), atol=reach(model.parameters(), expected), rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_bits_depend_on_nothing_but_the_tokens(tmp_path: Path, family: str) -> None:
    """Three rows at a time or all at once, in one call of the kernels or op by op."""
    folder, token_ids = write_tiny_model(tmp_path / "model", family), random_ids(40, vocab_size=300)
    found = []
    for max_rows, is_fused in ((512, True), (3, True), (512, False)):
        runner = load(folder, max_rows)
        if not is_fused and family != "gpt2":
            runner.model = runner.model._model  # type: ignore[attr-defined]
            assert isinstance(runner.model, Transformer)
        session = runner.open(token_ids, 40)
        finish(runner, Feed(session))
        found.append(features(runner, session))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_features_follow_their_tokens(tmp_path: Path) -> None:
    """Rows of a bushy tree that are kept, truncations, prefixes that others have read: a fresh session has the same."""
    runner = load(write_tiny_model(tmp_path / "model", "llama"))
    token_ids = random_ids(37, vocab_size=300)
    session = runner.open(token_ids, 37, b"salt")
    finish(runner, Feed(session, TREE))
    session.keep((2, 5, 6, 7))
    session.publish(len(session))
    session.truncate(39)
    session.extend([7, 9, 11])
    finish(runner, Feed(session))
    other = runner.open(session.token_ids, 42, b"salt")
    assert other.take_prefix() == 32
    finish(runner, Feed(other))
    fresh = runner.open(session.token_ids, 42)
    finish(runner, Feed(fresh))
    for each in (session, other):
        assert torch.equal(features(runner, each), features(runner, fresh))


def test_a_boundary_is_what_enters_its_layer(tmp_path: Path) -> None:
    """Of a model whose layer 1 alone does anything: nothing has changed at boundary 1, and all of it at 2."""
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=3)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=640)
    for number, layer in enumerate(runner.model._model.layers):  # type: ignore[attr-defined]
        if number != 1:
            layer.output.weight.zero_()
            layer.down.weight.zero_()
    runner.tap((0, 1, 2))
    session = runner.open(random_ids(9, vocab_size=300), 9)
    finish(runner, Feed(session))
    found = features(runner, session)
    assert torch.equal(found[:, 0], found[:, 1])
    assert not torch.isclose(found[:, 1], found[:, 2]).all(1).any()


def test_logits_are_those_of_a_target_without_taps(tmp_path: Path) -> None:
    """Bit for bit."""
    folder, token_ids = write_tiny_model(tmp_path / "model", "llama"), random_ids(40, vocab_size=300)
    plain = ModelRunner.load(str(folder), dtype="float32", kv_tokens=640)
    logits = [finish(each, Feed(each.open(token_ids, 40), TREE))[0] for each in (plain, load(folder))]
    assert torch.equal(*logits)


def test_the_last_token_can_be_left_out(tmp_path: Path) -> None:
    """A feed without it ends before it, and the next one computes the same logits as one whole feed."""
    runner = load(write_tiny_model(tmp_path / "model", "llama"))
    token_ids = random_ids(20, vocab_size=300)
    session, whole = runner.open(token_ids, 20), runner.open(token_ids, 20)
    [rows] = runner.forward([Feed(session, without_last=True)]).ranges
    assert rows is None
    assert session.cached_len == 19
    assert torch.equal(*(finish(runner, Feed(each))[0] for each in (session, whole)))


def test_boundaries_that_are_none_are_refused(tmp_path: Path) -> None:
    """And so is a simulated model, which has no state."""
    folder = write_tiny_model(tmp_path / "model", "llama")
    with pytest.raises(InvalidRequest, match=r"taps is 3, but must be in \[0, 2\]"):
        load(folder, taps=(1, 3))
    with pytest.raises(ModelRefused, match="no state that a head could read"):
        _ = ModelRunner.load("sim:h100-1b").parts
