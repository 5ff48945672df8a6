"""Models that transformers' code computes with our attention: its own logits, and the same bits in any company."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models.engine_cases import TREE, assert_like_fresh, close, decoded, finish, fresh, random_ids
from support.models.model_cases import logits_and_reach, reference
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine import runner as runner_module
from outrider.engine.batching import Feed
from outrider.engine.hf_models import decoder
from outrider.engine.hf_models.checkpoint import find
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused
from outrider.token_tree import TokenTree

DTYPES = ["bfloat16", "float32"]
# Windows end within these texts, and one forward is shorter than the prompt.
LENGTH, PROMPT_LEN, MAX_ROWS = 60, 50, 40
CAPPED = {"final_logit_softcapping": 3.0, "vocab_size": 301}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-quarter": ("gpt_neox", {"rotary_pct": 0.25, "hidden_size": 64, "use_parallel_residual": False}),
    "gemma3-capped": ("gemma3", CAPPED),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of each case."""
    root = tmp_path_factory.mktemp("hf_models")
    return {
        name: write_tiny_model(root / name, family, seed=11, **overrides) for name, (family, overrides) in CASES.items()
    }


@functools.cache
def runner_of(folder: Path, dtype: str) -> ModelRunner:
    """A runner, loaded once."""
    runner = ModelRunner.load(str(folder), dtype=dtype, kv_tokens=2048)
    runner.max_rows = MAX_ROWS
    return runner


known = functools.cache(reference)


