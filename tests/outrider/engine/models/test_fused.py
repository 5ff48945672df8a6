"""The forward in one call: bit for bit the forward op by op, for every family, build, thread count and kind of rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.engine_cases import BUILT, kv_state, native
from support.models.model_cases import GEMMA_ROPES, PARTIAL, SCALINGS, SPARSE_STEP, THETA, WINDOWS
from support.models.tiny_models import TARGET, write_tiny_model

from outrider.engine.batching import Feed, build_batch
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.fused import FusedTransformer
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import load_tensors
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ModelIdentity, ModelRunner
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

TREE = TokenTree(token_ids=(11, 22, 33, 44, 55, 66, 77, 88), parents=(0, 0, 1, 1, 2, 5, 6, 3))
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", BIASED),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("mistral", {}),
    *WINDOWS.values(),
    ("gpt_oss", {}),
    ("gemma3", {}),
    ("gemma3", GEMMA_ROPES),
    ("phi3", PARTIAL),
    ("qwen3_moe", {}),
    ("qwen3_moe", SPARSE_STEP),
    ("llama", {"rope_parameters": {"rope_theta": THETA, **SCALINGS["yarn-attention-factor"]}}),
]


def runner_of(folder: Path, dtype: torch.dtype, name: str = "", num_threads: int = 2) -> ModelRunner:
    """A runner with compiled operations; it computes in one call."""
    config = ModelConfig.read(folder)
    tensors = load_tensors(folder, config, torch.device("cpu"), dtype)[0]
    model = Transformer(config, tensors, native(name, num_threads))
    return ModelRunner(model, ModelIdentity("tiny", "0", "any", num_threads, config.vocab_size), 1024, max_rows=40)


def op_by_op(folder: Path, dtype: torch.dtype) -> ModelRunner:
    """A runner of the same model that calls one operation after the other."""
    runner = runner_of(folder, dtype)
    config = runner.config
    runner.model = Transformer(config, load_tensors(folder, config, torch.device("cpu"), dtype)[0], native())
    return runner


class Twins:
    """Two runners that are fed alike and must agree in every bit of logits and caches."""

    def __init__(self, fused: ModelRunner, plain: ModelRunner) -> None:
        assert isinstance(fused.model, FusedTransformer)
        assert isinstance(plain.model, Transformer)
        self.runners = (fused, plain)
        self.sessions: list[tuple[Session, Session]] = []

    def open(self, token_ids: Sequence[int]) -> None:
        """A session in both."""
        first, second = (runner.open(token_ids, 1) for runner in self.runners)
        self.sessions.append((first, second))

    def step(self, trees: Sequence[TokenTree]) -> None:
        """One forward of all sessions."""
        fused, plain = (
            runner.forward([Feed(pair[side], tree) for pair, tree in zip(self.sessions, trees, strict=True)])
            for side, runner in enumerate(self.runners)
        )
        assert fused.ranges == plain.ranges
        assert torch.equal(fused.logits, plain.logits)
        for pair in self.sessions:
            states = [kv_state(runner, session) for runner, session in zip(self.runners, pair, strict=True)]
            assert all(torch.equal(*tensors) for tensors in zip(*states, strict=True))

    def commit(self, number: int, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Keeps rows of the last tree of a session, and extends it."""
        for session in self.sessions[number]:
            session.keep(rows)
            session.extend(token_ids)


def compare(fused: ModelRunner, plain: ModelRunner) -> None:
    """Chunks of prompts, single steps, chains of 5 and 17 rows, trees, alone and beside others."""
    twins = Twins(fused, plain)
    twins.open([token_id % 300 for token_id in range(3, 60)])
    twins.step([EMPTY])
    assert twins.sessions[0][0].cached_len == 40
    twins.step([EMPTY])
    for tree in (EMPTY, TokenTree.chain(range(1, 5)), TokenTree.chain(range(1, 17)), TREE):
        twins.step([tree])
    twins.commit(0, (2, 5, 6), [9])
    twins.open([7, 8, 9])
    twins.open([5])
    for trees in ((EMPTY, EMPTY, EMPTY), (TREE, TokenTree.chain([4, 4]), EMPTY)):
        twins.step(trees)
    twins.commit(1, (1,), [1, 2])
    twins.step((EMPTY, TREE, EMPTY))


