"""Branches of a draft without a thread: whatever came before, chains are a fresh session's, and old work is dropped."""

import random

import pytest
from support.basics import spec_of
from support.services.stepped_draft import PROMPT, SPEC, Draft, assert_like_fresh, continued, fresh_guesses

from draft_service.states import Search, Wanted
from outrider.drafters.model_drafter import MODEL
from outrider.errors import InvalidRequest
from outrider.parameters import Acceptance, Rule, SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import Branch, TokenTree, TreeShape

COUNT = 4


def ask(draft: Draft, base_len: int, tokens: list[int], epoch: int = 1, **wanted: object) -> None:
    """An advance that asks for branches unless it says otherwise."""
    values = {"draft_count": COUNT, "arrived_ns": 0, "branch_count": 8} | wanted
    draft.sessions.advance(draft.fence(epoch, base_len), tuple(tokens), Wanted(**values), draft.answers)  # type: ignore[arg-type]


def found(draft: Draft) -> tuple[TokenTree, list[Branch]]:
    """The chain and the branches of the one request that is due."""
    chain, branches = draft.run()
    assert isinstance(chain.content, TokenTree)
    assert isinstance(branches.content, list)
    return chain.content, branches.content


def opened(draft: Draft, spec: SessionSpec = SPEC) -> list[int]:
    """The tokens of a session that has been opened, and one more, which the draft does not know yet."""
    draft.open(spec, 0)
    draft.run()
    return [*spec.token_ids, 9]


def test_a_branch_that_comes_true_is_the_next_chain(draft: Draft) -> None:
    """With each outcome in turn the chain after it begins with what the branch said, and is a fresh session's."""
    tokens, new = opened(draft), 1
    for turn in range(6):
        ask(draft, len(tokens), tokens[-new:])
        chain, branches = found(draft)
        assert chain.token_ids == fresh_guesses(draft.runner, continued(SPEC, tokens[len(PROMPT) :]), COUNT)
        assert 0 < len(branches) <= 8
        assert len({each[:2] for each in branches}) == len(branches)
        branch = branches[turn % len(branches)]
        gained = [*chain.token_ids[: branch.accepted_count], branch.next_token_id]
        after = continued(SPEC, [*tokens[len(PROMPT) :], *gained])
        assert branch.token_ids == fresh_guesses(draft.runner, after, len(branch.token_ids))
        tokens, new = tokens + gained, len(gained)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_came_before_a_chain_is_a_fresh_session_s(draft: Draft, seed: int) -> None:
    """Branches and trees by turns, overtaken, taken back, opened again, with a lost cache; misses and hits."""
    chance = random.Random(seed)
    spec = spec_of(PROMPT, 60, seed=seed, eos=(), temperature=chance.choice((0.0, 1.0)))
    tokens, epoch, known = opened(draft, spec), 1, len(PROMPT)
    chain: tuple[int, ...] = ()
    branches: list[Branch] = []
    while len(tokens) < 50:
        event = chance.randrange(8)
        if event == 0:
            epoch += 1
            known = min(known, chance.randrange(1, len(tokens)))
            draft.sessions.rollback(Fence(draft.session_id, epoch, known))
        elif event == 1:
            draft.held.session.free()
        elif event == 2:
            epoch, known = epoch + 1, len(tokens) - 1
            draft.open(continued(spec, tokens[len(PROMPT) : -1]), 2, epoch)
        count, branch_count = chance.randrange(1, 6), chance.choice((0, 1, 4, 16))
        shape = TreeShape(max_depth=3) if event == 3 else None
        branch_count = 0 if shape else branch_count
        went_on = bool(branch_count) and event == 4
        for _ in range(chance.choice((1, 1, 2))):
            ask(
                draft,
                len(tokens),
                tokens[known:],
                epoch,
                draft_count=count,
                shape=shape,
                branch_count=branch_count,
                went_on=went_on,
            )
            known = len(tokens)
            for _ in range(chance.choice((0, 1, 3, 99))):
                draft.device.step(draft.steps.advance)
        if chance.randrange(3):
            answers = [each for each in draft.run() if each.fence == draft.fence(epoch, len(tokens))]
            trees = [each.content for each in answers if isinstance(each.content, TokenTree)]
            branches = next((each.content for each in answers if isinstance(each.content, list)), [])
            if trees and shape is None and not went_on:
                chain = trees[-1].token_ids
                fresh = fresh_guesses(draft.runner, continued(spec, tokens[len(PROMPT) :]), count)
                assert chain == fresh
            for branch in branches:
                before = [*tokens[len(PROMPT) :], *trees[-1].token_ids[: branch.accepted_count], branch.next_token_id]
                fresh = fresh_guesses(draft.runner, continued(spec, before), len(branch.token_ids))
                assert branch.token_ids == fresh
        else:
            branches = []
        if branches and chance.randrange(4):
            branch = chance.choice(branches)
            gained = [*chain[: branch.accepted_count], branch.next_token_id]
        else:
            gained = [chance.randrange(1, 257) for _ in range(chance.randrange(1, 3))]
        tokens += gained
    ask(draft, len(tokens), tokens[known:], epoch)
    draft.run()
    ask(draft, len(tokens) + 1, [7], epoch, branch_count=0)
    draft.run()
    assert_like_fresh(draft)


