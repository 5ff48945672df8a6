"""Probes: rows beside a proposal whose logits are wanted, which are never kept and change no other row's bits."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from support.basics import spec_of
from support.models.engine_cases import TREE, assert_like_fresh, close, finish, fresh, make_feeds, random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.drafters.drafter import NO_GUESSES
from outrider.drafters.shelf.probing import Lookahead, PassChain, ProbeDraft, ProbeRows, embed_probes
from outrider.engine.batching import Feed
from outrider.engine.models.transformer import Transformer
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.engine.sharing import share_rows
from outrider.errors import InvalidRequest, ModelRefused
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


class SeenRows(ProbeRows):
    """Keeps the logits after the probes, of which drafts get the likeliest tokens alone."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.logits: dict[Session, Tensor] = {}

    def take(self, feeds: Sequence[Feed], logits: Tensor, ranges: list[range | None]) -> None:
        whole = list(ranges)
        super().take(feeds, logits, ranges)
        for feed, before, rows in zip(feeds, whole, ranges, strict=True):
            if before is not None and rows is not None and len(before) > len(rows):
                self.logits[feed.session] = logits[rows.stop : before.stop].clone()


def probed(runner: ModelRunner, session: Session, probes: TokenTree) -> ProbeDraft:
    """A draft that wants these probes in the session's next forward."""
    rows = SeenRows.in_forwards_of(runner)
    draft = ProbeDraft(spec_of([1], 2), Lookahead, rows)
    draft.probes = probes
    rows.drafts[session] = draft
    return draft


def computed(runner: ModelRunner, feed: Feed, probes: TokenTree, *others: Feed) -> tuple[Tensor, Tensor]:
    """Logits of a feed's root and tree, and of its probes, in a forward with others."""
    draft = probed(runner, feed.session, probes)
    result = runner.forward([*others, feed])
    rows, found = result.ranges[-1], SeenRows.in_forwards_of(runner).logits[feed.session]
    assert rows is not None
    assert (len(rows), len(found), draft.probes) == (len(feed.tree) + 1, len(probes), EMPTY)
    return result.logits[rows.start : rows.stop].clone(), found


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
    probed(runner, others[0], WINDOW)
    feeds = [Feed(others[0]), Feed(others[1], TokenTree.chain((1, 2)))]
    logits, found = computed(runner, Feed(session, tree), PROBES[probes], *feeds)
    assert torch.equal(logits, fresh(runner, token_ids, tree)[0])
    assert torch.equal(found, fresh(runner, token_ids, PROBES[probes])[0][1:])
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
    draft, seen = probed(runner, session, WINDOW), SeenRows.in_forwards_of(runner).logits
    feed, sizes = Feed(session, CHAIN), []
    while True:
        result = runner.forward([feed])
        sizes.append(result.grants[0])
        if result.ranges[0] is not None:
            break
        assert (draft.probes, seen) == (WINDOW, {})
    assert sizes == [12, 12, 12, 3, 11]
    assert (result.ranges[0], len(seen[session])) == (range(3), 8)
    assert torch.equal(seen[session], fresh(runner, session.token_ids, WINDOW)[0][1:])
    close(runner, session)


def test_probes_count_as_rows(runner: ModelRunner) -> None:
    """Where a forward has no room for all, they are granted with the last token or not at all."""
    [feed] = make_feeds((30, 29, 4))
    probed(runner, feed.session, WINDOW)
    rows = SeenRows.in_forwards_of(runner)
    assert share_rows(rows.extend([feed]), 13, 99) == [13]
    assert share_rows(rows.extend([feed]), 12, 99) == [0]
    assert share_rows(rows.extend([feed._replace(tree=EMPTY)]), 8, 99) == [0]


def test_a_probe_is_never_kept(runner: ModelRunner) -> None:
    """Its row is no row of the tree, whether that has fewer rows or none."""
    session = runner.open([1, 2, 3], 1)
    for tree, probe in ((EMPTY, 1), (CHAIN, 3)):
        probed(runner, session, WINDOW)
        runner.forward([Feed(session, tree)])
        with pytest.raises(ValueError, match=f"rows \\({probe},\\) are not a path"):
            session.keep((probe,))
    session.keep((1, 2))
    assert_like_fresh(runner, session)
    close(runner, session)


