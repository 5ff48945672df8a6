"""Tests of outrider.rpc.messages.tree: trees and distributions arrive as they were sent, or are refused."""

import pytest

from outrider.errors import InvalidRequest
from outrider.parameters import DraftDistribution
from outrider.rpc.messages.tree import MAX_SUPPORT, MAX_WEIGHT, shape_from, shape_message, tree_from, tree_message
from outrider.token_tree import TokenTree, TreeShape
from outrider.v1 import types_pb2 as pb

DISTRIBUTIONS = (
    DraftDistribution((4, 9), (1, MAX_WEIGHT)),
    DraftDistribution((5,), (7,)),
    DraftDistribution((0, 6), (3, 2)),
)


def distribution_of(token_ids: list[int], weights: list[int]) -> pb.TokenTree:
    """A proposal of token 1 with a distribution."""
    return pb.TokenTree(token_ids=[1], distributions=[pb.DraftDistribution(token_ids=token_ids, weights=weights)])


@pytest.mark.parametrize("parents", [(0, 1, 2), (0, 0, 1)])
def test_trees_arrive_as_they_were_sent(parents: tuple[int, ...]) -> None:
    """A chain travels without parents and arrives with them."""
    message = tree_message(TokenTree((4, 5, 6), parents))
    assert bool(message.parents) == (parents == (0, 0, 1))
    assert tree_from(message, 10, 8) == TokenTree((4, 5, 6), parents)


def test_distributions_arrive_as_they_were_sent() -> None:
    """One a row, in row order, ids and weights in the order of the draft."""
    message = pb.TokenTree.FromString(tree_message(TokenTree((4, 5, 6), (0, 1, 2), DISTRIBUTIONS)).SerializeToString())
    assert tree_from(message, 10, 8).distributions == DISTRIBUTIONS


def test_the_widest_distribution_arrives() -> None:
    """256 ids, the token itself the last of them."""
    distribution = DraftDistribution(tuple(range(MAX_SUPPORT)), (MAX_WEIGHT,) * MAX_SUPPORT)
    message = tree_message(TokenTree((MAX_SUPPORT - 1,), (0,), (distribution,)))
    assert tree_from(message, MAX_SUPPORT, 8).distributions == (distribution,)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.TokenTree(token_ids=[1] * 9), "proposal.token_ids"),
        (pb.TokenTree(token_ids=[10]), "proposal.token_ids.0"),
        (pb.TokenTree(token_ids=[1, -1]), "proposal.token_ids.1"),
        (pb.TokenTree(token_ids=[1, 2], parents=[0]), "proposal.parents"),
        (pb.TokenTree(token_ids=[1, 2], parents=[0, 2]), "proposal.parents.1"),
        (pb.TokenTree(token_ids=[1, 2], parents=[-1, 1]), "proposal.parents.0"),
        (pb.TokenTree(parents=[0]), "proposal.parents"),
    ],
)
def test_malformed_proposals_are_refused(message: pb.TokenTree, field: str) -> None:
    """Too many rows, unknown tokens, children before parents."""
    with pytest.raises(InvalidRequest) as caught:
        tree_from(message, vocabulary_size=10, max_rows=8)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.TokenTree(token_ids=[1, 2], distributions=[pb.DraftDistribution()]), "proposal.distributions"),
        (pb.TokenTree(distributions=[pb.DraftDistribution()]), "proposal.distributions"),
        (distribution_of([], []), "proposal.distributions.0.token_ids"),
        (distribution_of([2], [1]), "proposal.distributions.0.token_ids"),
        (distribution_of([1, 2, 1], [1, 1, 1]), "proposal.distributions.0.token_ids"),
        (distribution_of([1, 10], [1, 1]), "proposal.distributions.0.token_ids.1"),
        (distribution_of([-1, 1], [1, 1]), "proposal.distributions.0.token_ids.0"),
        (distribution_of([1] * (MAX_SUPPORT + 1), [1] * (MAX_SUPPORT + 1)), "proposal.distributions.0.token_ids"),
        (distribution_of([1, 2], [1]), "proposal.distributions.0.weights"),
        (distribution_of([1], [1, 1]), "proposal.distributions.0.weights"),
        (distribution_of([1, 2], [1, 0]), "proposal.distributions.0.weights.1"),
        (distribution_of([1, 2], [-3, 1]), "proposal.distributions.0.weights.0"),
        (distribution_of([1, 2], [1, MAX_WEIGHT + 1]), "proposal.distributions.0.weights.1"),
    ],
)
def test_malformed_distributions_are_refused(message: pb.TokenTree, field: str) -> None:
    """One for some rows only, without the row's token, twice an id, unknown ids, too wide, weights of no use."""
    with pytest.raises(InvalidRequest) as caught:
        tree_from(message, vocabulary_size=10, max_rows=8)
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["limit"]


# Two tries of one root: 4, 9 and 7 without replacement, 6 without replacement after the first of them, 9 by itself.
FIRST, BEHIND, OTHER = (DraftDistribution(*each) for each in (((4, 9, 7), (5, 3, 2)), ((8, 6), (1, 1)), ((9,), (1,))))
FOREST = TokenTree(
    (4, 8, 9, 6, 7, 9, 9),
    (0, 1, 0, 1, 0, 0, 0),
    (FIRST, BEHIND, FIRST.without(4), BEHIND.without(8), FIRST.without(4).without(9), OTHER, OTHER),
)


