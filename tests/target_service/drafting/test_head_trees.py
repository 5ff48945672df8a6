"""Trees of heads: a row reads the state of its parent, whatever else is beside it, and no token changes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.basics import check_empty, grid, spec_of
from support.drafting.rules import ruled
from support.heads.heads import random_head
from support.heads.tiny_chains import CHAINS, VOCAB, write_chain
from support.models.tiny_models import write_tiny_model
from support.services.stepped_target import PROMPT, OwnTarget, check_storm, plain
from torch import Tensor

from outrider.drafters import hosted
from outrider.drafters.drafter import GuessLimits
from outrider.drafters.hosted import HostedModel, host_head
from outrider.engine.batching import Feed, RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.decoder import HeadDecoder
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TokenTree, TreeShape

SPEC = spec_of(tuple(token_id % VOCAB for token_id in PROMPT), 60, seed=3, eos=(), temperature=1.0)
GREEDY = replace(SPEC, sampling=SPEC.sampling.model_copy(update={"temperature": 0.0}))
LAYERS = {"eagle3": Fuse.WIDE, "mtp": Fuse.REVERSED}
# By level: two rows, and three of their children.
BUSHY, LEVELS = TokenTree((11, 22, 33, 44, 55), (0, 0, 1, 1, 2)), (2, 5)
KINDS = pytest.mark.parametrize("kind", ["eagle3", *grid("mtp", "mlp", "medusa", "hydra"), "hydra++"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the vocabulary that chained heads are written for."""
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "model", "llama", vocab_size=VOCAB, context_len=640)


@pytest.fixture
def target(folder: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)
    yield runner
    check_empty(runner.pool)


def hosting_of(kind: str, target: ModelRunner, folder: Path) -> HostedModel:
    """A random layer, or a head that is written into the folder and read."""
    if kind in LAYERS:
        return host_head(target, random_head(target, LAYERS[kind]), "")
    found = read_head(write_chain(folder, CHAINS[kind]()), target.parts)
    return host_head(target, *found.load(target.parts, target.device, torch.float32, target.ops))


def grown(runner: ModelRunner, session: Session, tree: TokenTree, levels: tuple[int, ...]) -> Tensor:
    """Logits [rows, V] of a tree below the last committed token, level by level, which end with so many rows."""
    found, num_computed = [], 1
    for end in levels:
        part = TokenTree(tree.token_ids[:end], tree.parents[:end])
        found.append(runner.forward([Feed(session, part, num_computed=num_computed)]).logits)
        num_computed = 1 + end
    return torch.cat(found)


def check_rows(hosting: HostedModel) -> None:
    """Asserts that each row of a tree has the logits that its path has alone."""
    runner = hosting.runner
    assert runner is not None
    runner.cache.features.normal_(generator=torch.Generator().manual_seed(1))
    runner.cache.features[:, -1] = 0
    session = runner.open((5, 17, 20, 3, 9), 5)
    try:
        runner.forward([Feed(session)])
        rows = grown(runner, session, BUSHY, LEVELS)
        for row in range(1, len(BUSHY) + 1):
            path = [BUSHY.token_ids[each - 1] for each in BUSHY.path(row)]
            alone = grown(runner, session, TokenTree.chain(path), tuple(range(1, len(path) + 1)))
            assert torch.equal(rows[row - 1], alone[-1])
    finally:
        session.free()


@KINDS
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_row_stands_with_the_state_of_its_parent(
    target: ModelRunner, tmp_path: Path, kind: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what its path is alone; of heads with weights for each depth, those of its own."""
    if not is_compiled:
        monkeypatch.setattr(hosted, "head_decoder", HeadDecoder)
    check_rows(hosting_of(kind, target, tmp_path))


@pytest.mark.parametrize("kind", ["eagle3", "hydra++"])
def test_a_row_that_stands_with_its_sibling_s_state_is_found(
    target: ModelRunner, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states behind the rows of a level lie one place further."""

    def forward(decoder: HeadDecoder, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        logits = real(decoder, plan, cache, wanted)
        slots = plan.slots.index_select(0, wanted)
        cache.features.index_copy_(0, slots, cache.features.index_select(0, slots).roll(1, 0))
        return logits

    real = HeadDecoder.forward
    monkeypatch.setattr(HeadDecoder, "forward", forward)
    monkeypatch.setattr(hosted, "head_decoder", HeadDecoder)
    with pytest.raises(AssertionError):
        check_rows(hosting_of(kind, target, tmp_path))


@KINDS
@pytest.mark.parametrize("spec", [GREEDY, SPEC], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [TreeShape(), *grid(TreeShape(is_static=True))], ids=repr)
def test_trees_change_no_token(
    target: ModelRunner, tmp_path: Path, kind: str, spec: SessionSpec, shape: TreeShape
) -> None:
    """Asked and unasked, and none of them is deeper than the head has weights for."""
    hosting, tokens = hosting_of(kind, target, tmp_path), plain(target, spec)
    assert hosting.copy is not None
    for budget in (0, 9):
        own = OwnTarget(target, hosting, shape)
        answers = own.to_the_end(spec, 6, budget)
        assert own.tokens == tokens
        trees = [answer.content.hosted.tree for answer in answers if answer.content.hosted.tree]
        assert all(len(tree.values) == len(tree) <= 6 for tree in trees)
        assert sum(not tree.is_chain for tree in trees) > len(trees) / 2
        assert max(max(tree.depths) for tree in trees) <= (hosting.copy.head.facts.max_draft_count or 6)
        own.table.clear()


@KINDS
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.BLOCK, *grid(Rule.RATIO)])
def test_a_storm_leaves_trees_pure(
    target: ModelRunner, tmp_path: Path, kind: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not learned from is a function of tokens, rows, depth and noise alone, distributions included."""
    hosting, shape = hosting_of(kind, target, tmp_path), TreeShape()
    check_storm(target, hosting, OwnTarget(target, hosting, shape), ruled(SPEC, rule), shape, monkeypatch)


@KINDS
def test_a_tree_holds_all_smaller_ones(target: ModelRunner, tmp_path: Path, kind: str) -> None:
    """After the same tokens: more rows are added to those that there were; and with one child it is the chain."""
    hosting, tokens = hosting_of(kind, target, tmp_path), plain(target, SPEC)
    for length in (5, 9, 30):
        session, draft = target.open(tokens[:length], 5), hosting.open(SPEC, None)
        target.forward([Feed(session, without_last=True)])
        found: list[set[tuple[int, ...]]] = []
        for limits in (*(GuessLimits(count, TreeShape(), 8) for count in range(1, 9)), GuessLimits(2)):
            draft.propose(session, limits)
            while draft.proposal is None:
                hosting.advance([draft])
            tree = draft.proposal.tree
            paths = {tuple(tree.token_ids[each - 1] for each in tree.path(row)) for row in range(1, len(tree) + 1)}
            assert len(paths) == limits.draft_count
            found.append(paths)
        *trees, chain = found
        assert all(smaller < larger for smaller, larger in pairwise(trees))
        draft.propose(session, GuessLimits(2, TreeShape(max_children=1), 8))
        while draft.proposal is None:
            hosting.advance([draft])
        assert {draft.proposal.tree.token_ids[:1], draft.proposal.tree.token_ids} == chain
        draft.free()
        session.free()
