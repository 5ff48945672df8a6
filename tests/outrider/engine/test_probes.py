"""Probes: rows beside a proposal whose logits are wanted, which are never kept and change no other row's bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models.engine_cases import TREE, assert_like_fresh, close, finish, fresh, make_feeds, random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.models.transformer import Transformer
from outrider.engine.runner import ModelRunner
from outrider.engine.sharing import share_rows
from outrider.errors import CacheFull, InvalidRequest, ModelRefused
from outrider.token_tree import EMPTY, TokenTree

VOCAB, CONTEXT_LEN, KV_TOKENS = 300, 96, 512
# A window of three columns, as Lookahead's, and a chain.
WINDOW = TokenTree(token_ids=(9, 8, 7, 6, 5, 4, 3, 2), parents=(0, 1, 0, 3, 1, 5, 2, 7))
PROBES = {"chain": TokenTree.chain((9, 8, 7)), "window": WINDOW}
CHAIN = TokenTree.chain((4, 5))
TIED = {"llama": False, "qwen2": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("probed")
    families = (*TIED, "gpt2")
    return {name: write_tiny_model(root / name, name, VOCAB, context_len=CONTEXT_LEN) for name in families}


@pytest.fixture
def runner(folders: dict[str, Path]) -> Iterator[ModelRunner]:
    loaded = ModelRunner.load(str(folders["llama"]), dtype="float32", kv_tokens=KV_TOKENS)
    yield loaded
    close(loaded)


def computed(runner: ModelRunner, feed: Feed, *others: Feed) -> tuple[Tensor, Tensor]:
    """Logits of a feed's root and tree, and of its probes, in a forward with others."""
    result = runner.forward([*others, feed])
    rows, probed = result.ranges[-1], result.probes[len(others)]
    assert rows is not None
    assert (len(rows), len(probed)) == (len(feed.tree) + 1, len(feed.probes))
    return result.logits[rows.start : rows.stop].clone(), result.logits[probed.start : probed.stop].clone()


@pytest.mark.parametrize(
    ("tree", "kept"), [(EMPTY, ()), (CHAIN, (1,)), (CHAIN, (1, 2)), (TREE, (1, 3)), (TREE, (2, 5, 6, 7))]
)
@pytest.mark.parametrize("probes", PROBES)
def test_a_tree_s_bits_are_the_same_with_probes(
    runner: ModelRunner, tree: TokenTree, kept: tuple[int, ...], probes: str
) -> None:
    """Its logits, and what is cached once some of its rows are kept; and the probes' logits are those of a tree."""
    token_ids, others = random_ids(21, vocab_size=VOCAB), [runner.open([3, 5], 1), runner.open(range(7, 20), 1)]
    session = runner.open(token_ids, 1)
    feeds = [Feed(others[0], probes=WINDOW), Feed(others[1], TokenTree.chain((1, 2)))]
    logits, probed = computed(runner, Feed(session, tree, probes=PROBES[probes]), *feeds)
    assert torch.equal(logits, fresh(runner, token_ids, tree)[0])
    assert torch.equal(probed, fresh(runner, token_ids, PROBES[probes])[0][1:])
    session.keep(kept)
    assert_like_fresh(runner, session)
    session.extend([17])
    assert torch.equal(finish(runner, Feed(session))[0], fresh(runner, session.token_ids)[0])
    assert_like_fresh(runner, session)
    close(runner, session, *others)


def test_probes_wait_for_the_last_token_of_a_prompt(runner: ModelRunner) -> None:
    """A prompt in pieces computes them with its last one, and never parts them."""
    session = runner.open(random_ids(40, vocab_size=VOCAB), 1)
    runner.max_rows = 12
    feed, sizes = Feed(session, CHAIN, probes=WINDOW), []
    while True:
        result = runner.forward([feed])
        sizes.append(result.grants[0])
        if result.ranges[0] is not None:
            break
        assert result.probes == {}
    assert sizes == [12, 12, 12, 3, 11]
    assert (result.ranges[0], result.probes[0]) == (range(3), range(3, 11))
    assert torch.equal(result.logits[3:], fresh(runner, session.token_ids, WINDOW)[0][1:])
    close(runner, session)


def test_probes_count_as_rows() -> None:
    """Where a forward has no room for all, they are granted with the last token or not at all."""
    [feed] = make_feeds((30, 29, 4))
    probing = feed._replace(probes=WINDOW)
    assert share_rows([probing], 13, 99) == [13]
    assert share_rows([probing], 12, 99) == [0]
    assert share_rows([probing._replace(tree=EMPTY)], 8, 99) == [0]


def test_a_probe_is_never_kept(runner: ModelRunner) -> None:
    """Its row is no row of the tree, whether that has fewer rows or none."""
    session = runner.open([1, 2, 3], 1)
    for tree, probe in ((EMPTY, 1), (CHAIN, 3)):
        runner.forward([Feed(session, tree, probes=WINDOW)])
        with pytest.raises(ValueError, match=f"rows \\({probe},\\) are not a path"):
            session.keep((probe,))
    session.keep((1, 2))
    assert_like_fresh(runner, session)
    close(runner, session)


