"""The ragged tree forward: bitwise the same logits and caches, however the work is cut up and whatever shares it."""

import functools
import itertools
import time
from pathlib import Path

import pytest
import torch
from support.models.engine_cases import TREE, assert_like_fresh, close, finish, fresh, random_ids
from support.models.tiny_models import TARGET, write_tiny_model

from outrider.engine import runner as runner_module
from outrider.engine.batching import Feed
from outrider.engine.models import decoder
from outrider.engine.ops.library import load_kernels
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ForwardCounts, ModelRunner
from outrider.engine.session import Session
from outrider.errors import CacheFull, InvalidRequest, ModelRefused, PromptTooLong
from outrider.token_tree import EMPTY, TokenTree

DTYPES = ["bfloat16", "float32", "int8", "int4", "bfloat16/bfloat16"]


@functools.cache
def target(types: str) -> ModelRunner:
    """The embedded target with two threads, loaded once: types of weights, and of keys and values behind a stroke."""
    dtype, _, kv_dtype = types.partition("/")
    return ModelRunner.load(str(TARGET), dtype=dtype, num_threads=2, kv_tokens=4096, kv_dtype=kv_dtype or "auto")


@pytest.fixture(params=DTYPES)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """The target in both weight types, with an empty pool that must be whole and empty again at the end."""
    loaded = target(request.param)
    assert loaded.pool.num_used == 0
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [0, 8])
@pytest.mark.parametrize("batch", [1, 16])
def test_rows_do_not_depend_on_their_neighbours(runner: ModelRunner, num_rows: int, batch: int) -> None:
    """K = 0 and 8, batch 1 and 16: each session's logits and cache are those of a forward of its own."""
    prompts = [random_ids(20 + 3 * index, seed=index) for index in range(batch)]
    trees = [TokenTree.chain(random_ids(num_rows, seed=100 + index)) for index in range(batch)]
    sessions = [runner.open(prompt, 1) for prompt in prompts]
    together = finish(runner, *(Feed(session, tree) for session, tree in zip(sessions, trees, strict=True)))
    for session, tree, logits in zip(sessions, trees, together, strict=True):
        expected, _, _ = fresh(runner, session.token_ids, tree)
        assert torch.equal(logits, expected)
        assert_like_fresh(runner, session)
    close(runner, *sessions)


@pytest.mark.parametrize(
    "chunks", [[1] * 70, [7] * 10, [1, 68, 1], [16, 17, 37]], ids=["ones", "sevens", "edges", "blocks"]
)
def test_chunking_changes_no_bit(runner: ModelRunner, chunks: list[int]) -> None:
    """A prompt at once, chunk by chunk and token by token leaves the same logits and the same cache."""
    token_ids = random_ids(sum(chunks))
    ends = list(itertools.accumulate(chunks))
    session = runner.open(token_ids[: ends[0]], 1)
    finish(runner, Feed(session))
    for start, end in itertools.pairwise(ends):
        session.extend(token_ids[start:end])
        logits = finish(runner, Feed(session))[0]
    assert torch.equal(logits, fresh(runner, token_ids)[0])
    assert_like_fresh(runner, session)
    close(runner, session)


@pytest.mark.slow
def test_long_prompts_are_chunked_beside_decoding_sessions(runner: ModelRunner) -> None:
    """The first of two prompts gets what max_rows leaves; the decoding session is served at once; no bit changes."""
    long = [runner.open(random_ids(700, seed=index), 1) for index in (1, 2)]
    short = runner.open(random_ids(12), 1)
    finish(runner, Feed(short))
    short.extend([5])
    first = runner.forward([*(Feed(session) for session in long), Feed(short, TREE)])
    assert first.ranges == [None, None, range(9)]
    assert first.logits.shape == (9, 4096)
    assert first.grants == [runner.max_rows - 9, 0, 9]
    assert [session.cached_len for session in long] == first.grants[:2]
    second = runner.forward([Feed(session) for session in long], max_prompt_rows=150)
    assert second.grants == [150, 0]
    logits = finish(runner, Feed(long[0], TREE), Feed(long[1]))
    for session, tree, rows in zip(long, (TREE, EMPTY), logits, strict=True):
        assert torch.equal(rows, fresh(runner, session.token_ids, tree)[0])
    close(runner, *long, short)


