"""Trees that grow: rows that are computed already stay as they are, and the next tokens go down the tree."""

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.engine_cases import TREE, assert_like_fresh, close, finish, fresh, random_ids
from support.models.tiny_models import TARGET, write_tiny_model
from support.rounding import reach
from torch import Tensor

from outrider.engine import runner as runner_module
from outrider.engine.batching import Batch, Feed
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

DRAFT = TARGET.parent / "draft"


@functools.cache
def load(model: Path, dtype: str) -> ModelRunner:
    """A model with two threads, loaded once."""
    return ModelRunner.load(str(model), dtype=dtype, num_threads=2, kv_tokens=4096)


@pytest.fixture(params=[(TARGET, "bfloat16"), (TARGET, "float32"), (DRAFT, "bfloat16")], ids=str)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """Both models, whose pools must be whole and empty again at the end."""
    loaded = load(*request.param)
    assert loaded.pool.num_used == 0
    return loaded


def random_tree(num_rows: int, chance: random.Random) -> TokenTree:
    """Any tree; siblings may be equal."""
    return TokenTree(
        tuple(chance.randrange(300) for _ in range(num_rows)),
        tuple(chance.randrange(row + 1) for row in range(num_rows)),
    )


def first_rows(tree: TokenTree, count: int) -> TokenTree:
    """The tree as it was when it had so many rows."""
    return TokenTree(tree.token_ids[:count], tree.parents[:count])


def steps_of(tree: TokenTree, chance: random.Random) -> list[int]:
    """Numbers of rows after each of its steps, the first of which may compute none but the root."""
    sizes = sorted(chance.sample(range(1, len(tree)), min(3, len(tree) - 1))) if len(tree) > 1 else []
    return [*([0] if chance.random() < 0.7 else []), *sizes, len(tree)]


def grow(runner: ModelRunner, session: Session, tree: TokenTree, steps: list[int]) -> Tensor:
    """Logits of root and rows, the tree computed step by step."""
    parts, num_computed = [], 0
    for size in steps:
        parts += finish(runner, Feed(session, first_rows(tree, size), num_computed=num_computed))
        num_computed = 1 + size
    return torch.cat(parts)


