"""Proposals and the shapes that are asked for, between protobuf messages and plain values.

Whether a proposal fits the session's rule is the session's to say: a message comes before its session is looked up.
"""

import math
from collections.abc import Sequence

from outrider.errors import InvalidRequest, check_count, check_range, check_token_ids
from outrider.parameters import (
    DraftDistribution,
)
from outrider.token_tree import MAX_CHILDREN, MAX_DEPTH, MAX_LEVEL_ROWS, Branch, TokenTree, TreeShape
from outrider.v1 import types_pb2 as pb

MAX_SUPPORT = 256
MAX_WEIGHT = 65535
MAX_BRANCHES = 64
MAX_BRANCHES_BYTES = 192 << 10
"""Most in one message: less than a frame of a link. With distributions of 64 tokens a guess takes about 350 bytes."""


def tree_from(message: pb.TokenTree, vocabulary_size: int, max_rows: int, *, with_logprobs: bool = False) -> TokenTree:
    """A proposal, the parents of a chain filled in; its log-probabilities are left out unless they are wanted.

    Raises InvalidRequest.
    """
    num_rows = len(message.token_ids)
    check_count("proposal.token_ids", num_rows, max_rows, "rows")
    # Most proposals are chains without distributions, and what is absent is not gone through.
    if message.parents:
        _check_rows("parents", len(message.parents), num_rows)
        for row, parent in enumerate(message.parents):
            check_range(f"proposal.parents.{row}", parent, 0, row)
    token_ids = check_token_ids("proposal.token_ids", message.token_ids, vocabulary_size)
    distributions: tuple[DraftDistribution, ...] = ()
    if message.distributions:
        _check_rows("distributions", len(message.distributions), num_rows)
        distributions = _distributions_from(
            "proposal", message.distributions, message.parents, token_ids, vocabulary_size
        )
    logprobs = _logprobs_from("proposal", message.logprobs, num_rows) if with_logprobs else ()
    values: tuple[float, ...] = ()
    if message.values:
        values = tuple(message.values)
        _check_rows("values", len(values), num_rows)
        for row, value in enumerate(values):
            if not 0 < value <= 1:
                raise InvalidRequest(f"proposal.values.{row}", value, "in (0, 1]")
    return TokenTree(token_ids, tuple(message.parents[:]) or tuple(range(num_rows)), distributions, logprobs, values)


def shape_from(message: pb.TreeShape, field: str) -> TreeShape:
    """The shape of a tree that is asked for; raises InvalidRequest."""
    check_range(f"{field}.max_depth", message.max_depth, 0, MAX_DEPTH)
    check_range(f"{field}.max_children", message.max_children, 0, MAX_CHILDREN)
    check_count(f"{field}.expansions", len(message.expansions), MAX_DEPTH, "entries")
    for depth, count in enumerate(message.expansions):
        check_range(f"{field}.expansions.{depth}", count, 1, MAX_CHILDREN)
    check_range(f"{field}.max_width", message.max_width, 0, MAX_LEVEL_ROWS)
    expansions = tuple(message.expansions)
    return TreeShape(message.max_depth, message.max_children, expansions, message.max_width, message.is_static).checked(
        field
    )


def shape_message(shape: TreeShape) -> pb.TreeShape:
    return pb.TreeShape(
        max_depth=shape.max_depth,
        max_children=shape.max_children,
        expansions=shape.expansions,
        max_width=shape.max_width,
        is_static=shape.is_static,
    )


def _logprobs_from(field: str, entries: Sequence[float], num_rows: int) -> tuple[float, ...]:
    """Log-probabilities of all rows, or none; raises InvalidRequest."""
    if entries and len(entries) != num_rows:
        raise InvalidRequest(f"{field}.logprobs", f"{len(entries)} entries", f"empty or {num_rows} entries")
    for row, logprob in enumerate(entries):
        if not -math.inf < logprob <= 0:
            raise InvalidRequest(f"{field}.logprobs.{row}", logprob, "finite and at most 0")
    return tuple(entries)


def _check_rows(name: str, num_entries: int, num_rows: int) -> None:
    if num_entries != num_rows:
        raise InvalidRequest(f"proposal.{name}", f"{num_entries} entries", f"empty or {num_rows} entries")


