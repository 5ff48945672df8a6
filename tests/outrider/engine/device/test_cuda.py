"""On a CUDA device: every operation against float64, a runner against the CPU's tokens, sessions, heads and drafters.

The same tests run on the CPU with the operations that CUDA has by default, so that a fault there is the card's. Marked
`cuda` is what needs one.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.basics import check_empty, spec_of
from support.heads.heads import random_head
from support.models.engine_cases import (
    TREE,
    AttentionCase,
    assert_like_fresh,
    attend,
    attention_case,
    close,
    decoded,
    finish,
    fresh,
    keys_of,
    random_ids,
    rotate,
)
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import Draft
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, OwnTarget, plain
from torch import Tensor
from torch.nn import functional

from outrider.drafters.drafter import Drafter
from outrider.drafters.hosted import HostedModel, host_head
from outrider.drafters.shelf.early_exit import LayerSkip
from outrider.drafters.shelf.probing import LOOKAHEAD, PASS, Lookahead, PassChain, ProbeDrafter, embed_probes
from outrider.engine.batching import Feed
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.ops import Ops, choose_ops, triton_missing
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ModelIdentity, ModelRunner
from outrider.token_tree import TokenTree

CUDA = torch.device("cuda:0")
needs_card = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]
needs_kernels = pytest.mark.skipif(triton_missing() is not None, reason=f"{triton_missing()}")
ON_CARDS = [
    pytest.param("eager", marks=needs_card),
    *(pytest.param(place, marks=[*needs_card, needs_kernels]) for place in ("triton", "graphs")),
]
PLACES = ["cpu", *ON_CARDS]
# Where a row's bits depend on the row alone.
INVARIANT = ON_CARDS[1:]
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
# Operations by themselves are in no graph.
EVERY_OPS = pytest.mark.parametrize("place", PLACES[:-1])
GREEDY = spec_of(PROMPT, 40, seed=3, eos=())
SAMPLED = spec_of(PROMPT, 40, seed=3, eos=(), temperature=1.0)


def device_of(place: str) -> torch.device:
    """The device of a place."""
    return torch.device("cpu") if place == "cpu" else CUDA


def ops_of(place: str) -> Ops:
    """The operations that a place means."""
    return EagerOps() if place == "cpu" else choose_ops(CUDA, 1, kernels=place)


def load(place: str, folder: Path, dtype: str = "float32") -> ModelRunner:
    """The model of a folder with the operations of a place."""
    if place == "cpu":
        checkpoint = find_checkpoint(str(folder))
        decoder = checkpoint.build(torch.device("cpu"), torch.float32, EagerOps())[0]
        return ModelRunner(decoder, ModelIdentity("tiny", "", dtype, 1, decoder.config.vocab_size), 4096)
    return ModelRunner.load(str(folder), device=str(CUDA), dtype=dtype, kv_tokens=4096, kernels=place)


def moved(case: AttentionCase, device: torch.device) -> AttentionCase:
    """The case on a device; what was one product is one there too."""
    plan = {each.name: getattr(case.plan, each.name) for each in fields(case.plan)}
    tensors = {name: value.to(device) for name, value in plan.items() if isinstance(value, Tensor)}
    width = [case.query.shape[1], case.key.shape[1], case.value.shape[1]]
    fused = torch.cat((case.query, case.key, case.value), dim=1).to(device)
    query, key, value = fused.split(width, dim=1)
    return AttentionCase(
        query,
        key,
        value,
        replace(case.plan, **tensors),
        *(each.to(device) for each in (case.cos, case.sin, case.key_cache, case.value_cache)),
    )


def poison(device: torch.device) -> None:
    """Leaves NaN in the memory that the next results are likely to be written into."""
    dirt = [torch.full((size,), torch.nan, device=device) for size in (64, 1024, 4096, 16384, 1 << 20)]
    del dirt


def error_of(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, in parts of the exact result's norm; NaN where anything was not written."""
    return float((found.cpu().double() - exact).norm() / exact.norm())