@pytest.mark.parametrize(("family", "overrides"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_one_call_is_every_operation(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    """Biases, norms of heads, tied heads, grouped queries, windows: the same logits and the same caches."""
    folder = write_tiny_model(tmp_path / "tiny", family, seed=3, **overrides)
    compare(runner_of(folder, dtype), op_by_op(folder, dtype))


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_builds_and_threads_agree(name: str, num_threads: int) -> None:
    """The embedded target with each build of the kernels and one to three threads, against one build with two."""
    compare(runner_of(TARGET, torch.bfloat16, name, num_threads), op_by_op(TARGET, torch.bfloat16))


def test_two_models_side_by_side() -> None:
    """Activations, caches and weights of two models in one process do not mix."""
    pairs = [
        Twins(runner_of(folder, torch.bfloat16), op_by_op(folder, torch.bfloat16))
        for folder in (TARGET, TARGET.parent / "draft")
    ]
    for twins in pairs:
        twins.open(range(1, 30))
    for tree in (EMPTY, TREE, TokenTree.chain(range(1, 12)), EMPTY):
        for twins in pairs:
            twins.step([tree])


def test_another_cache_is_noticed() -> None:
    """A forward writes into the cache that it is given, not into the one before."""
    runner = runner_of(TARGET, torch.bfloat16)
    other = runner_of(TARGET, torch.bfloat16)
    other.model = runner.model
    states = []
    for each in (runner, other, runner):
        session = each.open(range(1, 20), 1)
        each.forward([Feed(session)])
        states.append(kv_state(each, session)[0])
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_without_kernels_the_model_computes_itself() -> None:
    """Operations in torch are not fused."""
    config = ModelConfig.read(TARGET)
    model = Transformer(config, load_tensors(TARGET, config, torch.device("cpu"), torch.bfloat16)[0], ReferenceOps())
    assert ModelRunner(model, ModelIdentity("any", "0", "any", 1, 4096), 64).model is model


def test_tables_are_as_long_as_what_is_served() -> None:
    """By the cache and by the context that was asked for; a longer one later makes them longer, and no bit changes."""
    config = ModelConfig.read(TARGET)
    model = Transformer(config, load_tensors(TARGET, config, torch.device("cpu"), torch.bfloat16)[0], native())
    identity = ModelIdentity("any", "0", "any", 1, 4096)
    ModelRunner(model, identity, 1024, context_len=300)
    short = model.tables
    assert {len(table) for tables in short for table in tables} == {512}
    small = ModelRunner(model, identity, 64)
    assert model.tables is short
    whole = ModelRunner(model, identity, 4096)
    assert {len(table) for tables in model.tables for table in tables} == {min(4096, config.context_len)}
    assert all(torch.equal(model.tables[0][place][:512], short[0][place]) for place in range(2))
    states = []
    for runner in (small, whole):
        session = runner.open(range(1, 20), 1)
        runner.forward([Feed(session)])
        states.append(kv_state(runner, session)[0])
    assert torch.equal(states[0], states[1])


def test_tensors_that_do_not_fit_are_refused() -> None:
    """C never sees a weight, a table, a cache or a plan that it would misread."""
    runner = runner_of(TARGET, torch.bfloat16)
    config = ModelConfig.read(TARGET)
    tensors = load_tensors(TARGET, config, torch.device("cpu"), torch.bfloat16)[0]
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(384, 1000).bfloat16()
    with pytest.raises(ValueError, match=r"down is torch.bfloat16 \[384, 1000\]"):
        FusedTransformer(Transformer(config, tensors, native()), native())
    session = runner.open([1, 2, 3], 1)
    runner.forward([Feed(session)])
    batch = build_batch([Feed(session)], [1], torch.device("cpu"))
    plan, wanted = batch.plan, batch.wanted
    for changes in ({"positions": plan.positions.int()}, {"key_counts": plan.key_counts.long()}):
        with pytest.raises(ValueError, match="must be"):
            runner.model.forward(replace(plan, **changes), runner.cache, wanted)
    with pytest.raises(ValueError, match="wanted"):
        runner.model.forward(plan, runner.cache, torch.zeros(2, dtype=torch.int64))
    cache = runner_of(TARGET, torch.bfloat16).cache
    cache.keys[1] = cache.keys[1].double()
    with pytest.raises(ValueError, match="key_cache"):
        runner.model.forward(plan, cache, wanted)
