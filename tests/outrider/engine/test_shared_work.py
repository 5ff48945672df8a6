"""What the kernels of a GPU read of a plan: every chunk of every row once, in the order of the plan's own lists."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.engine_cases import feeds_and_grants, make_feeds

from outrider.engine import batching
from outrider.engine.batching import CHUNK as CHUNK_OF_PLANS
from outrider.engine.batching import WORK_HEADER, Batch, Feed, WorkPlaces, build_batch
from outrider.token_tree import TokenTree

CPU = torch.device("cpu")
# So short that a few tokens have many.
CHUNK = 4


def batches(feeds: Sequence[Feed], grants: Sequence[int], tiles: Sequence[int]) -> tuple[Batch, Batch]:
    """The forward without and with shared work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "CHUNK", CHUNK)
        return build_batch(feeds, grants, CPU), build_batch(feeds, grants, CPU, tiles)


def read(batch: Batch) -> tuple[np.ndarray, WorkPlaces]:
    """The numbers of the work, and its header."""
    assert batch.plan.work is not None
    work = batch.plan.work.numpy()
    assert not work[len(WorkPlaces._fields) : WORK_HEADER].any()
    return work, WorkPlaces(*map(int, work[: len(WorkPlaces._fields)]))


any_feeds = given(feeds_and_grants(), st.sampled_from([(1,), (2,), (3,), (4, 8, 16), (64,)]))


@any_feeds
def test_every_chunk_of_every_row_is_in_one_item(made: tuple[list[Feed], list[int]], tiles: Sequence[int]) -> None:
    """With the slots of the row's list there, and no item has more rows than fit into it."""
    plain, shared = batches(*made, tiles)
    work, places = read(shared)
    items = work[places.items : places.items + 4 * places.num_items].reshape(-1, 4)
    key_slots, plan, seen = work[places.key_slots :], plain.plan, set[tuple[int, int]]()
    for first, count, start, chunk in items.tolist():
        assert 1 <= count <= shared.plan.tile_rows
        for row in work[places.item_rows + first : places.item_rows + first + count].tolist():
            key_start, key_count = int(plan.key_starts[row]), int(plan.key_counts[row])
            columns = range(chunk * CHUNK, min((chunk + 1) * CHUNK, key_count))
            if columns:
                assert (row, chunk) not in seen
                seen.add((row, chunk))
                expected = plan.key_slots[[key_start + column for column in columns]]
                assert key_slots[[start + column for column in columns]].tolist() == expected.tolist()
    counts = plan.key_counts.tolist()
    assert seen == {(row, chunk) for row, count in enumerate(counts) for chunk in range(-(-count // CHUNK))}


@any_feeds
def test_chunks_of_rows_have_places_of_their_own(made: tuple[list[Feed], list[int]], tiles: Sequence[int]) -> None:
    """One behind the other, as many as there is room for."""
    _, shared = batches(*made, tiles)
    work, places = read(shared)
    firsts = work[places.row_chunks : places.row_chunks + places.num_rows]
    counts = work[places.counts : places.counts + places.num_rows]
    taken = [
        int(first) + each for first, count in zip(firsts, counts, strict=True) for each in range(-(-count // CHUNK))
    ]
    assert taken == list(range(shared.plan.num_row_chunks))


@any_feeds
def test_the_plan_is_the_same_with_and_without(made: tuple[list[Feed], list[int]], tiles: Sequence[int]) -> None:
    """Its tensors are parts of what was sent in one piece, and the work has them too, an even number in all."""
    plain, shared = batches(*made, tiles)
    work, places = read(shared)
    for name in ("token_ids", "positions", "slots", "key_slots", "key_starts", "key_counts"):
        assert torch.equal(getattr(plain.plan, name), getattr(shared.plan, name)), name
    assert torch.equal(plain.wanted, shared.wanted)
    assert (plain.ranges, plain.prefixes, plain.plan.work) == (shared.ranges, shared.prefixes, None)
    assert len(work) % 2 == 0
    assert places.num_rows == plain.plan.num_rows
    for name, place in (("token_ids", places.token_ids), ("positions", places.positions), ("slots", places.slots)):
        assert work[place : place + places.num_rows].tolist() == getattr(plain.plan, name).tolist()
    assert work[places.counts : places.counts + places.num_rows].tolist() == plain.plan.key_counts.tolist()


@any_feeds
def test_committed_chunks_are_shared_by_all_rows(made: tuple[list[Feed], list[int]], tiles: Sequence[int]) -> None:
    """As many items as whole tiles need, and no more than one a row and chunk."""
    _, shared = batches(*made, tiles)
    work, places = read(shared)
    items = work[places.items : places.items + 4 * places.num_items].reshape(-1, 4).tolist()
    feeds, grants = made
    first, expected = 0, 0
    for feed, grant in zip(feeds, grants, strict=True):
        own = set(range(first, first + grant))
        first += grant
        rows = [work[places.item_rows + place :][:count].tolist() for place, count, _, chunk in items if chunk == 0]
        whole = [each for each in rows if own & set(each)]
        # Rows of several leaves see a first chunk of their own only where no whole one is committed.
        if len(feed.session) >= CHUNK:
            expected = -(-grant // shared.plan.tile_rows)
            assert len(whole) == expected
        assert all(set(each) <= own for each in whole)


def test_tiles_are_as_large_as_the_longest_session_asks() -> None:
    """The least that holds its rows, or the largest."""
    sizes = {1: 4, 4: 4, 5: 8, 16: 16, 40: 16}
    for rows, tile_rows in sizes.items():
        feeds = make_feeds((50, 50 - rows, 0), (3, 2, 0))
        assert build_batch(feeds, [rows, 1], CPU, (4, 8, 16)).plan.tile_rows == tile_rows


def test_tiles_are_as_large_as_the_rows_that_share_a_list() -> None:
    """Of a short session with a tree nothing is committed that all rows could share: the longest path decides."""
    tree = TokenTree(tuple(range(31)), tuple(row // 2 for row in range(31)))
    for length, tile_rows in ((100, 8), (CHUNK_OF_PLANS, 16)):
        feeds = make_feeds((length, length - 1, 0), tree=tree)
        assert build_batch(feeds, [32], CPU, (4, 8, 16)).plan.tile_rows == tile_rows
