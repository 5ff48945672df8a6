"""For tests of the engine: forwards whole, alone and one by one, and random inputs for its operations."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.batching import Feed, RowPlan
from outrider.engine.cache import BlockPool, BlockTable, KVCache
from outrider.engine.noise import Floats, Words, numpy_uniforms
from outrider.engine.ops import Ops
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.library import load_kernels, processor_levels
from outrider.engine.ops.native import NativeOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

# Two paths share row 1, and rows 5, 6, 7 leave gaps when they are kept.
TREE = TokenTree(token_ids=(11, 22, 33, 44, 55, 66, 77, 88), parents=(0, 0, 1, 1, 2, 5, 6, 3))


def random_ids(count: int, seed: int = 0, vocab_size: int = 4096) -> list[int]:
    """Token ids from a fixed seed."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def finish(runner: ModelRunner, *feeds: Feed) -> list[Tensor]:
    """Feeds until every feed is finished; the logits of each one, root first."""
    logits: list[Tensor | None] = [None] * len(feeds)
    while waiting := [index for index, rows in enumerate(logits) if rows is None]:
        result = runner.forward([feeds[index] for index in waiting])
        for index, rows in zip(waiting, result.ranges, strict=True):
            if rows is not None:
                logits[index] = result.logits[rows.start : rows.stop].clone()
    return [rows for rows in logits if rows is not None]


def make_feeds(
    *sizes: tuple[int, int, int], tree: TokenTree | None = None, prefixed: Collection[int] = ()
) -> list[Feed]:
    """Feeds of (tokens, cached tokens, tree rows) over one pool, with slots reserved; those that want a prefix."""
    pool, cache = BlockPool(400), KVCache(1, 1, 1, 1, torch.float32, torch.device("cpu"))
    feeds = []
    for number, (num_tokens, cached_len, num_rows) in enumerate(sizes):
        session = Session(BlockTable(pool, cache), range(num_tokens), 1)
        session.advance(cached_len, EMPTY)
        own_tree = TokenTree.chain(range(num_rows)) if tree is None else tree
        feeds.append(Feed(session, own_tree, number in prefixed))
        session.reserve(len(feeds[-1].tree))
    return feeds


@st.composite
def small_trees(draw: st.DrawFn) -> TokenTree:
    """Any tree of up to nine rows, chains among them."""
    count = draw(st.integers(0, 9))
    chain = draw(st.booleans())
    parents = [row if chain else draw(st.integers(0, row)) for row in range(count)]
    return TokenTree(tuple(range(100, 100 + count)), tuple(parents))


@st.composite
def feeds_and_grants(draw: st.DrawFn) -> tuple[list[Feed], list[int]]:
    """Prompts, whole and in part, steps, chains, trees, and trees that grow, of one to four sessions."""
    feeds, grants = list[Feed](), list[int]()
    for _ in range(draw(st.integers(1, 4))):
        tree, length = draw(small_trees()), draw(st.integers(1, 30))
        num_computed = draw(st.integers(0, len(tree)))
        cached = length if num_computed else draw(st.integers(0, length))
        feed = make_feeds((length, cached, 0), tree=tree)[0]._replace(num_computed=num_computed)
        feed.session.reserve(len(tree), feed.start)
        feeds.append(feed)
        # A tree goes with the end of its prompt, or waits for it.
        is_whole = draw(st.booleans()) or feed.num_committed < 2
        grants.append(feed.num_rows if is_whole else draw(st.integers(1, feed.num_committed - 1)))
    return feeds, grants


def kv_state(runner: ModelRunner, session: Session) -> tuple[Tensor, Tensor]:
    """Keys and values of the cached tokens, gathered into new tensors."""
    return runner.cache.gather(session.table.slots(0, session.cached_len))


def numpy_gumbel(keys: Words, num_tokens: int) -> Floats:
    """The values of `gumbel` as near as two libraries' logarithms are, for keys [R] uint64."""
    return -np.log(-np.log(numpy_uniforms(keys, num_tokens)))


def fresh(runner: ModelRunner, token_ids: Sequence[int], tree: TokenTree = EMPTY) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys and values of a session of its own, computed alone in one go."""
    session = runner.open(token_ids, 1)
    logits = finish(runner, Feed(session, tree))[0]
    keys, values = kv_state(runner, session)
    session.free()
    return logits, keys, values


def assert_like_fresh(runner: ModelRunner, session: Session) -> None:
    """The session's cache holds bitwise what a new prefill of its tokens would."""
    assert session.cached_len == len(session)
    _, keys, values = fresh(runner, session.token_ids)
    for kept, expected in zip(kv_state(runner, session), (keys, values), strict=True):
        assert torch.equal(kept, expected)
    runner.pool.check_integrity()


def close(runner: ModelRunner, *sessions: Session) -> None:
    """Frees sessions and checks that no block is left taken."""
    for session in sessions:
        session.free()
    runner.pool.check_integrity()
    assert runner.pool.num_used == 0