def test_siblings_without_replacement_travel_in_two_bytes() -> None:
    """What is left out is made again of the sibling before, whatever stands between; equal siblings are sent."""
    message = pb.TokenTree.FromString(tree_message(FOREST).SerializeToString())
    assert [bool(each.token_ids) for each in message.distributions] == [True, True, False, False, False, True, True]
    assert tree_from(message, 10, 8) == FOREST
    size = message.ByteSize()
    message.distributions[2].token_ids.extend((9, 7))
    message.distributions[2].weights.extend((3, 2))
    assert message.ByteSize() == size + 8
    assert tree_from(message, 10, 8) == FOREST


@pytest.mark.parametrize(
    ("parents", "token_ids", "field", "limit"),
    [
        ([0, 0], (4, 9), "proposal.distributions.0.token_ids", "filled for the first of siblings"),
        ([0, 1], (4, 9), "proposal.distributions.1.token_ids", "filled for the first of siblings"),
        ([], (4, 9), "proposal.distributions.1.token_ids", "filled for the first of siblings"),
        ([0, 0], (4, 4), "proposal.distributions.1.token_ids", "a support of the row's token 4"),
        ([0, 0, 0], (4, 9, 9), "proposal.distributions.2.token_ids", "a support of the row's token 9"),
    ],
)
def test_distributions_that_cannot_be_made_are_refused(
    parents: list[int], token_ids: tuple[int, ...], field: str, limit: str
) -> None:
    """Without a sibling, with the sibling's own token, and with nothing left."""
    first = (
        pb.DraftDistribution() if field.split(".")[2] == "0" else pb.DraftDistribution(token_ids=[4, 9], weights=[1, 1])
    )
    distributions = [first, *(pb.DraftDistribution() for _ in token_ids[1:])]
    message = pb.TokenTree(token_ids=token_ids, parents=parents, distributions=distributions)
    with pytest.raises(InvalidRequest) as caught:
        tree_from(message, 10, 8)
    assert (caught.value.metadata["field"], caught.value.metadata["limit"]) == (field, limit)


def test_the_row_of_a_bad_distribution_is_named() -> None:
    """The second one."""
    message = tree_message(TokenTree((4, 5), (0, 1), DISTRIBUTIONS[:2]))
    message.distributions[1].weights[0] = 0
    with pytest.raises(
        InvalidRequest, match=r"^proposal\.distributions\.1\.weights\.0 is 0, but must be in \[1, 65535\]$"
    ):
        tree_from(message, 10, 8)


def test_log_probabilities_travel_only_where_they_are_wanted() -> None:
    """A target is sent the tree without them, and takes none; the gateway is sent all of it."""
    tree = TokenTree((4, 5), (0, 1), (), (-0.5, 0.0))
    assert tree_from(tree_message(tree), 10, 8, with_logprobs=True).logprobs == ()
    message = pb.TokenTree.FromString(tree_message(tree, with_logprobs=True).SerializeToString())
    assert tree_from(message, 10, 8, with_logprobs=True) == tree
    assert tree_from(message, 10, 8).logprobs == ()
    message.ClearField("logprobs")
    assert message == tree_message(tree)


@pytest.mark.parametrize("logprob", [0.001, float("inf"), float("-inf"), float("nan")])
def test_what_is_no_log_probability_is_refused(logprob: float) -> None:
    """The error names the row; so does one about their number."""
    with pytest.raises(InvalidRequest, match=r"^proposal\.logprobs\.1 is .*, but must be finite and at most 0"):
        tree_from(pb.TokenTree(token_ids=[1, 2], logprobs=[-1, logprob]), 10, 8, with_logprobs=True)
    with pytest.raises(InvalidRequest, match=r"^proposal\.logprobs is '1 entries'"):
        tree_from(pb.TokenTree(token_ids=[1, 2], logprobs=[-1]), 10, 8, with_logprobs=True)


@pytest.mark.parametrize(
    "shape",
    [
        TreeShape(),
        TreeShape(32, 8, max_width=64, is_static=True),
        TreeShape(max_width=1),
        TreeShape(is_static=True),
        TreeShape(3, 2, (1,) * 31 + (8,)),
    ],
)
def test_shapes_arrive_as_they_were_sent(shape: TreeShape) -> None:
    """Every field, up to its limit."""
    assert shape_from(pb.TreeShape.FromString(shape_message(shape).SerializeToString()), "shape") == shape


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (pb.TreeShape(max_depth=33), "shape.max_depth is 33, but must be in [0, 32]"),
        (pb.TreeShape(max_children=-1), "shape.max_children is -1, but must be in [0, 8]"),
        (pb.TreeShape(max_width=65), "shape.max_width is 65, but must be in [0, 64]"),
        (pb.TreeShape(max_width=-1), "shape.max_width is -1, but must be in [0, 64]"),
        (
            pb.TreeShape(expansions=[2], is_static=True),
            "shape.expansions is [2], but must be empty together with shape.is_static",
        ),
        (
            pb.TreeShape(expansions=[2, 1], max_width=1),
            "shape.expansions is [2, 1], but must be empty together with shape.max_width",
        ),
    ],
)
def test_impossible_shapes_are_refused(message: pb.TreeShape, sentence: str) -> None:
    """With the field, its value and the limit."""
    with pytest.raises(InvalidRequest) as raised:
        shape_from(message, "shape")
    assert raised.value.message == sentence
