"""Several guesses as one tree: what is merged, what stands side by side, and what may be left out."""

import random
from dataclasses import replace

import pytest

from gateway.rounds.merging import cut, merged, one_hot
from gateway.rounds.round import LOOKUP, NOTHING, DrafterId, FallbackReason, HopCost, Proposal
from outrider.parameters import DraftDistribution, Rule
from outrider.token_tree import TokenTree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tokens of every path from the root."""
    return {tuple(tree.token_ids[row - 1] for row in tree.path(row)) for row in range(1, len(tree) + 1)}


def guess(tokens: str, parents: str, values: list[float], drafter: str = "a") -> Proposal:
    """A proposal, a digit a row."""
    tree = TokenTree(tuple(map(int, tokens)), tuple(map(int, parents)), values=tuple(values))
    return Proposal(tree, drafter=DrafterId(drafter), compute_us=10, hop=HopCost(1, 20, 30))


def random_guess(source: random.Random, drafter: str) -> Proposal:
    """A tree of up to eight rows over three tokens, whose values fall along every path."""
    tokens, parents, values = [], [], []
    for row in range(source.randint(1, 8)):
        parents.append(source.randint(0, row))
        tokens.append(source.randrange(3))
        values.append(source.random() * (values[parents[-1] - 1] if parents[-1] else 1.0))
    return Proposal(TokenTree(tuple(tokens), tuple(parents), values=tuple(values)), drafter=DrafterId(drafter))


def test_equal_guesses_become_one_row() -> None:
    """It is worth what it is to the one who values it most, and belongs to the first who made it."""
    whole = merged([guess("12", "01", [0.5, 0.4]), guess("13", "01", [0.7, 0.6], "b")], Rule.MATCH, 8)
    assert whole.tree == TokenTree((1, 2, 3), (0, 1, 1), values=(0.7, 0.4, 0.6))
    assert [whole.source(row) for row in (1, 2, 3)] == ["a", "a", "b"]
    assert (whole.compute_us, whole.hop) == (10, HopCost(1, 20, 60))


def test_a_union_has_all_paths_and_no_others() -> None:
    """Of 500 random pairs and triples; values never rise along a path, and a cut keeps the most valuable rows."""
    source = random.Random(3)
    for _ in range(500):
        parts = [random_guess(source, name) for name in "abc"[: source.randint(2, 3)]]
        tree = merged(parts, Rule.MATCH, 99).tree
        assert paths(tree) == set().union(*(paths(part.tree) for part in parts))
        assert len(tree) == len(paths(tree))
        assert all(
            not parent or tree.values[parent - 1] >= value
            for parent, value in zip(tree.parents, tree.values, strict=True)
        )
        count = source.randint(1, len(tree))
        fewer = cut(Proposal(tree), count).tree
        assert sorted(fewer.values) == sorted(tree.values)[-count:]
        assert paths(fewer) <= paths(tree)


def test_no_row_is_worth_more_than_its_parent() -> None:
    """Where one drafter values a row more than another one values what it stands on."""
    whole = merged([guess("1", "0", [0.2]), guess("12", "01", [0.9, 0.8], "b")], Rule.MATCH, 8)
    assert whole.tree.values == (0.9, 0.8)
    assert merged([guess("12", "01", [0.3, 0.2]), guess("12", "01", [0.9, 0.1])], Rule.TYPICAL, 8).tree.values == (
        0.9,
        0.2,
    )


def test_under_uniforms_duplicates_stand_side_by_side() -> None:
    """In the order of the drafters, each row as it was drawn; a proposal without room is left out whole."""
    first, second = (DraftDistribution((1, 2), (3, 1)), DraftDistribution((1, 5), (1, 1)))
    a = Proposal(TokenTree((1, 1), (0, 1), (first, first)), drafter=DrafterId("a"))
    b = Proposal(TokenTree((1, 5), (0, 1), (second, second)), drafter=DrafterId("b"))
    whole = merged([a, b], Rule.RATIO, 8)
    assert whole.tree == TokenTree((1, 1, 1, 5), (0, 1, 0, 3), (first, first, second, second))
    assert whole.sources == ("a", "a", "b", "b")
    assert merged([a, b], Rule.BLOCK, 3).tree == a.tree


def test_whether_a_draft_has_room_does_not_depend_on_what_it_drew() -> None:
    """Under uniforms it takes the room that it was asked to fill; a lookup draws nothing, and takes what it has."""
    law = DraftDistribution((1, 2), (3, 1))
    first, second = (Proposal(TokenTree((1,), (0,), (law,)), drafter=DrafterId(each)) for each in "ab")
    looked = replace(second, drafter=LOOKUP)
    assert merged([first, second], Rule.RATIO, 3, draft_count=2).tree == first.tree
    assert len(merged([first, second], Rule.RATIO, 4, draft_count=2).tree) == 2
    assert len(merged([first, looked], Rule.RATIO, 3, draft_count=2).tree) == 2


def test_who_is_missing_is_left_out() -> None:
    """One proposal is itself; of none the first reason is given."""
    lost, late = (Proposal(fallback_reason=each) for each in (FallbackReason.DRAFT_LOST, FallbackReason.DRAFT_LATE))
    assert merged([lost, guess("1", "0", [0.5])], Rule.MATCH, 8).tree.token_ids == (1,)
    assert merged([NOTHING, lost, late], Rule.MATCH, 8) is lost
    assert merged([NOTHING], Rule.MATCH, 8) is NOTHING


def test_a_cut_keeps_who_made_what() -> None:
    """Rows and sources are left out together, and what remains is still a tree."""
    whole = merged([guess("12", "01", [0.5, 0.4]), guess("3", "0", [0.45], "b")], Rule.MATCH, 8)
    fewer = cut(whole, 2)
    assert (fewer.tree.token_ids, fewer.sources) == ((1, 3), ("a", "b"))
    assert cut(whole, 3) is whole


@pytest.mark.parametrize("tokens", [(), (0,), (5, 0, 7)])
def test_what_was_not_drawn_has_one_hot_distributions(tokens: tuple[int, ...]) -> None:
    """Token 0 among them: each row's whole probability is on its token."""
    found = one_hot(TokenTree.chain(tokens)).distributions
    assert found == tuple(DraftDistribution((token,), (1,)) for token in tokens)
