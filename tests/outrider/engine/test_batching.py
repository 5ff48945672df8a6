"""How rows are shared among feeds, and what the plan of a tree says."""

from collections.abc import Collection

import pytest
import torch

from outrider.engine.batching import Feed, build_batch, share_rows
from outrider.engine.cache import BlockPool, BlockTable, KVCache
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

CPU = torch.device("cpu")


def make_feeds(
    *sizes: tuple[int, int, int], tree: TokenTree | None = None, prefixed: Collection[int] = ()
) -> list[Feed]:
    """Feeds of (tokens, cached tokens, tree rows) over one pool, with slots reserved; those that want a prefix."""
    pool, cache = BlockPool(400), KVCache(1, 1, 1, 1, torch.float32, CPU)
    feeds = []
    for number, (num_tokens, cached_len, num_rows) in enumerate(sizes):
        session = Session(BlockTable(pool, cache), range(num_tokens), 1)
        session.advance(cached_len, EMPTY)
        own_tree = TokenTree.chain(range(num_rows)) if tree is None else tree
        feeds.append(Feed(session, own_tree, number in prefixed))
        session.reserve(len(feeds[-1].tree))
    return feeds


def test_everything_that_fits_is_granted() -> None:
    """Without scarcity each feed gets all its rows."""
    assert share_rows(make_feeds((100, 0, 0), (50, 49, 8), (7, 3, 2)), 512, 512) == [100, 9, 6]


def test_prompts_are_chunked_and_steps_are_not() -> None:
    """Decoding sessions are served whole, and prompts share what is left."""
    feeds = make_feeds((1000, 0, 4), (50, 49, 8), (1000, 0, 0), (60, 59, 0))
    assert share_rows(feeds, 512, 512) == [374, 9, 128, 1]


def test_a_tree_waits_for_its_last_token() -> None:
    """When the tree does not fit, its last committed token waits with it."""
    assert share_rows(make_feeds((30, 0, 8)), 35, 99) == [29]
    assert share_rows(make_feeds((30, 29, 8)), 8, 99) == [0]
    assert share_rows(make_feeds((30, 29, 8)), 9, 99) == [9]


def test_no_feed_starves() -> None:
    """Whoever waited longest is first, so a wide tree among many steps is served within two forwards."""
    feeds = make_feeds((5, 4, 60), *((5, 4, 0) for _ in range(200)))
    served = [0] * len(feeds)
    for forward in range(1, 5):
        for index, grant in enumerate(share_rows(feeds, 100, 100)):
            if grant:
                served[index] += 1
                feeds[index].session.last_forward = forward
    assert min(served) >= 1
    assert served[0] >= 1


def test_plan_of_a_chain_has_one_list() -> None:
    """Committed rows and a chain read one list of slots, with growing counts."""
    feed = make_feeds((6, 4, 3))[0]
    batch = build_batch([feed], [5], CPU)
    plan = batch.plan
    slots = feed.session.table.slots(0, 9).tolist()
    assert plan.token_ids.tolist() == [4, 5, 0, 1, 2]
    assert plan.positions.tolist() == [4, 5, 6, 7, 8]
    assert plan.slots.tolist() == slots[4:]
    assert plan.key_slots.tolist() == slots
    assert plan.key_starts.tolist() == [0] * 5
    assert plan.key_counts.tolist() == [5, 6, 7, 8, 9]
    assert plan.max_key_count == 9
    assert batch.wanted.tolist() == [1, 2, 3, 4]
    assert batch.ranges == [range(4)]


def test_rows_of_a_tree_see_their_ancestors_only() -> None:
    """Each row's list is the prefix, the path to it, and itself; its position is the length plus the depth."""
    tree = TokenTree((70, 71, 72, 73, 74), (0, 0, 2, 1, 3))
    feeds = make_feeds((20, 18, 0), (9, 8, 0), tree=tree)
    batch = build_batch(feeds, [7, 6], CPU)
    plan, row = batch.plan, 0
    for feed, num_committed in zip(feeds, (2, 1), strict=True):
        length = len(feed.session)
        slots = feed.session.table.slots(0, length + len(tree)).tolist()
        for tree_row in [*range(1 - num_committed, 0), *range(6)]:
            path = tree.path(max(tree_row, 0))
            expected = slots[: length + min(tree_row, 0)] + [slots[length + ancestor - 1] for ancestor in path]
            start, count = int(plan.key_starts[row]), int(plan.key_counts[row])
            assert plan.key_slots[start : start + count].tolist() == expected
            assert int(plan.slots[row]) == expected[-1]
            assert int(plan.positions[row]) == len(expected) - 1
            row += 1
    assert plan.num_rows == row
    assert batch.ranges == [range(6), range(6, 12)]
    assert batch.wanted.tolist() == [*range(1, 7), *range(7, 13)]


@pytest.mark.parametrize("grant", [3, 7])
def test_an_unfinished_prompt_wants_no_logits(grant: int) -> None:
    """A chunk has rows, and no place in the logits."""
    feeds = make_feeds((9, 1, 0), (4, 3, 0))
    batch = build_batch(feeds, [grant, 1], CPU)
    assert batch.ranges == [None, range(1)]
    assert batch.wanted.tolist() == [grant]
    assert batch.plan.positions.tolist() == [*range(1, 1 + grant), 3]


def test_wanted_prefixes_are_bounded_and_others_are_not() -> None:
    """Logits of 40 rows are granted besides: a prompt and a part of one; who wants none of its prefix is served."""
    feeds = make_feeds((30, 0, 2), (50, 0, 0), (100, 0, 0), (9, 8, 4), prefixed={0, 1, 3})
    assert share_rows(feeds, 512, 40) == [32, 11, 100, 5]
    assert share_rows(feeds[:2], 512, 78) == [32, 50]


def test_a_wanted_prefix_leaves_room_for_the_root_and_the_tree() -> None:
    """Whatever the bound, tokens are drawn behind them; a prefix that is too long comes in parts."""
    assert share_rows(make_feeds((9, 8, 5), prefixed={0}), 512, 1) == [6]
    assert share_rows(make_feeds((9, 7, 5), prefixed={0}), 512, 1) == [7]
    assert share_rows(make_feeds((9, 6, 5), prefixed={0}), 512, 1) == [1]


def test_no_prefix_starves() -> None:
    """Sessions that share the bound are served in turn."""
    feeds = make_feeds((20, 0, 0), (20, 0, 0), (20, 0, 0), prefixed={0, 1, 2})
    for forward in range(1, 4):
        [served] = [index for index, grant in enumerate(share_rows(feeds, 512, 8)) if grant]
        assert feeds[served].session.last_forward == 0
        feeds[served].session.last_forward = forward


def test_logits_of_a_prefix_lie_apart_from_those_to_draw_behind() -> None:
    """A finished and an unfinished prompt beside a step: every range names the rows of its own feed."""
    feeds = make_feeds((5, 1, 2), (9, 0, 0), (4, 3, 1), (6, 0, 0), prefixed={0, 1, 2})
    batch = build_batch(feeds, [6, 4, 2, 0], CPU)
    rows = [[int(batch.wanted[place]) for place in places] for places in batch.prefixes]
    assert rows == [[0, 1, 2], [6, 7, 8, 9], [], []]
    assert batch.plan.positions[torch.tensor(rows[0] + rows[1])].tolist() == [1, 2, 3, 0, 1, 2, 3]
    found = [None if places is None else [int(batch.wanted[place]) for place in places] for places in batch.ranges]
    assert found == [[3, 4, 5], None, [10, 11], None]
    assert batch.wanted.tolist() == [*range(12)]