def test_work_for_dead_futures_ends_with_the_step_under_way(draft: Draft) -> None:
    """When it is known what came, no further row of another future is computed."""
    tokens = opened(draft)
    ask(draft, len(tokens), [9], branch_count=64)
    while len(draft.answers) < 1:
        draft.device.step(draft.steps.advance)
    draft.device.step(draft.steps.advance)
    [dead] = draft.device.tasks
    draft.answers.clear()
    ask(draft, len(tokens) + 1, [9], branch_count=0)
    assert dead.done
    rows = len(dead.draw_input.feed.tree)
    assert draft.guesses() == fresh_guesses(draft.runner, continued(SPEC, [9, 9]), COUNT)
    assert len(dead.draw_input.feed.tree) == rows


def test_a_closed_session_s_branches_are_not_computed(draft: Draft) -> None:
    """And its blocks are free at once."""
    tokens = opened(draft)
    ask(draft, len(tokens), [9], branch_count=64)
    for _ in range(COUNT + 1):
        draft.device.step(draft.steps.advance)
    [task] = draft.device.tasks
    draft.table.close(draft.fence(1, len(tokens)), draft.answers)
    assert task.stopped
    assert draft.runner.pool.num_free == draft.runner.pool.num_blocks


@pytest.mark.parametrize("name", ["branch_count", "went_on"])
@pytest.mark.parametrize("kind", ["typical", "beams"])
def test_sessions_that_make_no_branches_refuse_them(draft: Draft, kind: str, name: str) -> None:
    """With the field, its value and what it may be."""
    search = Search(2, ()) if kind == "beams" else None
    rule = Rule.TYPICAL if kind == "typical" else Rule.MATCH
    spec = spec_of(PROMPT, 60, eos=(), temperature=1.0)
    spec = SessionSpec(
        *(spec.token_ids, spec.prompt_len, spec.sampling, spec.seed, spec.max_len, spec.eos_token_ids),
        spec.stop_token_ids,
        Acceptance(rule=rule),
    )
    draft.sessions.open(draft.fence(1, 5), spec, Wanted(0, 0, search=search), draft.answers, MODEL)
    draft.run()
    with pytest.raises(InvalidRequest, match=f"advance.{name} is .* not under typical") as refused:
        ask(draft, 5, [], epoch=2, search=search, **{"branch_count": 0, name: 3 if name == "branch_count" else True})
    assert refused.value.metadata["field"] == f"advance.{name}"