def test_others_never_find_a_probe_s_row(runner: ModelRunner) -> None:
    """Not even where probes and tokens fill a block together, and the probes are the very tokens that come next."""
    token_ids = random_ids(32, vocab_size=VOCAB)
    session = runner.open(token_ids[:26], 1, b"")
    probes = TokenTree.chain(token_ids[26:])
    runner.forward([Feed(session, TokenTree.chain((1, 2)), probes=probes)])
    session.publish(len(session))
    session.keep((1,))
    session.publish(len(session))
    other = runner.open(token_ids, 1, b"")
    assert other.take_prefix() == 16
    finish(runner, Feed(other))
    other.publish(len(other))
    assert_like_fresh(runner, other)
    close(runner, session, other)


def test_blocks_are_taken_for_probes_and_given_back(runner: ModelRunner) -> None:
    """As for a tree's rows; without room nothing has changed."""
    session = runner.open([5] * 15, 1)
    runner.forward([Feed(session, probes=WINDOW)])
    assert len(session.table) == 2
    session.keep(())
    assert len(session.table) == 1
    hog = runner.open([5], 1)
    hog.table.reserve(runner.pool.num_free * runner.pool.block_size)
    with pytest.raises(CacheFull):
        runner.forward([Feed(session, probes=WINDOW)])
    assert len(session.table) == 1
    hog.free()
    assert_like_fresh(runner, session)
    close(runner, session)


def test_probes_that_can_never_run_are_refused(runner: ModelRunner) -> None:
    """Each with a sentence that says where it ends."""
    session = runner.open([1] * 90, 1)
    runner.max_rows = 10
    cases = {
        "probes is '7 deep', but must be at most 6 deep here": Feed(session, probes=TokenTree.chain(range(7))),
        "probes is '8 rows', but must be at most 7 rows": Feed(session, TokenTree.chain((1, 2)), probes=WINDOW),
        "token_ids is 300, but must be in [0, 300)": Feed(session, probes=TokenTree.chain((VOCAB,))),
    }
    for sentence, feed in cases.items():
        with pytest.raises(InvalidRequest) as caught:
            runner.forward([feed])
        assert caught.value.message == sentence
    close(runner, session)


@pytest.mark.parametrize("family", TIED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_of_its_own_is_read_by_probes_alone(folders: dict[str, Path], family: str, dtype: str) -> None:
    """With a token's embedding a probe has that token's bits; no text and no tree may have its id."""
    plain = ModelRunner.load(str(folders[family]), dtype=dtype, kv_tokens=KV_TOKENS)
    runner = ModelRunner.load(str(folders[family]), dtype=dtype, kv_tokens=KV_TOKENS)
    assert runner.extend(plain.model.embedding[[8, 9]].float()) == range(VOCAB, VOCAB + 2)
    assert runner.extend(plain.model.embedding[[7]].float()) == range(VOCAB + 2, VOCAB + 3)
    assert runner.parts.embedding.shape == plain.parts.embedding.shape
    token_ids = random_ids(12, vocab_size=VOCAB)
    session = runner.open(token_ids, 1)
    probes = TokenTree.chain((VOCAB + 1, VOCAB, VOCAB + 2))
    logits, probed = computed(runner, Feed(session, TREE, probes=probes))
    assert torch.equal(logits, fresh(plain, token_ids, TREE)[0])
    assert torch.equal(probed, fresh(plain, token_ids, TokenTree.chain((9, 8, 7)))[0][1:])
    assert logits.shape[1] == VOCAB
    for refused in (Feed(session, TokenTree.chain((VOCAB,))), Feed(session, probes=TokenTree.chain((VOCAB + 3,)))):
        with pytest.raises(InvalidRequest, match="token_ids is 30"):
            runner.forward([refused])
    with pytest.raises(InvalidRequest, match="token_ids is 300"):
        runner.open([1, VOCAB], 1)
    close(runner, session)


def test_the_model_reads_it_op_by_op_too(folders: dict[str, Path]) -> None:
    """Bit for bit, and each row of it makes other logits."""
    found = []
    for is_fused in (True, False):
        runner = ModelRunner.load(str(folders["llama"]), dtype="float32", kv_tokens=KV_TOKENS)
        if not is_fused:
            runner.model = runner.model._model  # type: ignore[attr-defined]
            assert isinstance(runner.model, Transformer)
        rows = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
        session = runner.open([5, 6, 7], 1)
        found.append(computed(runner, Feed(session, probes=TokenTree.chain(runner.extend(rows))))[1])
        close(runner, session)
    assert torch.equal(*found)
    assert len(found[0].argmax(1).unique()) == 3


def test_code_of_others_embeds_no_probes(folders: dict[str, Path]) -> None:
    """What transformers computes has no room for them, and says so."""
    runner = ModelRunner.load(str(folders["gpt2"]), dtype="float32", kv_tokens=KV_TOKENS)
    with pytest.raises(ModelRefused, match="gpt2 cannot embed probes"):
        runner.extend(torch.zeros(1, 48))