def test_a_tree_equals_one_forward_per_path(runner: ModelRunner) -> None:
    """Every row's logits are those of plain decoding along its path."""
    prompt = random_ids(37)
    session = runner.open(prompt, 1)
    logits = finish(runner, Feed(session, TREE))[0]
    assert logits.shape == (9, 4096)
    for row in range(9):
        path = [TREE.token_ids[ancestor - 1] for ancestor in TREE.path(row)]
        assert torch.equal(logits[row], fresh(runner, [*prompt, *path])[0][-1])
    close(runner, session)


def test_a_row_that_saw_its_sibling_would_be_noticed(runner: ModelRunner) -> None:
    """The comparison is sharp: the same tokens as a chain, where row 2 also sees row 1, differ."""
    prompt = random_ids(37)
    tree, chain = TokenTree((11, 22), (0, 0)), TokenTree.chain((11, 22))
    assert not torch.equal(fresh(runner, prompt, tree)[0][2], fresh(runner, prompt, chain)[0][2])


@pytest.mark.slow
@pytest.mark.parametrize("row", range(9))
def test_kept_rows_are_like_a_fresh_prefill(runner: ModelRunner, row: int) -> None:
    """Whatever path is kept, cache and next logits are those of a session that never saw a tree."""
    session, neighbour = runner.open(random_ids(29), 1), runner.open(random_ids(33, seed=1), 1)
    finish(runner, Feed(session, TREE), Feed(neighbour, TREE))
    session.keep(TREE.path(row))
    assert_like_fresh(runner, session)
    session.extend([99])
    logits = finish(runner, Feed(session, TREE))[0]
    assert torch.equal(logits, fresh(runner, session.token_ids, TREE)[0])
    close(runner, session, neighbour)


def test_rollback_is_truncation(runner: ModelRunner) -> None:
    """After truncating, twice, cache and next logits are like those of a session that never went further."""
    session = runner.open(random_ids(50), 1)
    finish(runner, Feed(session, TREE))
    session.keep((2, 5))
    for length in (50, 31, 31, 1):
        session.truncate(length)
        assert_like_fresh(runner, session)
        assert torch.equal(finish(runner, Feed(session))[0], fresh(runner, session.token_ids)[0])
        assert_like_fresh(runner, session)
    close(runner, session)


def test_replaced_tail_is_like_a_fresh_prefill(runner: ModelRunner) -> None:
    """A draft that guessed wrong goes on from the common prefix."""
    session = runner.open(random_ids(40), 1)
    finish(runner, Feed(session))
    session.replace_tail(30, [*session.token_ids[30:33], 7, 8, 9])
    assert session.cached_len == 33
    assert torch.equal(finish(runner, Feed(session, TREE))[0], fresh(runner, session.token_ids, TREE)[0])
    assert_like_fresh(runner, session)
    close(runner, session)


def test_forked_session_does_not_disturb_its_twin(runner: ModelRunner) -> None:
    """Two sessions over shared blocks write apart, and both stay exact."""
    session = runner.open(random_ids(45), 1)
    finish(runner, Feed(session))
    twin = Session(session.table.fork(42), session.token_ids[:42], 1)
    twin.advance(42, EMPTY)
    twin.extend([1, 2, 3])
    session.extend([4])
    finish(runner, Feed(twin, TREE), Feed(session, TREE))
    twin.keep((1, 3, 8))
    assert_like_fresh(runner, twin)
    assert_like_fresh(runner, session)
    close(runner, twin, session)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("kernels", ["chosen", "reference"])
