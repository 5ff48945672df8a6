"""Branches at a target without a thread: when it goes on by one, what it drops, and that no token depends on them."""

import random
from dataclasses import replace

import pytest
from support.basics import Answers, spec_of
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target, assert_like_fresh, plain

from outrider.drafters.drafter import GuessLimits
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.model_service.outbox import SessionAnswer
from outrider.parameters import Acceptance, Rule
from outrider.token_tree import EMPTY, Branch, TokenTree
from target_service.states import OpenSearch, PushedBranches, Step

SPEC = spec_of(PROMPT, 40, seed=3, eos=(), temperature=1.0)
FIRST = len(PROMPT)


@pytest.fixture(scope="module")
def tokens(runner: ModelRunner) -> list[int]:
    """What plain decoding says."""
    return plain(runner, SPEC)


def send(
    target: Target,
    base_len: int,
    *branches: Branch,
    epoch: int = 1,
    plain_on_miss: bool = False,
    owner: Answers | None = None,
) -> None:
    """Branches for the verdict on a length."""
    owner = target.answers if owner is None else owner
    target.sessions.run_ahead(target.fence(epoch, base_len), PushedBranches(branches, plain_on_miss, 0), owner)


def right(tokens: list[int], base_len: int, accepted_count: int, count: int = 3) -> Branch:
    """The branch for an outcome that comes, with guesses that are all right."""
    end = base_len + accepted_count
    return Branch(accepted_count, tokens[end], tuple(tokens[end + 1 : end + 1 + count]))


def wrong(base_len: int) -> Branch:
    """A branch for an outcome that cannot come at this length."""
    return Branch(3, base_len, (1, 2))


def said(answers: list[SessionAnswer]) -> list[tuple[int, int, bool, bool]]:
    """Length, rows that were accepted, whether it was a branch's and whether the target goes on, of each verdict."""
    verdicts = [(each.fence.base_len, each.content) for each in answers]
    return [(length, len(each.accepted_rows), each.is_of_branch, each.goes_on) for length, each in verdicts]


def test_a_branch_of_the_outcome_is_verified_without_a_message(target: Target, tokens: list[int]) -> None:
    """Sent while the prompt is read, during a verification, and after its verdict; the tokens are plain decoding's."""
    target.open(SPEC)
    send(target, FIRST, wrong(FIRST), right(tokens, FIRST, 0))
    assert said(target.run()) == [(FIRST, 0, False, True), (FIRST + 1, 3, True, False)]
    target.step(1, FIRST + 5, tokens[FIRST + 5 : FIRST + 7])
    send(target, FIRST + 5, right(tokens, FIRST + 5, 2))
    assert said(target.run()) == [(FIRST + 5, 2, False, True), (FIRST + 8, 3, True, False)]
    send(target, FIRST + 8, right(tokens, FIRST + 8, 3, 2))
    [answer] = target.run()
    assert said([answer]) == [(FIRST + 12, 2, True, False)]
    assert answer.content.hosted.tree == TokenTree.chain(tokens[FIRST + 12 : FIRST + 14])
    assert target.tokens == tokens[: FIRST + 15]
    assert_like_fresh(target)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("plain_on_miss", [False, True])
def test_after_a_miss_it_goes_on_plainly_or_waits(
    target: Target, tokens: list[int], plain_on_miss: bool, is_late: bool
) -> None:
    """By one token, if it was told to."""
    target.open(SPEC)
    answers = target.run() if is_late else []
    send(target, FIRST, wrong(FIRST), plain_on_miss=plain_on_miss)
    answers += target.run()
    goes_on = plain_on_miss and not is_late
    assert said(answers) == [(FIRST, 0, False, goes_on), (FIRST + 1, 0, False, False)][: 1 + plain_on_miss]
    assert target.held.task is None
    assert target.tokens == tokens[: FIRST + 1 + plain_on_miss]


