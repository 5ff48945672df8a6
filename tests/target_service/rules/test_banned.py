"""Banned sequences through the target's sessions: never said, whatever is proposed, and no other session's concern."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.basics import Answers, spec_of
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target, assert_like_fresh

from outrider.engine.runner import ModelRunner
from outrider.errors import NoTokenLeft
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from target_service.states import Step

WANTED = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 30}, {"temperature": 1.0, "frequency_penalty": 0.5}]


def said(runner: ModelRunner, spec: SessionSpec) -> list[int]:
    """Plain decoding to the end."""
    target = Target(runner)
    target.open(spec, budget=spec.max_len)
    target.run()
    tokens = list(target.tokens)
    target.table.clear()
    return tokens


def occurs(tokens: Sequence[int], banned: Sequence[tuple[int, ...]], prompt_len: int) -> bool:
    """Whether a banned sequence ends within the output."""
    ends = range(prompt_len + 1, len(tokens) + 1)
    return any(tuple(tokens[end - len(ids) : end]) == ids for ids in banned for end in ends if end >= len(ids))


def bans_of(tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """What a request would have said: single tokens, pairs, and longer ones that begin in its prompt."""
    return ((tokens[9],), tuple(tokens[11:13]), tuple(tokens[3:7]), tuple(tokens[14:19]), tuple(tokens[:20]))


@pytest.mark.parametrize("wanted", WANTED)
def test_proposals_of_banned_tokens_change_nothing(
    runner: ModelRunner, target: Target, wanted: dict[str, float]
) -> None:
    """Drafts of what would have been said without the bans, and with them; the tokens are those without drafts."""
    free_spec = spec_of(PROMPT, 45, eos=(), **wanted)
    free = said(runner, free_spec)
    spec = replace(free_spec, banned=bans_of(free))
    expected = said(runner, spec)
    assert occurs(free, spec.banned, len(PROMPT))
    assert not occurs(expected, spec.banned, len(PROMPT))
    target.open(spec)
    target.run()
    while target.held.finish_reason is None:
        base_len = len(target.tokens)
        source = free if base_len % 2 else expected
        target.step(1, base_len, source[base_len : min(base_len + 4, 44)])
        target.run()
    assert target.tokens == expected
    assert_like_fresh(target)


def test_every_branch_of_a_tree_knows_its_own_bans(runner: ModelRunner, target: Target) -> None:
    """A pair that is banned stays possible after a sibling of its first token."""
    free = said(runner, spec_of(PROMPT, 45, eos=()))
    spec = replace(spec_of(PROMPT, 45, eos=()), banned=((free[6], free[7]),))
    expected = said(runner, spec)
    assert expected[:7] == free[:7]
    assert expected[7] != free[7]
    target.open(spec)
    target.run()
    other = (free[6] + 1) % VOCABULARY_SIZE
    tree = TokenTree((other, free[6], free[7], free[7], expected[7], expected[8]), (0, 0, 1, 2, 2, 5))
    target.sessions.step(target.fence(1, 6), Step(tree, 0, 0), target.answers)
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.accepted_rows == (2, 5, 6)
    assert target.tokens == expected[:10]


def test_a_session_that_may_say_nothing_fails_alone(target: Target) -> None:
    """All tokens of the vocabulary banned, while its neighbour goes on."""
    banned = tuple((token_id,) for token_id in range(VOCABULARY_SIZE))
    spec = replace(spec_of(PROMPT, 40, eos=(), temperature=1.0), banned=banned)
    answers = Answers()
    target.open(spec_of(PROMPT, 40, eos=()))
    target.sessions.open(Fence(bytes(16), 1, 5), spec, Step(EMPTY, 0, 0), answers)
    assert len(target.run()) == 1
    assert [type(answer.error) for answer in answers] == [NoTokenLeft]
    assert str(answers[0].error) == "no token may follow the 0 of the answer: banned_words leaves none"
    assert target.table.get(bytes(16)) is None
