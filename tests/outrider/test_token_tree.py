"""Token trees: structure and refusals."""

import pytest

from outrider.errors import InvalidRequest
from outrider.token_tree import EMPTY, TokenTree

#        root
#       /    \
#      1      2
#     / \      \
#    3   5      4
TREE = TokenTree(token_ids=(10, 20, 30, 40, 50), parents=(0, 0, 1, 2, 1))


def test_rows_know_depth_path_and_children() -> None:
    """Rows count from 1, the root is row 0, and paths leave the root out."""
    assert TREE.depths == (0, 1, 1, 2, 2, 2)
    assert [TREE.path(row) for row in range(6)] == [(), (1,), (2,), (1, 3), (2, 4), (1, 5)]
    assert [TREE.children(row) for row in range(3)] == [(1, 2), (3, 5), (4,)]
    assert TREE.leaves() == (3, 4, 5)
    assert TREE.depths[4] == 2


def test_chain_and_empty_tree_are_trees_of_width_one() -> None:
    """A chain has one leaf, and the empty tree's only leaf is its root."""
    chain = TokenTree.chain([7, 8, 9])
    assert chain == TokenTree((7, 8, 9), (0, 1, 2))
    assert chain.leaves() == (3,)
    assert len(EMPTY) == 0
    assert EMPTY.leaves() == (0,)
    assert not EMPTY


@pytest.mark.parametrize(
    ("token_ids", "parents", "field"),
    [
        ((1, 2), (0,), "tree.parents"),
        ((1, 2), (0, 2), "tree.parents[1]"),
        ((1,), (-1,), "tree.parents[0]"),
        ((1, -5), (0, 1), "tree.token_ids[1]"),
    ],
)
def test_malformed_trees_are_refused_by_field(token_ids: tuple[int, ...], parents: tuple[int, ...], field: str) -> None:
    """A tree whose rows cannot be computed in order names the entry that is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        TokenTree(token_ids, parents)
    assert caught.value.metadata["field"] == field