def test_a_step_takes_the_place_of_a_branch_under_way(target: Target, tokens: list[int]) -> None:
    """Its verdict is about the step's guesses; one that comes later gets the branch's verdict again."""
    target.open(SPEC)
    target.run()
    send(target, FIRST, right(tokens, FIRST, 0))
    target.step(1, FIRST + 1, [1, 2])
    [answer] = target.run()
    assert (answer.content.is_of_branch, answer.content.evaluated_count) == (False, 1)
    send(target, FIRST + 1, right(tokens, FIRST + 1, 0))
    [answer] = target.run()
    target.step(1, FIRST + 2, [1, 2])
    assert target.run() == [answer]


def test_branches_that_do_not_fit_change_nothing(target: Target, tokens: list[int]) -> None:
    """Of another epoch, a length that is passed or not reached, another link, an unknown session, or after the end."""
    branch = right(tokens, FIRST, 0)
    send(target, FIRST, branch)
    target.open(SPEC, epoch=2, budget=2)
    target.run()
    held, length = target.held, FIRST + 3
    late, next_one = right(tokens, FIRST, 0), right(tokens, length, 0)
    for base_len, epoch, owner, each in (
        *((length, epoch, None, next_one) for epoch in (1, 3)),
        *((base_len, 2, None, late) for base_len in (FIRST, FIRST + 1, length + 1, 600)),
        (length, 2, Answers(), next_one),
    ):
        send(target, base_len, each, epoch=epoch, owner=owner)
        assert (held.ahead, held.task) == (None, None)
    target.step(2, length)
    assert said(target.run()) == [(length, 0, False, False)]
    assert target.tokens == tokens[: length + 1]
    target.sessions.rollback(target.fence(3, length))
    target.step(3, length, tokens[length:], budget=0)
    assert target.run()[-1].content.finish_reason is not None
    send(target, length, next_one, epoch=3, plain_on_miss=True)
    send(target, len(tokens), next_one, epoch=3, plain_on_miss=True)
    assert target.run() == []


def test_of_several_messages_for_one_length_the_last_counts(target: Target, tokens: list[int]) -> None:
    """And together they allow one verdict more, before the verdict and after it, a thousand of them as well."""
    target.open(SPEC)
    for _ in range(1000):
        send(target, FIRST, right(tokens, FIRST, 0), plain_on_miss=True)
    send(target, FIRST, wrong(FIRST), plain_on_miss=True)
    assert said(target.run()) == [(FIRST, 0, False, True), (FIRST + 1, 0, False, False)]
    for _ in range(1000):
        send(target, FIRST + 1, right(tokens, FIRST + 1, 0, 2), plain_on_miss=True)
    assert said(target.run()) == [(FIRST + 2, 2, True, False)]


def test_branches_within_a_stretch_end_nothing_and_lengthen_nothing(target: Target, tokens: list[int]) -> None:
    """The verdict that they are for is followed by one of theirs, and the budget holds as before."""
    target.open(SPEC, budget=4)
    target.device.step(target.verifier.advance)
    send(target, FIRST + 1, right(tokens, FIRST + 1, 0))
    answers = target.run()
    assert said(answers) == [
        (FIRST, 0, False, True),
        (FIRST + 1, 0, False, True),
        (FIRST + 2, 3, True, False),
    ]
    assert target.tokens == tokens[: FIRST + 6]


def test_a_rollback_forgets_them(target: Target, tokens: list[int]) -> None:
    """So does an opening with a newer epoch."""
    target.open(SPEC)
    target.run()
    for epoch, begin in enumerate((target.sessions.rollback, lambda fence: target.open(SPEC, fence.epoch)), start=2):
        length = len(target.tokens)
        send(target, length, right(tokens, length, 0), epoch=target.held.epoch)
        assert target.held.ahead is not None
        begin(target.fence(epoch, FIRST))
        assert target.held.ahead is None


