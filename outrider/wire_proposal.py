"""Proposals between messages and plain values, with the ranges that types.proto states. Knows no rule and no session.

Whether a proposal fits the session's rule is the session's to say: a message comes before its session is looked up.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from outrider.checks import check_count, check_range, check_token_ids
from outrider.errors import InvalidRequest
from outrider.parameters import DraftDistribution
from outrider.v1 import types_pb2 as pb

MAX_SUPPORT = 256
MAX_WEIGHT = 65535


class Tree(Protocol):
    """A proposal, whatever class it has where it was made; parents may be empty for a chain."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Draft token of each row."""
        ...

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of each row, 0 for the root."""
        ...

    @property
    def distributions(self) -> tuple[DraftDistribution, ...]:
        """The law of each row's token, or nothing."""
        ...


def tree_from(message: pb.TokenTree, vocabulary_size: int, max_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids and parents of a proposal, the parents of a chain filled in. Raises InvalidRequest."""
    num_rows = len(message.token_ids)
    check_count("proposal.token_ids", num_rows, max_rows, "rows")
    if len(message.parents) not in {0, num_rows}:
        raise InvalidRequest("proposal.parents", f"{len(message.parents)} entries", f"empty or {num_rows} entries")
    for row, parent in enumerate(message.parents):
        check_range(f"proposal.parents.{row}", parent, 0, row)
    token_ids = check_token_ids("proposal.token_ids", message.token_ids, vocabulary_size)
    return token_ids, tuple(message.parents) or tuple(range(num_rows))


def distributions_from(message: pb.TokenTree, vocabulary_size: int) -> tuple[DraftDistribution, ...]:
    """The laws of a proposal's tokens, one a row or none at all. Raises InvalidRequest."""
    num_rows, num_laws = len(message.token_ids), len(message.distributions)
    if num_laws not in {0, num_rows}:
        raise InvalidRequest("proposal.distributions", f"{num_laws} entries", f"empty or {num_rows} entries")
    laws = []
    for row, (token_id, law) in enumerate(zip(message.token_ids, message.distributions, strict=False)):
        field = f"proposal.distributions.{row}"
        laws.append(_distribution(field, law, vocabulary_size))
        if token_id not in laws[-1].token_ids:
            raise InvalidRequest(f"{field}.token_ids", list(law.token_ids), f"a support of the row's token {token_id}")
    return tuple(laws)


def _distribution(field: str, law: pb.DraftDistribution, vocabulary_size: int) -> DraftDistribution:
    check_count(f"{field}.token_ids", len(law.token_ids), MAX_SUPPORT, "ids")
    if len(law.weights) != len(law.token_ids):
        raise InvalidRequest(f"{field}.weights", f"{len(law.weights)} entries", f"{len(law.token_ids)} entries")
    token_ids = check_token_ids(f"{field}.token_ids", law.token_ids, vocabulary_size)
    if len(set(token_ids)) < len(token_ids):
        raise InvalidRequest(f"{field}.token_ids", list(token_ids), "without repetition")
    weights = tuple(law.weights)
    # Looked at one by one only when one is at fault: a round carries hundreds.
    if weights and not 1 <= min(weights) <= max(weights) <= MAX_WEIGHT:
        for index, weight in enumerate(weights):
            check_range(f"{field}.weights.{index}", weight, 1, MAX_WEIGHT)
    return DraftDistribution(token_ids, weights)


def draft_logprobs_from(message: pb.TokenTree) -> tuple[float, ...]:
    """The draft's log-probabilities of a proposal's tokens, one a row or none at all. Raises InvalidRequest."""
    num_rows, num_logprobs = len(message.token_ids), len(message.logprobs)
    if num_logprobs not in {0, num_rows}:
        raise InvalidRequest("proposal.logprobs", f"{num_logprobs} entries", f"empty or {num_rows} entries")
    for row, logprob in enumerate(message.logprobs):
        if not -math.inf < logprob <= 0:
            raise InvalidRequest(f"proposal.logprobs.{row}", logprob, "finite and at most 0")
    return tuple(message.logprobs)


def tree_message(tree: Tree, logprobs: Sequence[float] = ()) -> pb.TokenTree:
    """A proposal to send; a chain travels without its parents.

    `logprobs` are the draft's own, for the gateway. The tree's are not looked at: a target must not see them.
    """
    is_chain = tuple(tree.parents) == tuple(range(len(tree.token_ids)))
    laws = [pb.DraftDistribution(token_ids=law.token_ids, weights=law.weights) for law in tree.distributions]
    parents = () if is_chain else tree.parents
    return pb.TokenTree(token_ids=tree.token_ids, parents=parents, distributions=laws, logprobs=logprobs)
