"""What the plan of chains, trees and chunks of prompts says."""

import pytest
import torch
from hypothesis import given
from support.models.engine_cases import feeds_and_grants, make_feeds

from outrider.engine.batching import Feed, build_batch
from outrider.token_tree import TokenTree

CPU = torch.device("cpu")


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


@given(feeds_and_grants())
def test_every_row_has_its_own_place_and_sees_its_own_path(made: tuple[list[Feed], list[int]]) -> None:
    """Of chains, trees, trees that grow, and pieces of prompts, beside each other."""
    feeds, grants = made
    plan, row = build_batch(feeds, grants, CPU).plan, 0
    for feed, grant in zip(feeds, grants, strict=True):
        length, slots = len(feed.session), feed.session.table.slots(0, feed.start + grant).tolist()
        for place in range(feed.start, feed.start + grant):
            path = feed.tree.path(max(place - length + 1, 0))
            expected = slots[: min(place + 1, length)] + [slots[length + ancestor - 1] for ancestor in path]
            start, count = int(plan.key_starts[row]), int(plan.key_counts[row])
            assert plan.key_slots[start : start + count].tolist() == expected
            assert int(plan.slots[row]) == slots[place] == expected[-1]
            assert int(plan.positions[row]) == len(expected) - 1
            row += 1
    assert plan.num_rows == row


@pytest.mark.parametrize("grant", [3, 7])
def test_an_unfinished_prompt_wants_no_logits(grant: int) -> None:
    """A chunk has rows, and no place in the logits."""
    feeds = make_feeds((9, 1, 0), (4, 3, 0))
    batch = build_batch(feeds, [grant, 1], CPU)
    assert batch.ranges == [None, range(1)]
    assert batch.wanted.tolist() == [grant]
    assert batch.plan.positions.tolist() == [*range(1, 1 + grant), 3]


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