def test_branches_past_the_end_of_the_request_are_refused(target: Target, tokens: list[int]) -> None:
    """With the field of the branch; those that reach the end are its last tokens."""
    target.open(SPEC, budget=len(tokens) - FIRST - 4)
    target.run()
    length = len(target.tokens)
    with pytest.raises(InvalidRequest) as refused:
        send(target, length, right(tokens, length, 0, 2), Branch(0, 5, tuple(range(1, 9))))
    limit = f"at most {len(tokens) - length} deep here, up to max_len"
    assert refused.value.metadata == {"field": "branches.branches.1", "value": "'9 tokens deep'", "limit": limit}
    target.step(1, length)
    send(target, length, right(tokens, length, 0, 2))
    answers = target.run()
    assert answers[-1].content.is_of_branch
    assert target.tokens == tokens
    assert target.held.finish_reason is not None


@pytest.mark.parametrize("rule", [rule for rule in Rule if not rule.runs_ahead])
def test_other_rules_refuse_branches(target: Target, rule: Rule) -> None:
    """By name: what they would verify must not depend on what was drawn."""
    target.open(replace(SPEC, acceptance=Acceptance(rule=rule)))
    target.run()
    with pytest.raises(InvalidRequest, match=f"absent under the rule {rule}"):
        send(target, FIRST + 1, Branch(0, 1, (2,)))


def test_a_beam_search_refuses_branches(target: Target) -> None:
    """Which takes a tree of all beams."""
    search, step = OpenSearch(2, ()), Step(EMPTY, 0, 0, GuessLimits())
    target.sessions.open(target.fence(1, FIRST), SPEC, step, target.answers, search=search)
    target.run()
    with pytest.raises(InvalidRequest, match="must be absent for a beam search"):
        send(target, FIRST, Branch(0, 1, (2,)))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_branches_come_and_when_tokens_are_plain_decoding_s(runner: ModelRunner, seed: int) -> None:
    """Right, wrong, doubled, old, in any order, before and after verdicts, with steps, rollbacks and lost caches."""
    chance = random.Random(seed)
    spec = spec_of(PROMPT, 60, seed=seed, eos=(), temperature=chance.choice((0.0, 1.0)))
    expected, target, epoch, num_hits = plain(runner, spec), Target(runner), 1, 0
    target.open(spec, budget=chance.choice((0, 3)))
    while target.held.finish_reason is None:
        length = len(target.tokens)
        for _ in range(chance.randrange(4)):
            base_len = max(FIRST, length - chance.choice((0, 0, 0, 1, 2)))
            places = [(k, base_len + k) for k in range(4) if base_len + k + 1 < len(expected)]
            outcomes = {(k, expected[at]): expected[at + 1 : at + 1 + chance.randrange(1, 4)] for k, at in places}
            junk = (chance.randrange(3), chance.randrange(VOCABULARY_SIZE))
            if base_len + 4 < len(expected) and chance.randrange(2):
                outcomes.setdefault(junk, [chance.randrange(VOCABULARY_SIZE)])
            branches = [Branch(*outcome, tuple(ids)) for outcome, ids in outcomes.items() if ids]
            send(target, base_len, *branches, epoch=epoch, plain_on_miss=chance.choice((True, False)))
        for _ in range(chance.randrange(3)):
            target.device.step(target.verifier.advance)
        event = chance.randrange(6)
        if target.held.finish_reason is not None:
            break
        if event == 0:
            epoch += 1
            target.sessions.rollback(target.fence(epoch, chance.randrange(FIRST, len(target.tokens) + 1)))
        elif event == 1:
            target.held.session.free()
        length = len(target.tokens)
        guesses = [token if chance.randrange(4) else 1 for token in expected[length : length + 3]]
        target.step(epoch, length, guesses, budget=chance.choice((0, 0, 3)))
        if chance.randrange(2):
            num_hits += sum(each.content.is_of_branch for each in target.run())
    assert target.tokens == expected
    assert num_hits
    target.table.clear()