@pytest.fixture(autouse=True)
def _own_fault() -> Iterator[None]:
    """After a fault of the card nothing of its process can be believed: one of several is replaced."""
    yield
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=VOCABULARY_SIZE, context_len=640
    )


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "draft", "llama", vocab_size=VOCABULARY_SIZE, context_len=640, seed=7
    )


@pytest.fixture
def on_cpu(folder: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)
    yield runner
    check_empty(runner.pool)


@pytest.fixture
def runner(place: str, folder: Path) -> Iterator[ModelRunner]:
    loaded = load(place, folder)
    yield loaded
    check_empty(loaded.pool)


@EVERY_OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 70])
@pytest.mark.parametrize("size", [(64, 64), (333, 1000), (640, 384)])
def test_linear_is_the_product(place: str, dtype: torch.dtype, rows: int, size: tuple[int, int]) -> None:
    """Of fresh random numbers, with and without a bias, also for odd sizes."""
    ops, device = ops_of(place), device_of(place)
    x, weight, bias = torch.randn(rows, size[1]), torch.randn(size).to(dtype), torch.randn(size[0])
    exact = x.double() @ weight.double().T
    poison(device)
    found = ops.linear(x.to(device), ops.stack([weight.to(device)]))
    allowed = 1e-2 if dtype is torch.bfloat16 else 1e-5
    assert found.dtype == torch.float32
    assert error_of(found, exact) < allowed
    with_bias = ops.linear(x.to(device), ops.stack([weight.to(device)]), bias.to(device))
    assert error_of(with_bias, exact + bias) < allowed


@EVERY_OPS
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("width", [48, 384, 4096])
def test_rms_norm_and_silu_are_near_float64(place: str, rows: int, width: int) -> None:
    """Of fresh random numbers."""
    ops, device = ops_of(place), device_of(place)
    x, weight, gate_up = torch.randn(rows, width) * 3, torch.randn(width), torch.randn(rows, 2 * width) * 5
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    gate, up = gate_up.double().chunk(2, dim=1)
    poison(device)
    assert error_of(ops.rms_norm(x.to(device), weight.to(device), 1e-6), exact) < 1e-5
    assert error_of(ops.gate_multiply(gate_up.to(device)), functional.silu(gate) * up) < 1e-5


@EVERY_OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(6, 2, 64), (32, 8, 128), (4, 1, 128), (3, 3, 16)])
def test_attention_is_near_float64_whatever_unused_slots_hold(
    place: str, dtype: torch.dtype, heads: int, groups: int, head_dim: int
) -> None:
    """Rotation and storing as on the CPU; slots that no list names hold NaN, and reach no row."""
    ops, device = ops_of(place), device_of(place)
    expected = attention_case(23, heads, groups, head_dim, seed=heads)
    caches = expected.key_cache.to(dtype).float(), expected.value_cache.to(dtype).float()
    expected = replace(expected, key_cache=caches[0], value_cache=caches[1])
    case = moved(expected, device)
    seen = torch.zeros(len(caches[0]), dtype=torch.bool)
    seen[expected.plan.key_slots.long()] = True
    on_device = [cache.to(dtype).masked_fill(~seen.to(device)[:, None, None], torch.nan) for cache in case_caches(case)]
    case = replace(case, key_cache=on_device[0], value_cache=on_device[1])
    poison(device)
    rotated = rotate(ops, case)
    exact = rotate(ReferenceOps(), expected)
    assert error_of(rotated, exact.double()) < 1e-5
    stored = case.key_cache[case.plan.slots].float().cpu()
    assert error_of(stored, expected.key_cache[expected.plan.slots].to(dtype).double()) < 1e-2
    # What was stored there is named by no list of another row, unless it was seen before.
    for mine, theirs in zip((case.key_cache, case.value_cache), caches, strict=True):
        theirs.copy_(mine.float().cpu().nan_to_num())
    exact = attend(ReferenceOps(), expected)
    found = attend(ops, replace(case, query=case.query.contiguous()))
    assert error_of(found, exact.double()) < (1e-2 if dtype is torch.bfloat16 else 1e-5)