def state_of(runner: ModelRunner, session: Session, num_rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all committed tokens and of the rows after them."""
    return runner.cache.gather(session.table.slots(0, len(session) + num_rows))


def check_grown(runner: ModelRunner, tree: TokenTree, steps: list[int], prompt: list[int]) -> None:
    """Logits, keys and values of a grown tree are those of the tree computed at once."""
    grown, whole = runner.open(prompt, 1), runner.open(prompt, 1)
    logits = grow(runner, grown, tree, steps)
    assert torch.equal(logits, finish(runner, Feed(whole, tree))[0])
    assert grown.tree == whole.tree
    for one, other in zip(state_of(runner, grown, len(tree)), state_of(runner, whole, len(tree)), strict=True):
        assert torch.equal(one, other)
    path = tree.path(len(tree))
    grown.keep(path)
    assert grown.token_ids == [*prompt, *(tree.token_ids[row - 1] for row in path)]
    assert_like_fresh(runner, grown)
    close(runner, grown, whole)


@pytest.mark.parametrize("seed", range(12))
def test_a_grown_tree_is_the_tree_computed_at_once(runner: ModelRunner, seed: int) -> None:
    """Bit for bit, whatever the tree, its steps, and the length of the tokens before."""
    chance = random.Random(seed)
    tree = random_tree(chance.choice((1, 2, 5, 12, 24)), chance) if seed else TokenTree.chain(range(9))
    check_grown(runner, tree, steps_of(tree, chance), random_ids(chance.choice((2, 15, 16, 17, 40)), seed))


@pytest.mark.parametrize("ops", [EagerOps, ReferenceOps])
def test_other_operations_keep_the_promise(
    ops: type[EagerOps], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiled kernels too: bit for bit where rows are independent, and as near as rounding elsewhere."""
    monkeypatch.setattr(runner_module, "choose_ops", lambda *_: ops())
    runner = ModelRunner.load(str(write_tiny_model(tmp_path / "tiny", "llama")), dtype="float32", kv_tokens=512)
    prompt = [token_id % 300 for token_id in random_ids(21)]
    if ops is ReferenceOps:
        check_grown(runner, TREE, [0, 2, 5, 8], prompt)
        return
    session = runner.open(prompt, 1)
    limit = reach(runner.model.weights, lambda: fresh(runner, prompt, TREE)[0])
    expected = fresh(runner, prompt, TREE)[0]
    torch.testing.assert_close(grow(runner, session, TREE, [0, 2, 5, 8]), expected, atol=limit, rtol=0)
    close(runner, session)


def test_many_trees_grow_in_one_forward(runner: ModelRunner) -> None:
    """Growing trees, chains and a prompt side by side: each has the logits that it has alone."""
    chance = random.Random(5)
    trees = [random_tree(9, chance) for _ in range(3)]
    prompts = [random_ids(12 + 7 * number, seed=number) for number in range(3)]
    sessions = [runner.open(prompt, 1) for prompt in prompts]
    other, reader = runner.open(random_ids(20, seed=9), 1), runner.open(random_ids(200, seed=8), 1)
    finish(runner, *(Feed(session) for session in sessions), Feed(other))
    parts: list[list[Tensor]] = [[] for _ in trees]
    num_computed = 1
    for size in (3, 4, 9):
        feeds = [
            Feed(session, first_rows(tree, size), num_computed=num_computed)
            for session, tree in zip(sessions, trees, strict=True)
        ]
        result = runner.forward([*feeds, Feed(other, TREE), Feed(reader)], 40)
        for part, rows in zip(parts, result.ranges, strict=False):
            assert rows is not None
            part.append(result.logits[rows.start : rows.stop].clone())
        num_computed = 1 + size
    for prompt, tree, part in zip(prompts, trees, parts, strict=True):
        assert torch.equal(torch.cat(part), fresh(runner, prompt, tree)[0][1:])
    close(runner, *sessions, other, reader)


def test_a_row_at_its_number_would_be_noticed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault B12, a row's position counted by its number and not by its depth, changes the logits."""
    prompt, tree = random_ids(20), TokenTree((11, 22, 33), (0, 0, 2))
    expected = fresh(runner, prompt, tree)[0]
    build = runner_module.build_batch

    def numbered(*arguments: Any) -> Batch:
        batch = build(*arguments)
        first = int(batch.plan.positions[0])
        return replace(batch, plan=replace(batch.plan, positions=torch.arange(first, first + batch.plan.num_rows)))

    monkeypatch.setattr(runner_module, "build_batch", numbered)
    session = runner.open(prompt, 1)
    grown = grow(runner, session, tree, [0, 3])
    close(runner, session)
    assert torch.equal(grown[:2], expected[:2])
    assert not torch.equal(grown[2], expected[2])


def test_rows_that_do_not_lie_there_are_refused(runner: ModelRunner) -> None:
    """What counts as computed is what the session's own tree begins with, after cached tokens."""
    session = runner.open(random_ids(10), 1)
    tree = TokenTree((7, 8, 9), (0, 0, 1))
    with pytest.raises(ValueError, match="do not lie computed"):
        runner.forward([Feed(session, tree, num_computed=1)])
    finish(runner, Feed(session, first_rows(tree, 2)))
    for count, other in ((4, tree), (3, TokenTree((7, 7, 9), (0, 0, 1)))):
        with pytest.raises(ValueError, match="do not lie computed"):
            runner.forward([Feed(session, other, num_computed=count)])
    finish(runner, Feed(session, tree, num_computed=3))
    session.extend([4])
    with pytest.raises(ValueError, match="do not lie computed"):
        runner.forward([Feed(session, tree, num_computed=4)])
    close(runner, session)


def test_rows_that_were_computed_once_more_are_the_same(runner: ModelRunner) -> None:
    """A step that is made again, because what came after it failed, changes nothing."""
    prompt, tree = random_ids(18), TREE
    session = runner.open(prompt, 1)
    grow(runner, session, tree, [0, 3, 8])
    again = finish(runner, Feed(session, tree, num_computed=4))[0]
    assert torch.equal(again, fresh(runner, prompt, tree)[0][4:])
    session.keep((2, 5, 6, 7))
    assert_like_fresh(runner, session)
    close(runner, session)


@pytest.mark.parametrize("num_computed", [0, 4])
def test_a_forward_that_fails_leaves_no_row_that_it_may_have_written(
    runner: ModelRunner, num_computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did not touch stays, and can be built on; the rest of the tree is gone."""
    session = runner.open(random_ids(18), 1)
    finish(runner, Feed(session, TREE))

    def fail(*_arguments: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", fail)
        with pytest.raises(RuntimeError, match="broken"):
            runner.forward([Feed(session, TREE, num_computed=num_computed)])
    assert session.tree == first_rows(TREE, max(num_computed - 1, 0))
    close(runner, session)


@pytest.mark.parametrize(
    ("token_ids", "kept"), [((22, 55, 66), 3), ((11, 44), 2), ((22, 99), 1), ((99,), 0), ((), 0), ((11, 33, 88, 5), 3)]
)
def test_the_next_tokens_go_down_the_tree(runner: ModelRunner, token_ids: tuple[int, ...], kept: int) -> None:
    """Those that the tree has are cached at once, the others are not, and nothing differs from a fresh prefill."""
    prompt = random_ids(30)
    session, replaced = runner.open(prompt, 1), runner.open(prompt, 1)
    finish(runner, Feed(session, TREE), Feed(replaced, TREE))
    session.follow(token_ids)
    replaced.replace_tail(28, [*prompt[28:], *token_ids])
    for each in (session, replaced):
        assert each.token_ids == [*prompt, *token_ids]
        assert (each.cached_len, each.tree) == (30 + kept, EMPTY)
        assert torch.equal(finish(runner, Feed(each))[0], fresh(runner, [*prompt, *token_ids])[0])
        assert_like_fresh(runner, each)
    close(runner, session, replaced)


def test_a_tail_that_differs_leaves_the_tree(runner: ModelRunner) -> None:
    """A tree stands after the tokens that it was computed after, and after no others."""
    session = runner.open(random_ids(30), 1)
    finish(runner, Feed(session, TREE))
    session.replace_tail(29, [3, 22])
    assert session.cached_len == 29
    finish(runner, Feed(session))
    assert_like_fresh(runner, session)
    close(runner, session)