def decoded(runner: ModelRunner, token_ids: Sequence[int], prompt_len: int) -> Tensor:
    """Logits of the positions from prompt_len - 1 on, one forward for each."""
    session = runner.open(token_ids[:prompt_len], prompt_len)
    steps = finish(runner, Feed(session))
    for token_id in token_ids[prompt_len:]:
        session.extend([token_id])
        steps += finish(runner, Feed(session))
    session.free()
    return torch.cat(steps)


NUM_SLOTS = 700
BUILT = [name for name in processor_levels() if load_kernels(name) is not None]


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of rotate_and_store and attention, as views into one fused product."""

    query: Tensor
    key: Tensor
    value: Tensor
    plan: RowPlan
    cos: Tensor
    sin: Tensor
    key_cache: Tensor
    value_cache: Tensor


def native(name: str = "", num_threads: int = 2, packed_bits: int | None = None, input_bits: int = 8) -> NativeOps:
    """Compiled operations; skips, with a reason in the summary, where there was no compiler to build the kernels."""
    kernels = load_kernels(*([name] if name else []))
    if kernels is None:
        pytest.skip("the CPU kernels are not built: install a C compiler and run `pip install -e .` again")
    return NativeOps(kernels, num_threads, packed_bits=packed_bits, input_bits=input_bits)


def every_ops(packed_bits: int | None = None) -> list[Ops]:
    """Every implementation that runs here, each build of the kernels by itself."""
    compiled = (native(name, packed_bits=packed_bits) for name in BUILT)
    return [*compiled, EagerOps(packed_bits), ReferenceOps(packed_bits)]


def keys_of(num_rows: int, generator: torch.Generator) -> Tensor:
    """Noise keys over the whole range of 64 bits."""
    return torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)


def attention_case(
    num_rows: int, num_heads: int, num_groups: int, head_dim: int, seed: int = 0, num_turning: int | None = None
) -> AttentionCase:
    """Rows in chains of up to five that share a list of slots, in random order in the cache, 1 to 300 keys long.

    Without num_turning whole heads turn.
    """
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_rows, (num_heads + 2 * num_groups) * head_dim, generator=generator)
    query, key, value = fused.split([num_heads * head_dim, num_groups * head_dim, num_groups * head_dim], dim=1)
    angles = torch.rand(512, (num_turning or head_dim) // 2, generator=generator) * 6
    return AttentionCase(
        query.view(num_rows, num_heads, head_dim),
        key.view(num_rows, num_groups, head_dim),
        value.view(num_rows, num_groups, head_dim),
        _plan(num_rows, generator),
        angles.cos(),
        angles.sin(),
        torch.randn(NUM_SLOTS, num_groups, head_dim, generator=generator),
        torch.randn(NUM_SLOTS, num_groups, head_dim, generator=generator),
    )


def _plan(num_rows: int, generator: torch.Generator) -> RowPlan:
    lists, starts, counts = [], [], []
    offset = 0
    for row in range(num_rows):
        if row % 5 == 0:
            offset = sum(map(len, lists))
            length = int(torch.randint(5, 300, (), generator=generator))
            lists.append(torch.randperm(NUM_SLOTS, generator=generator)[:length].int())
        starts.append(offset)
        counts.append(1 if row == 0 else len(lists[-1]) - 4 + row % 5)
    return RowPlan(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.randint(0, 512, (num_rows,), generator=generator),
        slots=torch.randperm(NUM_SLOTS, generator=generator)[:num_rows],
        key_slots=torch.cat(lists),
        key_starts=torch.tensor(starts),
        key_counts=torch.tensor(counts, dtype=torch.int32),
        max_key_count=max(counts),
    )


def rows_of(case: AttentionCase, rows: slice) -> AttentionCase:
    """The case with some of its rows only and caches of its own."""
    plan = case.plan
    part = replace(
        plan,
        token_ids=plan.token_ids[rows],
        positions=plan.positions[rows],
        slots=plan.slots[rows],
        key_starts=plan.key_starts[rows],
        key_counts=plan.key_counts[rows],
        max_key_count=int(plan.key_counts[rows].max()),
    )
    heads = {"query": case.query[rows], "key": case.key[rows], "value": case.value[rows]}
    caches = {"key_cache": case.key_cache.clone(), "value_cache": case.value_cache.clone()}
    return replace(case, **heads, **caches, plan=part)


def rotate(ops: Ops, case: AttentionCase) -> Tensor:
    """Calls rotate_and_store with the case."""
    heads = case.query, case.key, case.value
    return ops.rotate_and_store(*heads, case.plan, case.cos, case.sin, case.key_cache, case.value_cache)


def attend(ops: Ops, case: AttentionCase, sinks: Tensor | None = None) -> Tensor:
    """Calls attention with the case's query as it is, scaled as usual."""
    scale = case.query.shape[2] ** -0.5
    return ops.attention(case.query.contiguous(), case.plan, case.key_cache, case.value_cache, scale, sinks)