def case_caches(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """Both caches."""
    return case.key_cache, case.value_cache


@EVERY_OPS
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("num_tokens", [7, 4096, 5003])
def test_draws_are_those_of_the_cpu(place: str, rows: int, num_tokens: int) -> None:
    """On equal logits, at several temperatures, masked, ranked, and with padding behind the vocabulary."""
    ops, device = ops_of(place), device_of(place)
    generator = torch.Generator().manual_seed(rows)
    logits, keys = torch.randn(rows, num_tokens + 3, generator=generator) * 4, keys_of(rows, generator)
    temperatures = torch.tensor([0.0, 0.7, 1.0], dtype=torch.float64).repeat(rows)[:rows]
    reference, scores = ReferenceOps(), logits[:, :num_tokens].contiguous()
    expected = reference.choose(logits, temperatures, keys, num_tokens)
    assert ops.choose(*(each.to(device) for each in (logits, temperatures, keys)), num_tokens).tolist() == (
        expected.tolist()
    )
    drawn = ops.draw(scores.to(device), keys.to(device))
    assert drawn.tolist() == reference.draw(scores, keys).tolist()
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, -(-num_tokens // 32)), dtype=torch.int32, generator=generator)
    masked = ops.mask(scores.to(device), bits.to(device))
    assert torch.equal(masked.cpu(), reference.mask(scores, bits))
    scales = torch.ones(rows, dtype=torch.float64)
    ids, shares = ops.rank(scores.to(device), scales.to(device), 5, keys.to(device))
    expected_ids, expected_shares = reference.rank(scores, scales, 5, keys)
    assert ids.tolist() == expected_ids.tolist()
    assert torch.allclose(shares.cpu(), expected_shares, rtol=1e-9, atol=0)
    assert torch.allclose(ops.softmax(scores.to(device)).cpu(), reference.softmax(scores), rtol=1e-12, atol=0)


@EVERY_OPS
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_draw_are_refused(place: str, fault: float) -> None:
    """NaN, infinity, and a row of nothing but -inf, each in one row of several; a card gives it a negative id."""
    ops, device = ops_of(place), device_of(place)
    logits = torch.randn(4, 300)
    logits[2] = fault
    temperatures = torch.ones(4, dtype=torch.float64)
    inputs = logits.to(device), temperatures.to(device), torch.arange(4, device=device)
    if place == "cpu":
        with pytest.raises(ValueError, match="finite"):
            ops.choose(*inputs, 300)
    else:
        assert [token_id < 0 for token_id in ops.choose(*inputs, 300).tolist()] == [False, False, True, False]


def in_pieces(runner: ModelRunner) -> list[Tensor]:
    """A prompt that is read in several forwards, and a step behind it."""
    session = runner.open(random_ids(90, vocab_size=VOCABULARY_SIZE), 90)
    result = runner.forward([Feed(session)], 16)
    while result.ranges[0] is None:
        result = runner.forward([Feed(session)], 16)
    logits = [result.logits.clone()]
    session.extend([5])
    logits += finish(runner, Feed(session))
    session.free()
    return logits


def kept(runner: ModelRunner) -> list[Tensor]:
    """A tree, of which a path is kept whose rows have to be moved, and a step behind it."""
    session = runner.open(random_ids(20, vocab_size=VOCABULARY_SIZE), 20)
    logits = finish(runner, Feed(session, TREE))
    session.keep(TREE.path(7))
    logits += finish(runner, Feed(session))
    session.extend([9])
    logits += finish(runner, Feed(session))
    session.free()
    return logits


def truncated(runner: ModelRunner) -> list[Tensor]:
    """A session that is cut back and goes on with other tokens."""
    session = runner.open(random_ids(50, vocab_size=VOCABULARY_SIZE), 50)
    logits = finish(runner, Feed(session))
    session.truncate(31)
    session.extend([8, 7, 6])
    logits += finish(runner, Feed(session, TokenTree.chain((3, 4))))
    session.free()
    return logits


def forked(runner: ModelRunner) -> list[Tensor]:
    """Two sessions that part in a block, each on its own path of one tree."""
    session = runner.open(random_ids(21, vocab_size=VOCABULARY_SIZE), 21)
    logits = finish(runner, Feed(session, TREE))
    twin = session.fork(TREE.path(8))
    session.keep(TREE.path(7))
    logits += finish(runner, Feed(session), Feed(twin))
    session.free()
    logits += finish(runner, Feed(twin, TokenTree.chain((2, 3))))
    twin.free()
    return logits


def cancelled(runner: ModelRunner) -> list[Tensor]:
    """One of two sessions is freed in the middle of its prompt, and its blocks serve the next."""
    first, second = (runner.open(random_ids(count, vocab_size=VOCABULARY_SIZE), count) for count in (300, 30))
    runner.forward([Feed(first), Feed(second)], 64)
    first.free()
    logits = finish(runner, Feed(second, TREE))
    third = runner.open(random_ids(280, seed=4, vocab_size=VOCABULARY_SIZE), 280)
    logits += finish(runner, Feed(third))
    second.free()
    third.free()
    return logits


@EVERYWHERE
@pytest.mark.parametrize("script", [in_pieces, kept, truncated, forked, cancelled], ids=lambda script: script.__name__)
def test_sessions_compute_what_they_do_on_the_cpu(
    runner: ModelRunner, on_cpu: ModelRunner, script: Callable[[ModelRunner], list[Tensor]]
) -> None:
    """Logits of every forward, with NaN in all slots before."""
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(torch.nan)
    for found, expected in zip(script(runner), script(on_cpu), strict=True):
        assert found.shape == expected.shape
        assert error_of(found, expected.double()) < 1e-4


@EVERYWHERE
@pytest.mark.parametrize(
    ("family", "keys"),
    [("qwen2", {}), ("qwen3", {}), ("mistral", {"sliding_window": 24}), ("llama", {"num_key_value_heads": 1})],
)
def test_families_compute_what_they_do_on_the_cpu(
    place: str, tmp_path: Path, family: str, keys: dict[str, object]
) -> None:
    """Biases, norms of heads, windows, and one group of all heads."""
    folder = write_tiny_model(tmp_path / "model", family, vocab_size=VOCABULARY_SIZE, context_len=640, **keys)
    runner, on_cpu = load(place, folder), ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)
    for script in (in_pieces, kept):
        for found, expected in zip(script(runner), script(on_cpu), strict=True):
            assert error_of(found, expected.double()) < 1e-4


@pytest.mark.parametrize("place", INVARIANT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_row_are_its_own(place: str, folder: Path, dtype: str) -> None:
    """Of a session among others and alone, of a tree and of plain steps; also what is cached."""
    runner = load(place, folder, dtype)
    prompts = [random_ids(20 + 60 * number, seed=number, vocab_size=VOCABULARY_SIZE) for number in range(8)]
    sessions = [runner.open(prompt, len(prompt)) for prompt in prompts]
    finish(runner, *(Feed(session) for session in sessions))
    together = finish(runner, *(Feed(session, TREE) for session in sessions))
    for session, logits in zip(sessions, together, strict=True):
        alone, _, _ = fresh(runner, session.token_ids, TREE)
        assert torch.equal(logits, alone)
        for row in range(1, len(TREE) + 1):
            path = [TREE.token_ids[each - 1] for each in TREE.path(row)]
            assert torch.equal(decoded(runner, [*session.token_ids, *path], len(session))[-1], logits[row])
        session.keep(TREE.path(7))
        assert_like_fresh(runner, session)
    close(runner, *sessions)


@pytest.mark.parametrize("place", INVARIANT[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [[], [0, 1, 2]], ids=["plain", "tapped"])
def test_graphs_have_the_bits_of_launches(place: str, folder: Path, dtype: str, taps: list[int]) -> None:
    """Of every number of rows up to a few more than are recorded, going up and down; and what is tapped."""
    found: list[list[Tensor]] = []
    for runner in (load(place, folder, dtype), load("triton", folder, dtype)):
        if taps:
            runner.tap(taps)
        session = runner.open(random_ids(300, vocab_size=VOCABULARY_SIZE), 300)
        logits = finish(runner, Feed(session))
        for count in (*range(70), 3, 64, 1):
            token_ids = random_ids(count, seed=count, vocab_size=VOCABULARY_SIZE)
            logits += finish(runner, Feed(session, TokenTree.chain(token_ids)))
        slots = torch.from_numpy(session.table.slots(0, len(session) + 1)).to(runner.device)
        found.append([*logits, runner.cache.features.index_select(0, slots)])
        close(runner, session)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@EVERYWHERE
@pytest.mark.parametrize("spec", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu_in_float32(runner: ModelRunner, on_cpu: ModelRunner, spec: object) -> None:
    """Plain decoding, step by step."""
    assert plain(runner, spec) == plain(on_cpu, spec)


@EVERYWHERE
def test_bfloat16_is_near_float32(place: str, folder: Path, on_cpu: ModelRunner) -> None:
    """What a card serves by default: weights and cache of 16 bits."""
    runner = load(place, folder, "bfloat16")
    for found, expected in zip(kept(runner), kept(on_cpu), strict=True):
        assert error_of(found, expected.double()) < 0.1
    check_empty(runner.pool)


def drafter_of(kind: str, runner: ModelRunner, place: str, draft_folder: Path) -> Drafter:
    """A drafter in the target's process, on its device."""
    if kind == "hosted":
        return HostedModel(load(place, draft_folder))
    if kind == "layer skip":
        return LayerSkip(runner, 1)
    if kind == LOOKAHEAD:
        return ProbeDrafter(runner, LOOKAHEAD, Lookahead)
    if kind == PASS:
        rows = torch.randn(3, runner.model.embedding.shape[1], device=runner.device)
        return ProbeDrafter(runner, PASS, partial(PassChain, embed_probes(runner, rows)))
    return host_head(runner, random_head(runner, Fuse[kind]), "")


@EVERYWHERE
@pytest.mark.parametrize("spec", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["hosted", "layer skip", LOOKAHEAD, PASS, "WIDE", "PAIR", "REVERSED"])
def test_drafters_change_no_token(
    place: str, folder: Path, draft_folder: Path, on_cpu: ModelRunner, spec: object, kind: str
) -> None:
    """Whatever guesses in the target's process, on its device, in float32, where ties are too rare to be met."""
    runner = load(place, folder)
    own = OwnTarget(runner, drafter_of(kind, runner, place, draft_folder))
    answers = own.to_the_end(spec, 4)
    assert own.tokens == plain(on_cpu, spec)
    # One that fails makes no guesses, and changes no token either.
    assert sum(len(answer.content.hosted.tree) for answer in answers) > 0
    own.table.clear()
    check_empty(runner.pool)


@EVERYWHERE
def test_chains_are_those_of_single_steps(runner: ModelRunner) -> None:
    """Seven guesses in one call, over the edge of a chunk of keys too."""
    for length in (len(PROMPT), 254):
        spec, found = spec_of(tuple(random_ids(length, 1, VOCABULARY_SIZE)), 300, eos=(), temperature=1.0), []
        for line_s in (0.0, 10.0):
            draft = Draft(runner, line_s=line_s)
            draft.open(spec, 1)
            first = draft.guesses()
            draft.advance(1, length + 1, first, 7)
            found.append((*first, *draft.guesses()))
            draft.table.clear()
        assert found[0] == found[1]
        assert len(found[0]) == 8


@pytest.mark.parametrize("place", ON_CARDS)
@pytest.mark.parametrize("tree", [TokenTree(), TokenTree.chain((1, 2, 3)), TREE], ids=["step", "chain", "tree"])
def test_a_forward_does_not_wait_for_the_device(runner: ModelRunner, tree: TokenTree) -> None:
    """Neither the plan nor an operation asks it anything; only what draws does."""
    session = runner.open(random_ids(20, vocab_size=VOCABULARY_SIZE), 20)
    finish(runner, Feed(session, tree))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.forward([Feed(session, tree)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    session.free()
