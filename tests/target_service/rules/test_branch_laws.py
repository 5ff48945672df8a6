"""Branches come with the laws that their rule tests with, and are refused where they do not, by field and limit."""

import pytest
from support.basics import spec_of
from support.drafting.rules import ruled

from outrider.errors import InvalidRequest
from outrider.parameters import DraftDistribution, Rule
from outrider.rpc.messages.tree import branches_from
from outrider.token_tree import Branch, TokenTree
from outrider.v1 import types_pb2
from target_service.acceptance import TargetVerdict
from target_service.states import PushedBranches, check_branches

LAW = DraftDistribution((7, 8), (3, 1))
PROMPT = (5, 17, 3)


@pytest.mark.parametrize("rule", Rule)
def test_laws_are_there_where_the_rule_needs_them(rule: Rule) -> None:
    """And not where it does not; under typical there are no branches."""
    spec = ruled(spec_of(PROMPT, 60), rule)
    bare, drawn = Branch(0, 9, (7, 8)), Branch(1, 9, (7, 8), distributions=(LAW, LAW))
    check_branches([], spec, len(PROMPT))
    good, bad = ([drawn], [bare]) if rule.needs_distributions else ([bare], [drawn])
    if rule is not Rule.TYPICAL:
        check_branches(good * 2, spec, len(PROMPT))
    with pytest.raises(InvalidRequest) as caught:
        check_branches([*good, *bad], spec, len(PROMPT))
    field = "branches.branches" if rule is Rule.TYPICAL else "branches.branches.1.distributions"
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("laws", "field"),
    [
        ([((7, 8), (1, 1))], "distributions"),
        ([((7, 8), (1, 1)), ((), ())], "distributions.1.token_ids"),
        ([((7, 8), (1, 1)), ((7,), (1,))], "distributions.1.token_ids"),
        ([((7, 8), (1, 0)), ((8,), (1,))], "distributions.0.weights.1"),
        ([((7, 7), (1, 1)), ((8,), (1,))], "distributions.0.token_ids"),
        ([((7, 99), (1, 1)), ((8,), (1,))], "distributions.0.token_ids.1"),
        ([((7,), (1, 1)), ((8,), (1,))], "distributions.0.weights"),
    ],
    ids=str,
)
def test_laws_of_a_branch_are_read_as_those_of_a_proposal(
    laws: list[tuple[tuple[int, ...], tuple[int, ...]]], field: str
) -> None:
    """One for each guess, each with its token in it."""
    message = types_pb2.Branches()
    branch = message.branches.add(accepted_count=1, next_token_id=9, token_ids=[7, 8])
    for token_ids, weights in laws:
        branch.distributions.add(token_ids=token_ids, weights=weights)
    with pytest.raises(InvalidRequest) as caught:
        branches_from(message, 40, 32)
    assert caught.value.metadata["field"] == f"branches.branches.0.{field}"


def test_the_branch_of_an_outcome_is_verified_with_its_laws() -> None:
    """Of several for one outcome it is the first; another token is no hit."""
    branches = [Branch(1, 9, (7,), (-1.0,), (LAW,)), Branch(1, 9, (8,), (-1.0,), (LAW,)), Branch(1, 4, (8,))]
    ahead = PushedBranches(branches, False, 0)
    verdict = TargetVerdict(3, (1,), (6, 9), 9, None, 1)
    assert ahead.step_after(verdict) == TokenTree.chain((7,), (LAW,), (-1.0,))
    assert ahead.step_after(verdict._replace(next_token_id=5)) is None
    assert ahead.step_after(verdict._replace(accepted_rows=())) is None
