"""What was found in the prefix cache, by a real model: bitwise the logits and keys of a prefill of one's own."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.engine_cases import TREE, close, finish, fresh, kv_state, random_ids
from support.models.model_cases import SCALINGS, THETA, WINDOWS
from support.models.tiny_models import TARGET, write_tiny_model

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

DTYPES = ["bfloat16", "float32", "int8"]
# Windows and scalings that end within the text; the last is computed by transformers' code.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: WINDOWS[name] for name in ("mistral-7", "qwen3-layer-types")},
    "dynamic": ("llama", {"context_len": 64, "rope_parameters": {"rope_theta": THETA, **SCALINGS["dynamic"]}}),
    **{name: (name, {}) for name in ("gemma3", "gpt2")},
}


@functools.cache
def target(dtype: str) -> ModelRunner:
    """The embedded target, loaded once; 32 blocks."""
    return ModelRunner.load(str(TARGET), dtype=dtype, num_threads=1, kv_tokens=512)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of each case."""
    root = tmp_path_factory.mktemp("prefix")
    return {
        name: write_tiny_model(root / name, family, seed=11, **overrides) for name, (family, overrides) in CASES.items()
    }


@pytest.fixture(params=DTYPES)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return target(request.param)


def serve(runner: ModelRunner, token_ids: list[int]) -> Session:
    """A session that has computed these tokens and published them."""
    session = runner.open(token_ids, 1, b"")
    session.take_prefix()
    finish(runner, Feed(session))
    session.publish(len(session))
    return session


def check_hit(runner: ModelRunner, token_ids: list[int], num_hits: int, tree: TokenTree = EMPTY) -> Session:
    """A session finds as many tokens, and is bitwise what a session without a cache is."""
    session = runner.open(token_ids, 1, b"")
    assert session.take_prefix() == num_hits
    logits = finish(runner, Feed(session, tree))[0]
    expected, keys, values = fresh(runner, token_ids, tree)
    assert torch.equal(logits, expected)
    for found, computed in zip(kv_state(runner, session), (keys, values), strict=True):
        assert torch.equal(found, computed)
    session.publish(len(session))
    return session


@pytest.mark.parametrize("length", [33, 48, 100])
def test_a_sent_prompt_again_changes_no_bit(runner: ModelRunner, length: int) -> None:
    """Logits of the last token and of a tree's rows, and all keys and values; beside its first owner and after it."""
    prompt = random_ids(length, seed=length)
    first = serve(runner, prompt)
    again = check_hit(runner, prompt, (length - 1) // 16 * 16, TREE)
    first.free()
    longer = check_hit(runner, [*prompt, *random_ids(40, seed=1)], length // 16 * 16, TREE)
    close(runner, again, longer)


def test_truncated_sessions_leave_what_they_published(runner: ModelRunner) -> None:
    """One goes back into shared blocks and on with other tokens; neither it nor anyone else sees the other's keys."""
    prompt = random_ids(70, seed=3)
    first, second = serve(runner, prompt), check_hit(runner, prompt, 64)
    for length in (64, 40, 17):
        second.truncate(length)
        second.extend(random_ids(30, seed=length))
        logits = finish(runner, Feed(second))[0]
        second.publish(len(second))
        assert torch.equal(logits, fresh(runner, second.token_ids)[0])
    third = check_hit(runner, prompt, 64)
    assert torch.equal(kv_state(runner, first)[0], kv_state(runner, third)[0])
    close(runner, first, second, third)


def test_eviction_in_the_middle_changes_no_bit(runner: ModelRunner) -> None:
    """Others take the tail of a cached prefix while a session holds its head: the head is whole, the tail not found."""
    prompt = random_ids(250, seed=4)
    serve(runner, prompt).free()
    early = runner.open(prompt[:150], 1, b"")
    assert early.take_prefix() == 144
    others = [serve(runner, random_ids(160, seed=seed)) for seed in (5, 6)]
    logits = finish(runner, Feed(early))[0]
    close(runner, *others, early)
    assert torch.equal(logits, fresh(runner, prompt[:150])[0])
    found = runner.open(prompt, 1, b"")
    assert 144 <= found.take_prefix() < 240
    close(runner, found, check_hit(runner, prompt, found.cached_len))
    assert runner.pool.num_free == runner.pool.num_blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model_finds_its_own_bits(folders: dict[str, Path], name: str, dtype: str) -> None:
    """Windows mask and free nothing, positions turn by themselves: a cached key is the same for every session."""
    runner = ModelRunner.load(str(folders[name]), dtype=dtype, kv_tokens=1024)
    prompt = random_ids(90, seed=5, vocab_size=300)
    first = serve(runner, prompt[:70])
    close(runner, first, check_hit(runner, prompt, 64, TREE))