def test_others_never_find_a_probe_s_row(runner: ModelRunner) -> None:
    """Not even where probes and tokens fill a block together, and the probes are the very tokens that come next."""
    token_ids = random_ids(32, vocab_size=VOCAB)
    session = runner.open(token_ids[:26], 1, b"")
    probed(runner, session, TokenTree.chain(token_ids[26:]))
    runner.forward([Feed(session, TokenTree.chain((1, 2)))])
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
    """As for a tree's rows; without room they are left out."""
    session = runner.open([5] * 15, 1)
    probed(runner, session, WINDOW)
    runner.forward([Feed(session)])
    assert len(session.table) == 2
    session.keep(())
    assert len(session.table) == 1
    hog = runner.open([5], 1)
    hog.table.reserve(runner.pool.num_free * runner.pool.block_size)
    draft = probed(runner, session, WINDOW)
    assert runner.forward([Feed(session)]).grants == [1]
    assert (len(session.table), draft.probes) == (1, EMPTY)
    hog.free()
    assert_like_fresh(runner, session)
    close(runner, session)


def test_probes_that_can_never_run_are_left_out(runner: ModelRunner) -> None:
    """A row too many beside the tree's, and a row past the end of the context."""
    session = runner.open([1] * 90, 1)
    runner.max_rows = 10
    draft = probed(runner, session, WINDOW)
    finish(runner, Feed(session, TokenTree.chain((1, 2))))
    assert (draft.probes, SeenRows.in_forwards_of(runner).logits) == (EMPTY, {})
    for depth, num_probes in ((6, 6), (7, 0)):
        finder = partial(PassChain, range(depth))
        draft = ProbeDraft(spec_of([1], 200), finder, SeenRows.in_forwards_of(runner))
        draft.propose(session, NO_GUESSES)
        assert len(draft.probes) == num_probes
    close(runner, session)


@pytest.mark.parametrize("family", TIED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_of_its_own_is_read_by_probes_alone(folders: dict[str, Path], family: str, dtype: str) -> None:
    """With a token's embedding a probe has that token's bits; no text and no tree may have its id."""
    plain = ModelRunner.load(str(folders[family]), dtype=dtype, kv_tokens=KV_TOKENS)
    runner = ModelRunner.load(str(folders[family]), dtype=dtype, kv_tokens=KV_TOKENS)
    assert embed_probes(runner, plain.model.embedding[[8, 9]].float()) == range(VOCAB, VOCAB + 2)
    assert embed_probes(runner, plain.model.embedding[[7]].float()) == range(VOCAB + 2, VOCAB + 3)
    assert runner.parts.embedding.shape == plain.parts.embedding.shape
    token_ids = random_ids(12, vocab_size=VOCAB)
    session = runner.open(token_ids, 1)
    probes = TokenTree.chain((VOCAB + 1, VOCAB, VOCAB + 2))
    logits, found = computed(runner, Feed(session, TREE), probes)
    assert torch.equal(logits, fresh(plain, token_ids, TREE)[0])
    assert torch.equal(found, fresh(plain, token_ids, TokenTree.chain((9, 8, 7)))[0][1:])
    assert logits.shape[1] == VOCAB
    with pytest.raises(InvalidRequest, match="token_ids is 300"):
        runner.forward([Feed(session, TokenTree.chain((VOCAB,)))])
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
        found.append(computed(runner, Feed(session), TokenTree.chain(embed_probes(runner, rows)))[1])
        close(runner, session)
    assert torch.equal(*found)
    assert len(found[0].argmax(1).unique()) == 3


def test_code_of_others_embeds_no_probes(folders: dict[str, Path]) -> None:
    """What transformers computes has no room for them, and says so."""
    runner = ModelRunner.load(str(folders["gpt2"]), dtype="float32", kv_tokens=KV_TOKENS)
    with pytest.raises(ModelRefused, match="gpt2 cannot embed probes"):
        embed_probes(runner, torch.zeros(1, 48))
