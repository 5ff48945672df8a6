"""Attention of the kernels for CUDA: by whatever work its rows share, a row has the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

import pytest
import torch
import triton
from support.devices.kernels import CPU, KernelOps, altered, assert_same
from support.models import engine_cases
from support.models.engine_cases import TREE
from torch import Tensor

from outrider.engine import batching
from outrider.engine.batching import CHUNK, Feed, RowPlan, build_batch
from outrider.engine.ops import triton_ops
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.ops.triton import attention
from outrider.token_tree import TokenTree

pytestmark = pytest.mark.early

NUM_SLOTS = 400 * 16
# A bushy root, and one leaf far behind it, over the end of a chunk.
LONG_LEAF = TokenTree((1, 2, 3, *range(4, 12)), (0, 0, 0, *range(3, 11)))
LENGTHS = (255, 256, 257, 512)


def make_feeds(*sizes: tuple[int, int, int], tree: TokenTree | None = None) -> list[Feed]:
    """Sessions none of which has slot 0, which is what a careless load reads."""
    return engine_cases.make_feeds((1, 0, 0), *sizes, tree=tree)[1:]


@dataclass(frozen=True)
class Case:
    """Queries of rows over caches in which all that no list names is NaN."""

    query: Tensor
    feeds: Sequence[Feed]
    grants: Sequence[int]
    keys: Tensor
    values: Tensor
    sinks: Tensor | None = None

    def plan(self, tiles: Sequence[int] = ()) -> RowPlan:
        return build_batch(self.feeds, self.grants, CPU, tiles).plan

    def attend(self, ops: KernelOps | ReferenceOps, plan: RowPlan) -> Tensor:
        return ops.attention(self.query.clone(), plan, self.keys, self.values, self.query.shape[2] ** -0.5, self.sinks)


def case_of(
    feeds: Sequence[Feed], heads: int = 2, groups: int = 1, head_dim: int = 16, dtype: torch.dtype = torch.float32
) -> Case:
    """Random numbers for these feeds, all of whose rows are granted."""
    generator = torch.Generator().manual_seed(heads + head_dim)
    grants = [feed.num_rows for feed in feeds]
    seen = build_batch(feeds, grants, CPU).plan.key_slots.long().unique()
    caches = []
    for _ in range(2):
        cache = torch.full((NUM_SLOTS, groups, head_dim), torch.nan)
        cache[seen] = torch.randn(len(seen), groups, head_dim, generator=generator)
        caches.append(cache.to(dtype))
    query = torch.randn(sum(grants), heads, head_dim, generator=generator)
    return Case(query.to(dtype).float(), feeds, grants, *caches)


def assert_work_changes_nothing(case: Case, tiles: Sequence[Sequence[int]]) -> None:
    """Work of items as large as each of the tiles, against each row's own chunks, which are near the reference."""
    ops, plan = KernelOps(), case.plan()
    alone = case.attend(ops, plan)
    reference = replace(case, keys=case.keys.float().nan_to_num(), values=case.values.float().nan_to_num())
    exact = reference.attend(ReferenceOps(), plan)
    # Weights of a chunk are rounded to the cache's type.
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[case.keys.dtype]
    assert float((alone - exact).norm() / exact.norm()) < bound
    for each in tiles:
        shared = case.plan(each)
        assert shared.work is not None
        assert_same(case.attend(ops, shared), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads_each", "head_dim"), [(1, 64), (2, 80), (3, 128), (4, 64), (8, 128)])
def test_shared_chunks_have_the_bits_of_own_ones(heads_each: int, head_dim: int, dtype: torch.dtype) -> None:
    """Of every shape of a head and a group, in each type of a cache: a tree that stands over a chunk's end."""
    feeds = make_feeds((CHUNK - 2, CHUNK - 3, 0), tree=TokenTree((5, 6, 7), (0, 1, 0)))
    tile = 16 // triton.next_power_of_2(heads_each)
    assert_work_changes_nothing(case_of(feeds, heads_each, 1, head_dim, dtype), [(tile,)])


@pytest.mark.parametrize("length", LENGTHS)
def test_lists_around_a_chunks_end(length: int) -> None:
    """A chain whose rows see one key less, as many, and more than whole chunks; two groups."""
    case = case_of(make_feeds((length, length - 2, 3)), 4, 2)
    assert_work_changes_nothing(case, [(8,), (32,)])


@pytest.mark.parametrize("tree", [TREE, LONG_LEAF], ids=["bushy", "long leaf"])
def test_trees_share_what_they_see(tree: TokenTree) -> None:
    """All rows the committed chunks, and each leaf's rows the rest, by tiles of every size."""
    case = case_of(make_feeds((CHUNK + 250, CHUNK + 249, 0), tree=tree))
    assert_work_changes_nothing(case, [(8,), (16,), (32,)])


@pytest.mark.parametrize("length", [7, 2 * CHUNK + 9])
def test_sinks_join_where_the_chunks_do(length: int) -> None:
    """Of one chunk and of three, from a score that takes nearly all weight to one that takes none."""
    case = case_of(make_feeds((length, length - 2, 1), tree=TREE), 4, 2)
    case = replace(case, sinks=torch.tensor([7.0, 0.5, -3.0, -200.0]))
    assert_work_changes_nothing(case, [(8,), (32,)])
    less = replace(case, sinks=torch.tensor([-torch.inf, -torch.inf, -torch.inf, -200.0]))
    ops, plan = KernelOps(), case.plan()
    assert_same(less.attend(ops, plan), replace(case, sinks=None).attend(ops, plan))


def test_sessions_stay_apart() -> None:
    """A prompt, trees and chains of several sessions in one forward have the bits of each of them alone."""
    feeds = make_feeds((12, 2, 0), (CHUNK + 2, CHUNK + 1, 2), (5, 4, 0))
    case = case_of(feeds, 4, 2)
    assert_work_changes_nothing(case, [(8, 16, 32)])
    whole, first = case.attend(KernelOps(), case.plan((8, 16, 32))), 0
    for feed, grant in zip(feeds, case.grants, strict=True):
        rows = slice(first, first + grant)
        own = replace(case, query=case.query[rows], feeds=[feed], grants=[grant])
        assert_same(own.attend(KernelOps(), own.plan((8, 16, 32))), whole[rows])
        first += grant


def as_chain(case: Case, feed: Feed, root: int, leaf: int) -> tuple[Case, Tensor]:
    """A session whose next tokens are a leaf's path, with its keys in slots of its own; and the tree's rows of it."""
    length, path = len(feed.session), feed.tree.path(leaf)
    chain = make_feeds((length, length - 1, len(path)))[0]
    slots = feed.session.table.slots(0, length + len(feed.tree))
    own_slots = chain.session.table.slots(0, length + len(path))
    chosen = [*range(length), *(length + row - 1 for row in path)]
    keys, values = (torch.full_like(cache, torch.nan) for cache in (case.keys, case.values))
    for mine, theirs in ((keys, case.keys), (values, case.values)):
        mine[own_slots] = theirs[slots[chosen]]
    rows = root + torch.tensor([0, *path])
    return Case(case.query[rows], [chain], [1 + len(path)], keys, values), rows


def test_a_tree_row_has_the_bits_of_a_chain() -> None:
    """A leaf's path, whose slots lie apart, against a session whose next tokens are these."""
    case = case_of(make_feeds((CHUNK - 1, CHUNK - 2, 0), tree=TREE))
    ops, (chain, rows) = KernelOps(), as_chain(case, case.feeds[0], 0, 7)
    assert_same(chain.attend(ops, chain.plan((8,))), case.attend(ops, case.plan((32,)))[rows])


@pytest.fixture
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so short that a few tokens have many, each of two steps, which are joined by turns."""
    monkeypatch.setattr(batching, "CHUNK", 32)
    monkeypatch.setattr(triton_ops, "CHUNK", 32)
    monkeypatch.setattr(attention, "JOINED", 2)
    constants = KernelOps._sum_constants
    monkeypatch.setattr(KernelOps, "_sum_constants", lambda *args: {**constants(*args), "STEP": 16})


def random_feeds(chance: Random) -> list[Feed]:
    """Prompts, steps, chains and trees of one to four sessions, whose blocks lie among each other's."""
    sizes, trees = [], []
    for _ in range(chance.randint(1, 4)):
        length, count = chance.randint(1, 100), chance.choice((0, chance.randint(1, 6)))
        sizes.append((length, chance.choice((length - 1, chance.randint(max(0, length - 6), length - 1))), 0))
        is_chain = chance.random() < 0.3
        trees.append(
            TokenTree((5,) * count, tuple(row if is_chain else chance.randint(0, row) for row in range(count)))
        )
    feeds = [feed._replace(tree=tree) for feed, tree in zip(make_feeds(*sizes), trees, strict=True)]
    for feed in feeds:
        feed.session.reserve(len(feed.tree))
    return feeds


def assert_rows_are_their_own(seed: int) -> None:
    """Of a random plan: without shared work, in another order, each session alone, in pieces, and as a chain."""
    chance, ops = Random(seed), KernelOps()
    feeds, tiles = random_feeds(chance), chance.choice([(1,), (2,), (4, 8, 16), (64,)])
    heads, groups = chance.choice([(1, 1), (3, 1), (2, 2)])
    case = case_of(feeds, heads, groups, 16, chance.choice([torch.float32, torch.float16, torch.bfloat16]))
    whole = case.attend(ops, case.plan(tiles))
    assert_same(case.attend(ops, case.plan()), whole)
    ends = [*accumulate(case.grants, initial=0)]
    own = [torch.arange(*each) for each in pairwise(ends)]
    order = chance.sample(range(len(feeds)), len(feeds))
    parts = [(order, torch.cat([own[place] for place in order]), [case.grants[place] for place in order])]
    for place, feed in enumerate(feeds):
        parts.append(([place], own[place], [feed.num_rows]))
        # A tree waits for the end of its prompt.
        some = chance.randrange(feed.num_committed)
        parts += [([place], own[place][:some], [some])] if some else []
        if len(feed.tree):
            root = ends[place] + feed.num_committed - 1
            chain, rows = as_chain(case, feed, root, chance.randint(1, len(feed.tree)))
            assert_same(chain.attend(ops, chain.plan(tiles)), whole[rows])
    for places, rows, grants in parts:
        part = replace(case, query=case.query[rows], feeds=[feeds[place] for place in places], grants=grants)
        assert_same(part.attend(ops, part.plan(tiles)), whole[rows])


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(
    "seeds", [(0, 4, 6, 7), pytest.param(range(200), marks=pytest.mark.grid)], ids=["a few", "two hundred"]
)
def test_rows_of_any_plan_are_their_own(seeds: Sequence[int]) -> None:
    """Whatever shares their chunks, in whatever order and pieces they come, and of a tree as of a chain."""
    for seed in seeds:
        assert_rows_are_their_own(seed)


@pytest.mark.parametrize("window", [1, 64, CHUNK, CHUNK + 1])
def test_a_window_falls_back_to_own_chunks(window: int) -> None:
    """They count from the window's start, and what lies before it may be NaN."""
    case = case_of(make_feeds((CHUNK + 9, CHUNK + 8, 2)))
    plan = case.plan((8,)).windowed(window)
    assert plan.work is None
    exact = case.attend(ReferenceOps(), plan)
    starts = [int(start) for start in plan.key_starts]
    hidden = plan.key_slots[: min(starts)].long()
    case.keys[hidden] = torch.nan
    case.values[hidden] = torch.nan
    found = case.attend(KernelOps(), plan)
    assert float((found - exact).norm() / exact.norm()) < 1e-6


def test_rows_that_fill_a_graph_up_repeat_the_last() -> None:
    """Their queries are not read, and no row before them changes."""
    case, ops = case_of(make_feeds((40, 39, 2), (7, 6, 1))), KernelOps()
    plan = case.plan((8,))
    assert plan.work is not None
    whole, (_, heads, head_dim) = case.attend(ops, plan), case.query.shape
    query = torch.cat((case.query, torch.full((3, heads, head_dim), torch.nan)))
    output = torch.full((len(query), heads * head_dim), torch.nan)
    partials = ops.room_for_chunks(plan.num_row_chunks, heads, head_dim)
    ops.attend_together(query, plan.work, 8, case.keys, case.values, head_dim**-0.5, partials, output)
    assert_same(output[:5], whole)
    assert_same(output[5:], whole[-1:].expand(3, -1))


def test_rows_of_a_long_prompt_go_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as there is room for, with the same bits."""
    case, ops = case_of(make_feeds((9, 1, 0))), KernelOps()
    whole = case.attend(ops, case.plan())
    monkeypatch.setattr(triton_ops, "PARTIAL_FLOATS", 3 * 2 * 18)
    assert_same(case.attend(ops, case.plan()), whole)


def check_all() -> None:
    """A tree behind a chunk's end, a chain that goes over one, and a row whose products are of 16 bits."""
    for sizes, tree, dtype in (
        ((CHUNK + 2, CHUNK + 1, 0), TREE, torch.float32),
        ((CHUNK - 1, CHUNK - 2, 3), None, torch.float32),
        ((90, 89, 0), None, torch.bfloat16),
    ):
        case = case_of(make_feeds(sizes, tree=tree), dtype=dtype)
        assert_work_changes_nothing(replace(case, sinks=torch.tensor([0.5, 4.0])), [(8,)])


def test_the_check_passes_without_a_fault() -> None:
    """What the planted ones are compared with."""
    check_all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Values past a list's end are read: nought times NaN.
        ("v = tl.load(value_cache + places, mask=is_place, other=0.0)", "v = tl.load(value_cache + places)"),
        # A row sees what the longest row of its tile sees.
        ("columns[None, :] < counts[:, None]", "columns[None, :] < tl.max(counts, 0)"),
        # The rows of a tile are taken for token rows that follow each other.
        (
            "tl.load(item_rows + tl.load(item) + token, mask=is_row, other=0).to",
            "(tl.load(item_rows + tl.load(item)) + tl.where(is_row, token, 0)).to",
        ),
        # A row stores what it does not see, where the next row's chunks lie.
        ("is_seen = is_lane & (counts > first_column)", "is_seen = is_lane"),
        # A chunk of a shared list is written over another row's.
        ("places = chunk_places * num_heads + heads", "places = rows * num_heads + heads"),
        # A sink stands for e^score where all others stand for 2^score.
        ("tl.load(sinks + head) * LOG2_E", "tl.load(sinks + head)"),
        # Of 16 bits, a branch of its own, only the last step's values count.
        ("output = tl.dot(narrow, v, output)", "output = tl.dot(narrow, v)"),
    ],
    ids=["value mask", "end of the tile", "rows apart", "unseen chunk", "chunk places", "base of sinks", "16 bits"],
)
def test_planted_faults_are_found(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is an easy slip in these kernels."""
    monkeypatch.setattr(triton_ops, "attention", altered(attention, old, new, tmp_path))
    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(
    "number",
    ["tl.sum(is_row.to(tl.float32), 0)", "rows[:, None]", "tl.load(key_slots + first_column)"],
    ids=["rows of the tile", "place among all rows", "slots"],
)
def test_rows_that_are_not_their_own_are_found(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: sums that hang a little on what is beside a row, on where it stands, or on where its keys lie."""
    old = "is_seen = is_lane & (counts > first_column)"
    changed = altered(attention, old, f"{old}\n    output += {number} * 1e-3", tmp_path)
    changed.JOINED = attention.JOINED  # type: ignore[attr-defined]
    monkeypatch.setattr(triton_ops, "attention", changed)
    with pytest.raises(AssertionError):
        assert_rows_are_their_own(4)