def assert_near(logits: Tensor, model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> float:
    """The last positions' logits [.., V] are those of transformers in float32, up to rounding; returns how far that
    may carry them.
    """
    expected, limit = logits_and_reach(model, token_ids, len(token_ids) - len(logits))
    torch.testing.assert_close(logits, expected, atol=limit, rtol=0)
    return limit


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    """In float32 up to its rounding: a prompt in two chunks, single steps, a chain, and every path of a tree."""
    folder = folders[name]
    runner = runner_of(folder, "float32")
    token_ids = random_ids(LENGTH, seed=5, vocab_size=300)
    chain = fresh(runner, token_ids[:PROMPT_LEN], TokenTree.chain(token_ids[PROMPT_LEN:]))[0]
    steps = decoded(runner, token_ids, PROMPT_LEN)
    limit = assert_near(steps, known(folder), token_ids)
    assert torch.equal(chain, steps)
    tree = fresh(runner, token_ids[:PROMPT_LEN], TREE)[0]
    for row in range(9):
        path = [TREE.token_ids[ancestor - 1] for ancestor in TREE.path(row)]
        with torch.no_grad():
            along = known(folder)(torch.tensor([[*token_ids[:PROMPT_LEN], *path]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(tree[row], along, atol=limit, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_rounds_matrices_and_nothing_else(folders: dict[str, Path], name: str) -> None:
    """It is transformers' float32 forward with rounded matrices: activations and norms stay float32."""
    runner = runner_of(folders[name], "bfloat16")
    token_ids = random_ids(LENGTH, seed=5, vocab_size=300)
    rounded = reference(folders[name])
    # Gemma's factor of the embedding has the type of the matrix.
    factor = getattr(rounded.get_input_embeddings(), "embed_scale", None)
    for tensor in filter(lambda tensor: tensor is not None, (*rounded.parameters(), factor)):
        if tensor.ndim != 1:
            tensor.data = tensor.detach().bfloat16().float()
    assert_near(decoded(runner, token_ids, PROMPT_LEN), rounded, token_ids)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_are_for_our_own_families(folders: dict[str, Path], dtype: str) -> None:
    """Another modelling code multiplies by itself, and is refused before anything is loaded."""
    with pytest.raises(ModelRefused, match=f"dtype is {dtype}, but only models of our own families are quantised"):
        runner_of(folders[next(iter(CASES))], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_depend_on_their_neighbours(folders: dict[str, Path], name: str, dtype: str) -> None:
    """K = 0 and 8, batch 1 and 16, both dtypes: logits and cache are those of a session of its own, bit for bit."""
    runner = runner_of(folders[name], dtype)
    for batch, num_rows in itertools.product((1, 16), (0, 8)):
        prompts = [random_ids(12 + 3 * index, seed=index, vocab_size=300) for index in range(batch)]
        trees = [TokenTree.chain(random_ids(num_rows, seed=100 + index, vocab_size=300)) for index in range(batch)]
        sessions = [runner.open(prompt, 1) for prompt in prompts]
        together = finish(runner, *(Feed(session, tree) for session, tree in zip(sessions, trees, strict=True)))
        for session, tree, logits in zip(sessions, trees, together, strict=True):
            assert torch.equal(logits, fresh(runner, session.token_ids, tree)[0])
            assert_like_fresh(runner, session)
        close(runner, *sessions)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_chunks_trees_and_kept_rows_change_no_bit(folders: dict[str, Path], name: str, dtype: str) -> None:
    """A prompt piece by piece, a tree against its paths, and the cache of kept rows against a new prefill."""
    runner = runner_of(folders[name], dtype)
    token_ids = random_ids(45, vocab_size=300)
    session = runner.open(token_ids[:1], 1)
    for start, end in ((1, 2), (2, 9), (9, 45)):
        finish(runner, Feed(session))
        session.extend(token_ids[start:end])
    logits = finish(runner, Feed(session, TREE))[0]
    assert torch.equal(logits, fresh(runner, token_ids, TREE)[0])
    for row in range(9):
        path = [TREE.token_ids[ancestor - 1] for ancestor in TREE.path(row)]
        assert torch.equal(logits[row], fresh(runner, [*token_ids, *path])[0][-1])
    session.keep((2, 5, 6, 7))
    assert_like_fresh(runner, session)
    session.truncate(20)
    assert torch.equal(finish(runner, Feed(session))[0], fresh(runner, token_ids[:20])[0])
    close(runner, session)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_of_torch_change_no_bit(folders: dict[str, Path], num_threads: int) -> None:
    """However many threads the caller's torch has, and they are given back."""
    runner = runner_of(folders["olmo2"], "float32")
    token_ids = random_ids(200, vocab_size=300)
    expected = fresh(runner, token_ids)[0]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(fresh(runner, token_ids)[0], expected)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_operations_without_kernels_keep_the_promise(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a compiler gets the same rows in any company too."""
    monkeypatch.setattr(runner_module, "choose_ops", lambda *given: ReferenceOps(given[2]))
    runner = ModelRunner.load(str(folders["gemma3-capped"]), kv_tokens=512)
    assert runner.numerics_id.endswith("-reference")
    prompts = [random_ids(9 + index, seed=index, vocab_size=300) for index in range(3)]
    sessions = [runner.open(prompt, 1) for prompt in prompts]
    for session, logits in zip(sessions, finish(runner, *map(Feed, sessions)), strict=True):
        assert torch.equal(logits, fresh(runner, session.token_ids)[0])
    close(runner, *sessions)


def test_a_model_without_padding_is_caught_when_it_is_loaded(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe can fail: without whole vectors torch's functions give other bits, and the model is refused."""
    monkeypatch.setattr(decoder, "padded", lambda num_rows, device: max(num_rows, 1))
    with pytest.raises(ModelRefused, match="computes other bits for a row in other company"):
        ModelRunner.load(str(folders["olmo2"]), kv_tokens=64)


def test_a_model_is_described(folders: dict[str, Path]) -> None:
    """The numerics id names everything that computes a part; sizes come from a run without numbers."""
    runner = runner_of(folders["gemma3-capped"], "bfloat16")
    versions = f"transformers-{transformers.__version__}-torch-{torch.__version__.split('+')[0]}"
    assert runner.numerics_id == f"cpu-bfloat16-{versions}-{runner.ops.name}"
    config = runner.config
    assert (config.vocab_size, config.num_layers, config.num_kv_heads, config.head_dim) == (301, 2, 2, 16)
    assert (runner.context_len, runner.config.eos_token_ids) == (256, {0})
    assert {weight.dtype for weight in runner.model.weights if weight.ndim > 1} == {torch.bfloat16}
    assert {weight.dtype for weight in runner.model.weights if weight.ndim == 1} == {torch.float32}
    tied = {weight.data_ptr() for weight in runner.model.weights}
    assert len(tied) == len(runner.model.weights)


LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [4.0] * 6}


@pytest.mark.parametrize(
    ("family", "rope", "longest"),
    [
        ("olmo2", {"rope_type": "dynamic", "factor": 2.0}, 256),
        ("olmo2", {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 256),
        ("olmo2", {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG}, 64),
    ],
    ids=["dynamic", "yarn", "longrope"],
)
def test_scaled_rotary_embeddings(tmp_path: Path, family: str, rope: dict[str, Any], longest: int) -> None:
    """Those of transformers, as far as they depend on nothing but the position."""
    parameters = {"rope_parameters": rope | {"rope_theta": 500.0}, "original_max_position_embeddings": 64}
    folder = write_tiny_model(tmp_path / "tiny", family, **parameters)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=512)
    assert runner.context_len == longest
    token_ids = random_ids(longest, vocab_size=300)
    assert_near(decoded(runner, token_ids, longest - 4), known(folder), token_ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the CUDA smoke test needs one")
@pytest.mark.parametrize("name", CASES)
def test_cuda_smoke(folders: dict[str, Path], name: str) -> None:
    """On a GPU the logits are those of the CPU up to rounding."""
    token_ids = random_ids(LENGTH, vocab_size=300)
    device_runner = ModelRunner.load(str(folders[name]), device="cuda:0", dtype="float32", kv_tokens=1024)
    expected = decoded(runner_of(folders[name], "float32"), token_ids, PROMPT_LEN)
    torch.testing.assert_close(decoded(device_runner, token_ids, PROMPT_LEN).cpu(), expected, atol=1e-2, rtol=0)


def test_finding_a_model_loads_nothing(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape and tensor names are known before any weight is read."""
    monkeypatch.setattr("safetensors.safe_open", None)
    found = find("tiny", folders["mixtral"])
    assert found.config.num_layers == 2
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in found.tensors.expected