def _distributions_from(
    of: str,
    entries: Sequence[pb.DraftDistribution],
    parents: Sequence[int],
    token_ids: Sequence[int],
    vocabulary_size: int,
) -> tuple[DraftDistribution, ...]:
    """Distributions that the rows' tokens were drawn from; those left out are made of the sibling's before.

    `of` names the message that has them; a chain's parents may be left out.
    """
    distributions: list[DraftDistribution] = []
    siblings: dict[int, int] = {}
    for row, each in enumerate(entries):
        parent = parents[row] if parents else row
        field, sibling = f"{of}.distributions.{row}", siblings.get(parent)
        if each.token_ids or each.weights:
            num_ids = len(each.token_ids)
            check_count(f"{field}.token_ids", num_ids, MAX_SUPPORT, "ids")
            if len(each.weights) != num_ids:
                raise InvalidRequest(f"{field}.weights", f"{len(each.weights)} entries", f"{num_ids} entries")
            ids = check_token_ids(f"{field}.token_ids", each.token_ids, vocabulary_size)
            if len(set(ids)) < num_ids:
                raise InvalidRequest(f"{field}.token_ids", list(ids), "without repetition")
            weights = tuple(each.weights)
            # Looked at one by one only when one is at fault: a round carries hundreds.
            if weights and not 1 <= min(weights) <= max(weights) <= MAX_WEIGHT:
                for index, weight in enumerate(weights):
                    check_range(f"{field}.weights.{index}", weight, 1, MAX_WEIGHT)
            distribution = DraftDistribution(ids, weights)
        elif sibling is None:
            raise InvalidRequest(f"{field}.token_ids", "empty", "filled for the first of siblings")
        else:
            distribution = distributions[sibling].without(token_ids[sibling])
        if token_ids[row] not in distribution.token_ids:
            support = f"a support of the row's token {token_ids[row]}"
            raise InvalidRequest(f"{field}.token_ids", list(distribution.token_ids), support)
        distributions.append(distribution)
        siblings[parent] = row
    return tuple(distributions)


def tree_message(tree: TokenTree, *, with_logprobs: bool = False) -> pb.TokenTree:
    """A proposal to send; a chain travels without its parents, and what a target does not read only if asked."""
    message = pb.TokenTree()
    write_tree(message, tree, with_logprobs=with_logprobs)
    return message


def write_tree(
    message: pb.TokenTree, tree: TokenTree, *, with_logprobs: bool = False, with_distributions: bool = True
) -> None:
    """Makes a new message that of `tree_message`, without distributions where no rule tests with them."""
    message.SetInParent()
    message.token_ids.extend(tree.token_ids)
    if not tree.is_chain:
        message.parents.extend(tree.parents)
    siblings: dict[int, int] = {}
    for row, each in enumerate(tree.distributions if with_distributions else ()):
        sibling = siblings.get(tree.parents[row])
        siblings[tree.parents[row]] = row
        if sibling is not None and each == tree.distributions[sibling].without(tree.token_ids[sibling]):
            message.distributions.add()
        else:
            message.distributions.add(token_ids=each.token_ids, weights=each.weights)
    if with_logprobs:
        message.logprobs.extend(tree.logprobs)
        message.values.extend(tree.values)


def write_branches(message: pb.Branches, branches: Sequence[Branch]) -> None:
    """Makes a new message that of branches, of which the last are left out where they are too large for one message."""
    message.SetInParent()
    num_bytes = 0
    for branch in branches:
        laws = [pb.DraftDistribution(token_ids=each.token_ids, weights=each.weights) for each in branch.distributions]
        added = pb.Branch(**branch._asdict() | {"distributions": laws})
        num_bytes += added.ByteSize()
        if num_bytes > MAX_BRANCHES_BYTES:
            break
        message.branches.append(added)


def branches_from(
    message: pb.Branches, vocabulary_size: int, max_rows: int, max_branches: int = MAX_BRANCHES
) -> list[Branch]:
    """Branches of at most so many guesses each, no two for one outcome; raises InvalidRequest."""
    check_count("branches.branches", len(message.branches), max_branches, "branches")
    found, outcomes = [], set[tuple[int, int]]()
    for number, each in enumerate(message.branches):
        field = f"branches.branches.{number}"
        accepted_count = check_range(f"{field}.accepted_count", each.accepted_count, 0, max_rows)
        next_token_id = check_range(f"{field}.next_token_id", each.next_token_id, 0, vocabulary_size - 1)
        if not 1 <= len(each.token_ids) <= max_rows:
            raise InvalidRequest(f"{field}.token_ids", f"{len(each.token_ids)} ids", f"1 to {max_rows} ids")
        if (accepted_count, next_token_id) in outcomes:
            outcome = f"{next_token_id} after {accepted_count} rows"
            raise InvalidRequest(f"{field}.next_token_id", outcome, "an outcome that no branch before it has")
        outcomes.add((accepted_count, next_token_id))
        token_ids = check_token_ids(f"{field}.token_ids", each.token_ids, vocabulary_size)
        logprobs = _logprobs_from(field, each.logprobs, len(token_ids))
        if len(each.distributions) not in {0, len(token_ids)}:
            limit = f"empty or {len(token_ids)} entries"
            raise InvalidRequest(f"{field}.distributions", f"{len(each.distributions)} entries", limit)
        distributions = _distributions_from(field, each.distributions, (), token_ids, vocabulary_size)
        found.append(Branch(accepted_count, next_token_id, token_ids, logprobs, distributions))
    return found
