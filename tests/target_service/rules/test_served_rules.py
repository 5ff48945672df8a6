"""Sessions of a target under each rule: which proposals fit, and that a step has its effect once."""

from dataclasses import replace

import pytest
from support.basics import spec_of
from support.drafting.rules import RULES_WITH_LAWS, drafted, ruled
from support.services.stepped_target import PROMPT, Target, assert_like_fresh

from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.model_service.outbox import SessionAnswer
from outrider.parameters import DraftDistribution, FinishReason, Rule, SessionSpec
from outrider.token_tree import EMPTY, TokenTree
from target_service.states import Step

SPEC = spec_of(PROMPT, 40, seed=4, eos=(), temperature=0.9)
LAW = DraftDistribution((9, 7), (3, 1))


def step(target: Target, epoch: int, base_len: int, tree: TokenTree, budget: int = 0) -> None:
    target.sessions.step(target.fence(epoch, base_len), Step(tree, budget, 0), target.answers)


def speak(runner: ModelRunner, spec: SessionSpec, draft_count: int) -> tuple[list[int], list[SessionAnswer]]:
    """A request to its end, with proposals as long as they fit; its tokens and verdicts."""
    target = Target(runner)
    target.open(spec)
    answers = target.run()
    while target.held.finish_reason is None:
        now = replace(spec, token_ids=tuple(target.tokens))
        count = min(draft_count, spec.max_len - len(now.token_ids) - 1)
        step(target, 1, len(now.token_ids), drafted(runner, now, count) if count else EMPTY)
        answers += target.run()
    assert_like_fresh(target)
    tokens = list(target.tokens)
    target.table.clear()
    return tokens, answers


@pytest.mark.parametrize("rule", Rule)
def test_a_request_ends_with_as_many_tokens_under_any_rule(runner: ModelRunner, rule: Rule) -> None:
    """Verdicts follow each other, some keep draft tokens, and the cache is that of a fresh session."""
    tokens, answers = speak(runner, ruled(SPEC, rule), 4)
    committed = [token for answer in answers if answer.content for token in answer.content.token_ids]
    assert tokens == [*PROMPT, *committed]
    assert len(tokens) == SPEC.max_len
    assert len(answers) < SPEC.max_len - len(PROMPT)
    assert speak(runner, ruled(SPEC, rule), 4)[0] == tokens


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_chain_may_go_on_behind_an_end(target: Target, rule: Rule) -> None:
    """The draft does not stop there; the target does, and counts nothing after it."""
    free = ruled(SPEC, rule)
    target.open(free)
    target.run()
    now = replace(free, token_ids=tuple(target.tokens))
    tree = drafted(target.runner, now, 4, noise=0.0, top_n=200)
    target.table.clear()
    stop = tree.token_ids[1]
    assert stop not in {now.token_ids[-1], tree.token_ids[0]}
    target.open(replace(free, stop_token_ids=frozenset({stop})))
    target.run()
    step(target, 1, 6, tree)
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.finish_reason is FinishReason.STOP_TOKEN
    assert (answer.content.accepted_rows, answer.content.next_token_id) == ((1, 2), None)
    assert answer.content.evaluated_count == 2


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.TYPICAL])
def test_distributions_are_refused_where_the_rule_has_no_use_for_them(target: Target, rule: Rule) -> None:
    """Field, number and rule; the session is as it was."""
    target.open(ruled(SPEC, rule))
    target.run()
    with pytest.raises(
        InvalidRequest, match=f"proposal.distributions is '1 entries', but must be empty under the rule {rule}"
    ):
        step(target, 1, 6, TokenTree.chain([9], [LAW]))
    step(target, 1, 6, TokenTree.chain([9]))
    assert len(target.run()) == 1


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_rule_that_needs_distributions_refuses_a_proposal_without(target: Target, rule: Rule) -> None:
    """On a step and on an open, before anything happens; an empty proposal needs none."""
    spec = ruled(SPEC, rule)
    reason = f"proposal.distributions is 'empty', but must be one entry for each row under the rule {rule}"
    with pytest.raises(InvalidRequest, match=reason):
        target.open(spec, tree=TokenTree.chain([9]))
    assert target.table.get(target.session_id) is None
    target.open(spec)
    target.run()
    with pytest.raises(InvalidRequest, match=reason):
        step(target, 1, 6, TokenTree.chain([9, 7]))
    step(target, 1, 6, EMPTY)
    assert len(target.run()) == 1


@pytest.mark.parametrize("rule", Rule)
def test_a_step_is_answered_again_with_the_same_tokens(target: Target, rule: Rule) -> None:
    """A repetition gets the verdict that was given, with another proposal too; a new epoch decides as the old one."""
    spec = ruled(SPEC, rule)
    target.open(spec)
    [opened] = target.run()
    now = replace(spec, token_ids=tuple(target.tokens))
    tree = drafted(target.runner, now, 4)
    step(target, 1, 6, tree)
    [first] = target.run()
    step(target, 1, 6, tree)
    step(target, 1, 6, EMPTY)
    assert target.run() == [first, first]
    step(target, 2, 6, tree)
    [again] = target.run()
    assert again.content == first.content
    assert opened.content is not None
    target.open(replace(spec, token_ids=tuple(target.tokens[:6])), epoch=3, tree=tree)
    [reopened] = target.run()
    assert reopened.content == first.content


@pytest.mark.parametrize("rule", Rule)
def test_a_verdict_under_way_becomes_the_step_s_own(target: Target, rule: Rule) -> None:
    """A proposal that comes while the target goes on unasked is verified as if it had come alone."""
    spec = ruled(SPEC, rule)
    target.open(spec)
    target.run()
    tree = drafted(target.runner, replace(spec, token_ids=tuple(target.tokens)), 4)
    step(target, 1, 6, tree)
    [expected] = target.run()
    target.sessions.rollback(target.fence(2, 6))
    target.acknowledge(2, 6, budget=1)
    step(target, 2, 6, tree)
    [answer] = target.run()
    assert answer.content == expected.content


@pytest.mark.parametrize("rule", Rule)
def test_unasked_tokens_are_those_of_plain_decoding(target: Target, rule: Rule) -> None:
    """Without a proposal every rule says what `match` says."""
    target.open(ruled(SPEC, rule), budget=40)
    target.run()
    tokens = list(target.tokens)
    target.table.clear()
    target.open(SPEC, budget=40)
    target.run()
    assert target.tokens == tokens
