"""A head's step in one call of the kernels, against the same step op by op: logits, states, keys, bit for bit."""

import numpy as np
import pytest
import torch
from support.heads.heads import random_head
from support.models.engine_cases import random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.heads.decoder import HeadDecoder
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.heads.fused import FusedHead, head_decoder
from outrider.engine.models.decoder import Decoder
from outrider.engine.ops.native import NativeOps
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session


@pytest.fixture(scope="module", params=["float32", "int8", "int4"])
def target(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ModelRunner:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")
    return ModelRunner.load(str(folder), dtype=request.param, kv_tokens=640)


def steps(target: ModelRunner, decoder: Decoder, state_size: int) -> list[Tensor]:
    """Logits of three sessions, and what is in the cache afterwards: texts in pieces, then two guesses each."""
    runner = ModelRunner(decoder, target.identity, 320, max_rows=20)
    runner.cache.keep_features(state_size + 1)
    runner.cache.features.normal_(generator=torch.Generator().manual_seed(3))
    runner.cache.features[:, -1] = 0
    sessions = [runner.open(random_ids(length, seed=length, vocab_size=300), length) for length in (1, 17, 40)]
    found = []
    for guess in (None, 5, 7):
        waiting: list[Session] = sessions
        for session in sessions:
            session.extend([] if guess is None else [guess])
        while waiting:
            result = runner.forward([Feed(session) for session in waiting])
            found.append(result.logits.clone())
            waiting = [session for session, rows in zip(waiting, result.ranges, strict=True) if rows is None]
    slots = torch.cat([torch.from_numpy(each.table.slots(0, len(each)).copy()) for each in sessions])
    return [*found, *(each[slots] for each in (runner.cache.features, runner.cache.keys[0], runner.cache.values[0]))]


@pytest.mark.parametrize("fuse", [Fuse.WIDE, Fuse.PAIR, Fuse.REVERSED])
@pytest.mark.parametrize("normed_residual", [False, True])
@pytest.mark.parametrize("feeds_normed", [False, True])
def test_bits_are_those_of_single_operations(
    target: ModelRunner, fuse: Fuse, normed_residual: bool, feeds_normed: bool
) -> None:
    """With every switch, biases and norms of heads among the tensors."""
    if not isinstance(target.ops, NativeOps):
        pytest.skip("no kernels are built here")
    head = random_head(target, fuse, normed_residual=normed_residual, feeds_normed=feeds_normed)
    fused = head_decoder(head, target.parts, target.ops)
    assert isinstance(fused, FusedHead)
    plain = HeadDecoder(head, target.parts, target.ops)
    pairs = zip(*(steps(target, each, head.facts.state_size) for each in (fused, plain)), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fuse", [Fuse.WIDE, Fuse.PAIR])
def test_states_are_those_of_single_operations(target: ModelRunner, fuse: Fuse) -> None:
    """Made of features in any slots, with a product or as they are."""
    if not isinstance(target.ops, NativeOps):
        pytest.skip("no kernels are built here")
    head = random_head(target, fuse)
    fused = head_decoder(head, target.parts, target.ops)
    assert isinstance(fused, FusedHead)
    random = torch.Generator().manual_seed(5)
    source = torch.randn(40, len(head.facts.taps) * target.parts.hidden_size, generator=random)
    own = torch.zeros(30, head.facts.state_size + 1)
    source_slots, slots = np.array([3, 0, 39, 7]), np.array([29, 4, 0, 11])
    assert fused.copy_states(source, source_slots, own, slots)
    expected = torch.zeros_like(own)
    expected[slots, :-1] = head.states_of(source[source_slots])
    assert torch.equal(own, expected)


def test_ids_out_of_order_are_refused(target: ModelRunner) -> None:
    """Of equal scores the lowest id goes first, which is found by its place."""
    if not isinstance(target.ops, NativeOps):
        pytest.skip("no kernels are built here")
    head = random_head(target)
    assert head.target_ids is not None
    head.target_ids = head.target_ids.flip(0)
    with pytest.raises(ValueError, match="target_ids do not rise"):
        head_decoder(head, target.parts, target.ops)