def test_every_family_is_exact_with_and_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kernels: str
) -> None:
    """Awkward sizes and the operations without compiled kernels keep the same promise."""
    if kernels == "reference":
        monkeypatch.setattr(runner_module, "choose_ops", lambda *given: ReferenceOps(given[2]))
    runner = ModelRunner.load(str(write_tiny_model(tmp_path / "tiny", family)), kv_tokens=512)
    prompt = [token_id % 300 for token_id in random_ids(40)]
    session = runner.open(prompt[:9], 1)
    finish(runner, Feed(session))
    session.extend(prompt[9:])
    logits = finish(runner, Feed(session, TREE))[0]
    assert torch.equal(logits, fresh(runner, prompt, TREE)[0])
    for row in range(9):
        path = [TREE.token_ids[ancestor - 1] for ancestor in TREE.path(row)]
        assert torch.equal(logits[row], fresh(runner, [*prompt, *path])[0][-1])
    session.keep((2, 5, 6, 7))
    assert_like_fresh(runner, session)
    close(runner, session)


def test_full_cache_refuses_before_anything_changes(tmp_path: Path) -> None:
    """The caller learns which session does not fit, fails it alone, and the others go on."""
    runner = ModelRunner.load(str(write_tiny_model(tmp_path / "tiny", "llama")), kv_tokens=64)
    first, second = runner.open([1] * 40, 1), runner.open([2] * 20, 1)
    finish(runner, Feed(first))
    with pytest.raises(CacheFull, match="1 of 4 blocks free"):
        second.reserve(1)
    with pytest.raises(CacheFull):
        runner.forward([Feed(first), Feed(second)])
    assert (second.cached_len, first.cached_len, len(second.table)) == (0, 40, 0)
    second.truncate(16)
    finish(runner, Feed(first), Feed(second))
    close(runner, first, second)


def test_impossible_feeds_are_refused(tmp_path: Path) -> None:
    """Past the context, wider than a forward, unknown ids, the same session twice: refused before any computing."""
    runner = ModelRunner.load(str(write_tiny_model(tmp_path / "tiny", "mistral", context_len=128)))
    assert runner.context_len == 128
    with pytest.raises(PromptTooLong, match="129 tokens are more than the model's context of 128"):
        runner.open([1] * 129, 1)
    with pytest.raises(InvalidRequest, match="token_ids is 300"):
        runner.open([1, 300], 1)
    session = runner.open([1] * 126, 1)
    finish(runner, Feed(session, TokenTree((1, 2, 3), (0, 0, 2))))
    for tree in (TokenTree.chain([1, 2, 3]), TokenTree((1,) * 512, (0,) * 512), TokenTree.chain([300])):
        with pytest.raises(InvalidRequest):
            runner.forward([Feed(session, tree)])
    session.extend([-1])
    with pytest.raises(InvalidRequest, match="token_ids is -1"):
        runner.forward([Feed(session)])
    with pytest.raises(ValueError, match="only once"):
        runner.forward([Feed(session), Feed(session)])
    close(runner, session)


def test_forward_of_nothing_is_empty(runner: ModelRunner) -> None:
    """No feeds, no rows."""
    result = runner.forward([])
    assert (result.logits.shape, result.ranges) == ((0, 4096), [])


def test_runner_describes_itself() -> None:
    """What GetModelInfo reports comes from here."""
    runner = target("bfloat16")
    assert runner.identity.model_name == "target"
    assert runner.numerics_id == f"cpu-bfloat16-{runner.ops.name}"
    assert (runner.context_len, runner.vocabulary_size, runner.config.eos_token_ids) == (4096, 4096, {0})
    assert len(runner.identity.model_hash) == 32
    assert str(runner.device) == "cpu"


