"""Section `questions`: on what a row's bits depend, and how far results are from float64. Also `pinned`: cuBLAS alone.

Whether a row's bits are its own decides whether answers with drafts are those without; see docs/guarantees.md.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes, matrices
from bench.gpu.subjects import (
    LayerCache,
    Variant,
    attention_kinds,
    available_ops,
    chain_of,
    load_shaped,
    random_weights,
    tree_of,
    variants,
)
from outrider.engine.batching import Feed
from outrider.engine.cache import Slots
from outrider.engine.ops import Ops, choose_ops
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ModelRunner
from outrider.token_tree import EMPTY, TokenTree

TREE_ROWS = 31
LENGTHS = (37, 300, 1100)
PIECE = 16
SHALLOW = 2
Rows = Callable[[Tensor], Tensor]


class Attention(NamedTuple):
    """Operations, and how many rows may share an item of work."""

    ops: Ops
    tiles: tuple[int, ...]

    def __call__(self, layer: LayerCache, query: Tensor, feeds: Sequence[Feed]) -> Tensor:
        """Attention of all rows of the feeds."""
        return layer.attend(self.ops, query, layer.plan(feeds, self.tiles))


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Every kind of operations by itself, then whole models of two layers."""
    for name, ops in available_ops(device).items():
        _products(recorder, sizes, device, name, ops)
        with recorder.case(f"rms_norm/{name}"):
            _rows_alone(recorder, sizes, device, name, ops)
        with recorder.case(f"choose/{name}"):
            # Ids on equal logits beside those of the CPU, at three temperatures, with padding after the vocabulary.
            rows, num_tokens = 63, sizes.vocab_size - 7
            logits = torch.randn(rows, sizes.vocab_size, generator=torch.Generator().manual_seed(3)) * 3
            keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(4))
            temperatures = torch.tensor([0.0, 0.7, 1.0], dtype=torch.float64).repeat(rows // 3)
            expected = choose_ops(torch.device("cpu"), 1).choose(logits, temperatures, keys, num_tokens)
            found = ops.choose(logits.to(device), temperatures.to(device), keys.to(device), num_tokens).cpu()
            what = f"choose/ids that are not the CPU's/{name}"
            recorder.add(what, int((found != expected).sum()), "ids", of=rows)
    kinds = attention_kinds(device)
    for name, (ops, tiles) in kinds.items():
        with recorder.case(f"attention/{name}"):
            _attention(recorder, sizes, device, name, Attention(ops, tiles))
    with recorder.case("attention/triton = triton-alone"):
        if "triton" in kinds:
            # Whether rows that share work have the bits of rows that share none.
            layer = LayerCache(sizes.shapes["8b"], 8192, device)
            feeds = [layer.feed(length, tree_of(TREE_ROWS)) for length in (37, 300, 1100)]
            query = layer.queries(sum(feed.num_rows for feed in feeds))
            ops, tiles = kinds["triton"]
            alone = Attention(ops, ())(layer, query, feeds)
            same = [torch.equal(Attention(ops, (tile,))(layer, query, feeds), alone) for tile in tiles]
            recorder.add("attention/shared work = own chunks/triton", all(same), tiles=tiles, same=same)
    for variant in variants(device):
        with recorder.case(f"model/{variant.name}"):
            _model(recorder, sizes, device, variant)


def pinned(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """The products of plain torch, in a process whose environment gives cuBLAS a small workspace."""
    _products(recorder, sizes, device, "eager", EagerOps())


def _products(recorder: Recorder, sizes: Sizes, device: torch.device, name: str, ops: Ops) -> None:
    for matrix, size in matrices(sizes.shapes["8b"], sizes.vocab_size).items():
        with recorder.case(f"linear/{matrix}/{name}"):
            weight = next(random_weights(size, device, 1))
            stacked = ops.stack([weight])
            x = torch.randn(max(sizes.places), size[1], device=device)
            _compare(recorder, f"linear/{matrix}/same bits/{name}", sizes, x, partial(ops.linear, weight=stacked))
            few = x[:16]
            output = ops.linear(few, stacked)
            for what, exact in (("of float32 rows", few.double()), ("of bfloat16 rows", few.bfloat16().double())):
                expected = torch.cat([exact @ part.double().T for part in torch.split(weight, 16384)], dim=1)
                recorder.add(f"linear/{matrix}/error {what}/{name}", relative_error(output, expected))


def _compare(recorder: Recorder, what: str, sizes: Sizes, x: Tensor, compute: Rows) -> None:
    """The first row alone, and at three places among others, which are other rows each time."""
    alone = compute(x[:1].contiguous())[0]
    differing, count = [], 0
    for total in sizes.places:
        for place in sorted({0, total // 2, total - 1}):
            rows = torch.randn(total, x.shape[1], device=x.device)
            rows[place] = x[0]
            count += 1
            if not torch.equal(compute(rows)[place], alone):
                differing.append((total, place))
    recorder.add(what, not differing, tried=count, differing=differing)


def relative_error(output: Tensor, expected: Tensor) -> float:
    """The norm of the difference from a float64 result, in parts of that result's norm; NaN stays NaN."""
    return float((output.double() - expected).norm() / expected.norm())


def _rows_alone(recorder: Recorder, sizes: Sizes, device: torch.device, name: str, ops: Ops) -> None:
    shape = sizes.shapes["8b"]
    x = torch.randn(max(sizes.places), shape.hidden_size, device=device)
    weight = torch.rand(shape.hidden_size, device=device) + 0.5
    _compare(recorder, f"rms_norm/same bits/{name}", sizes, x, lambda rows: ops.rms_norm(rows, weight, 1e-5))
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    recorder.add(f"rms_norm/error/{name}", relative_error(ops.rms_norm(x, weight, 1e-5), expected))
    wide = torch.randn(max(sizes.places), 2 * shape.intermediate_size, device=device)
    _compare(recorder, f"silu_multiply/same bits/{name}", sizes, wide, ops.gate_multiply)


def _attention(recorder: Recorder, sizes: Sizes, device: torch.device, name: str, attend: Attention) -> None:
    shape = sizes.shapes["8b"]
    lengths = [min(length, sizes.context_len // 4) for length in LENGTHS]
    layer = LayerCache(shape, 8 * sum(lengths) + 4096, device)
    trees = [layer.feed(length, tree_of(TREE_ROWS)) for length in lengths]
    singles = [layer.feed(length, TokenTree()) for length in lengths]
    query = layer.queries(sum(feed.num_rows for feed in (*trees, *singles)))
    together = attend(layer, query, [*trees, *singles])
    first = 0
    for length, feed in zip(lengths, trees, strict=True):
        rows = slice(first, first + feed.num_rows)
        alone = attend(layer, query[rows], [feed])
        recorder.add(f"attention/{length}/session alone = in a batch/{name}", torch.equal(alone, together[rows]))
        same = [_as_chain(layer, attend, feed, row, query[rows], together[rows]) for row in (1, 7, TREE_ROWS)]
        recorder.add(f"attention/{length}/tree row = row of a chain/{name}", all(same), rows=same)
        first += feed.num_rows
    for length, feed in zip(lengths, singles, strict=True):
        alone = attend(layer, query[first : first + 1], [feed])
        recorder.add(f"attention/{length}/step alone = in a batch/{name}", torch.equal(alone[0], together[first]))
        first += 1
    prompt = layer.feed(lengths[-1], TokenTree())
    prompt.session.advance(0, EMPTY)
    query = layer.queries(lengths[-1], seed=1)
    at_once = attend(layer, query, [prompt])
    # The last row against float64.
    slots = layer.plan([prompt]).key_slots.long()
    keys, values = layer.keys[slots].double(), layer.values[slots].double()
    grouped = query[-1].double().view(shape.num_kv_heads, -1, shape.head_dim)
    weights = torch.softmax(torch.einsum("ghd,lgd->ghl", grouped, keys) * shape.head_dim**-0.5, dim=-1)
    exact = torch.einsum("ghl,lgd->ghd", weights, values).flatten()
    recorder.add(f"attention/error/{name}", relative_error(at_once[-1], exact))
    parts = []
    for part in torch.split(query, PIECE):
        plan = layer.plan([prompt], attend.tiles, PIECE)
        parts.append(layer.attend(attend.ops, part, plan))
        prompt.session.advance(prompt.session.cached_len + len(part), EMPTY)
    recorder.add(f"attention/prompt in pieces = at once/{name}", torch.equal(torch.cat(parts), at_once))


def _as_chain(layer: LayerCache, attend: Attention, feed: Feed, row: int, query: Tensor, together: Tensor) -> bool:
    """Whether a row of a tree is bitwise the last row of a chain of its path, in other slots."""
    length, path = len(feed.session), feed.tree.path(row)
    chain = layer.feed(length, chain_of(len(path)))
    slots = feed.session.table.slots(0, length + len(feed.tree))
    source: Slots = slots[[*range(length), *(length + each - 1 for each in path)]]
    layer.cache.copy(source, chain.session.table.slots(0, length + len(path)))
    result = torch.equal(attend(layer, query[[0, *path]], [chain])[-1], together[row])
    chain.session.free()
    return result


def _model(recorder: Recorder, sizes: Sizes, device: torch.device, variant: Variant) -> None:
    """Logits of two layers of 8B: a session alone and among others, a tree and its paths, a prompt in pieces."""
    runner = load_shaped("8b", sizes, device, variant, SHALLOW)
    recorder.add(f"model/is_row_invariant/{variant.name}", runner.is_row_invariant, numerics_id=runner.numerics_id)
    prompts = [[(7 * index + number) % 500 for index in range(40 + 9 * number)] for number in range(8)]
    tree = TokenTree(tuple(range(1, 16)), tree_of(15).parents)
    alone = [_logits(runner, prompt, tree) for prompt in prompts]
    sessions = [runner.open(prompt, len(prompt)) for prompt in prompts]
    for session in sessions:
        runner.forward([Feed(session)])
    result = runner.forward([Feed(session, tree) for session in sessions])
    rows = [range(0) if each is None else each for each in result.ranges]
    same = [torch.equal(result.logits[each.start : each.stop], one) for each, one in zip(rows, alone, strict=True)]
    recorder.add(f"model/session alone = in a batch/{variant.name}", all(same), same=sum(same), of=len(same))
    paths = [tree.path(row) for row in range(1, len(tree) + 1)]
    chains = [[tree.token_ids[row - 1] for row in path] for path in paths]
    steps = [_stepped(runner, prompts[0], chain) for chain in chains]
    same = [torch.equal(step, alone[0][row]) for row, step in enumerate(steps, start=1)]
    recorder.add(f"model/tree row = plain step/{variant.name}", all(same), same=sum(same), of=len(same))
    picks = [int(step.argmax()) == int(alone[0][row].argmax()) for row, step in enumerate(steps, start=1)]
    recorder.add(f"model/tree row's best = plain step's/{variant.name}", all(picks), same=sum(picks), of=len(picks))
    whole, parts = runner.open(prompts[-1], 1), runner.open(prompts[-1], 1)
    at_once = runner.forward([Feed(whole)]).logits[-1]
    while parts.cached_len < len(parts):
        in_parts = runner.forward([Feed(parts)], PIECE).logits
    recorder.add(f"model/prompt in pieces = at once/{variant.name}", torch.equal(in_parts[-1], at_once))


def _logits(runner: ModelRunner, token_ids: list[int], tree: TokenTree) -> Tensor:
    """Logits of the last token and of a tree after it, of a session whose prompt was read before."""
    session = runner.open(token_ids, len(token_ids))
    runner.forward([Feed(session)])
    logits = runner.forward([Feed(session, tree)]).logits.clone()
    session.free()
    return logits


def _stepped(runner: ModelRunner, prompt: list[int], token_ids: list[int]) -> Tensor:
    """Logits of the last of these tokens, which are fed one by one after a prompt, as plain decoding does."""
    session = runner.open(prompt, len(prompt))
    logits = runner.forward([Feed(session)]).logits
    for token_id in token_ids:
        session.extend([token_id])
        logits = runner.forward([Feed(session)]).logits
    session.free()
    return logits[-1].clone()