# Of the embedded target: keys and values of two groups of 64 in six layers, in float32.
TOKEN_BYTES = 2 * 6 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("free_tokens", "options", "expected"),
    [
        (1 << 24, {}, (87_376, 4096)),
        (5000, {}, (2000, 2000)),
        (5000, {"kv_tokens": 5000}, (5008, 4096)),
        (5000, {"context_len": 3000}, (3008, 3000)),
    ],
)
def test_cache_and_context_are_what_fits_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, free_tokens: int, options: dict[str, int], expected: tuple[int, int]
) -> None:
    """With the reason; what is asked for is taken, in whole blocks."""
    monkeypatch.setattr(decoder, "available_bytes", lambda: free_tokens * TOKEN_BYTES)
    runner = ModelRunner.load(str(TARGET), num_threads=2, **options)  # type: ignore[arg-type] - whole numbers
    assert (runner.pool.num_blocks * runner.pool.block_size, runner.context_len) == expected
    assert f"{expected[0] if not options else next(iter(options.values())):,} tokens in" in runner.cache_reason


def test_sessions_may_be_shorter_than_what_the_model_reads() -> None:
    """A longer one is refused at its beginning, and tokens are those of the whole context."""
    short = ModelRunner.load(str(TARGET), num_threads=2, context_len=8)
    assert (short.context_len, short.config.context_len) == (8, 4096)
    with pytest.raises(PromptTooLong, match="9 tokens are more than the model's context of 8"):
        short.open(range(1, 10), 9)
    assert len(short.open(range(1, 9), 8)) == 8


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"context_len": 0}, InvalidRequest),
        ({"context_len": 4097}, InvalidRequest),
        ({"device": "tpu"}, InvalidRequest),
        ({"device": "meta"}, InvalidRequest),
        ({"device": "cuda:99"}, InvalidRequest),
        ({"dtype": "float16"}, InvalidRequest),
        ({"num_threads": 0}, InvalidRequest),
        ({"kv_tokens": 0}, InvalidRequest),
        ({"vocabulary_size": 4097}, ModelRefused),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], error: type[Exception]) -> None:
    """The option and its limit are named before a weight is read."""
    with pytest.raises(error):
        ModelRunner.load(str(TARGET), **options)  # type: ignore[arg-type]


@pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_heads_too_wide_for_the_kernels_are_refused_before_loading(tmp_path: Path, family: str) -> None:
    """In a sentence, and without a look at a weight."""
    folder = write_tiny_model(tmp_path / "tiny", family, head_dim=1024)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelRefused, match=r"^tiny has heads of 1024, but at most 512 fit the kernels$"):
        ModelRunner.load(str(folder), kv_tokens=64)


def test_what_reading_costs_is_learnt_where_much_is_read() -> None:
    """Not from small pieces, nor where most rows are others'; the last forward is known in any case."""
    counts = ForwardCounts()
    for num_rows, num_prompt_rows, seconds in ((63, 63, 1.0), (300, 100, 2.0)):
        counts.add(1, num_rows, num_prompt_rows)
        counts.end(seconds)
        assert (counts.last, counts.reading_row_s) == ((seconds, num_rows), 0.0)
    for seconds, row_s in ((1.0, 0.01), (2.0, 0.0125)):
        counts.add(2, 100, 64)
        counts.end(seconds)
        assert counts.reading_row_s == pytest.approx(row_s)
    assert counts.busy_s == 6.0


def test_the_device_is_busy_from_a_forward_to_its_end(runner: ModelRunner) -> None:
    """The time between them counts, once; a forward of nothing has none."""
    session = runner.open(random_ids(9), 1)
    before, started = runner.forward_counts.busy_s, time.perf_counter()
    runner.forward([Feed(session)])
    runner.finish()
    busy_s = runner.forward_counts.busy_s - before
    assert 0 < busy_s < time.perf_counter() - started
    runner.forward([])
    runner.finish()
    assert runner.forward_counts.busy_s - before == busy_s
    close(runner, session)
