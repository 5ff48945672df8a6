"""A full pool, through the sessions: leases end first, then sessions take turns, and none fails."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.basics import Answers, check_empty, spec_of
from support.services.stepped_target import PROMPT, Target, plain

from outrider.engine.runner import ModelRunner
from outrider.errors import PromptTooLong
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from target_service import block_allocator
from target_service.block_allocator import GRACE_STEPS, CacheHolder, victims
from target_service.states import Step

LATE = os.urandom(16)


@pytest.fixture
def small(folder: Path) -> Iterator[Target]:
    target = Target(ModelRunner.load(str(folder), dtype="float32", kv_tokens=64))
    yield target
    target.table.clear()
    check_empty(target.runner.pool)


def test_sessions_take_turns(small: Target, runner: ModelRunner) -> None:
    """A lease ends first; then the later session waits for the earlier one, and both say what they say alone."""
    specs = [spec_of((*PROMPT, number), 60, seed=number, eos=(), temperature=1.0) for number in range(4)]
    ids = [os.urandom(16) for _ in specs]
    small.session_id = ids[0]
    small.open(specs[0])
    small.run()
    small.table.leave(small.answers)
    for small.session_id, spec in zip(ids[1:], specs[1:], strict=True):
        small.open(spec, budget=60)
    small.run()
    assert small.table.get(ids[0]) is None
    counts = small.sessions.counts()
    assert (counts.evicted_session_count, counts.expired_lease_count) == (1, 0)
    assert counts.preemption_count > 0
    for small.session_id, spec in zip(ids[1:], specs[1:], strict=True):
        alone = Target(runner)
        alone.open(spec, budget=60)
        alone.run()
        assert small.tokens == alone.tokens
        assert len(small.tokens) == 60
        alone.table.clear()


def test_what_is_unread_is_counted(small: Target) -> None:
    """Prompts until they are read, also one that waits for room, all but their last tokens; and of no idle session."""
    small.open(spec_of(range(1, 41), 60, eos=()), budget=20)
    first, small.session_id = small.session_id, os.urandom(16)
    small.open(spec_of(range(101, 131), 60, eos=()))
    assert sum(small.sessions.unread().values()) == 39 + 29
    while (held := small.table.get(first)) is not None and held.session.cached_len < 40:
        small.device.step(small.verifier.advance)
    assert sum(small.sessions.unread().values()) == 29
    small.run()
    assert sum(small.sessions.unread().values()) == 0


def test_an_idle_session_gives_way_and_comes_back(small: Target, runner: ModelRunner) -> None:
    """Its client may be slow; its tokens stay, and its next step computes the cache again."""
    spec = spec_of(PROMPT, 60, eos=())
    small.open(spec, budget=40)
    small.run()
    answers = Answers()
    late = spec_of(range(1, 41), 60, eos=())
    small.sessions.open(Fence(LATE, 1, 40), late, Step(EMPTY, 0, 0), answers)
    small.run()
    assert [answer.error for answer in answers] == [None]
    assert (small.held.session.cached_len, len(small.held.session.table)) == (0, 0)
    length = len(small.tokens)
    small.step(1, length)
    assert len(small.run()) == 1
    assert small.tokens == plain(runner, spec)[: length + 1]


def test_a_session_whose_draft_is_guessing_keeps_its_cache(small: Target) -> None:
    """It has no job for some steps; a later session waits that long, and not for ever."""
    small.open(spec_of(PROMPT, 60, eos=()), budget=40)
    small.run()
    answers = Answers()
    late = spec_of(range(1, 41), 60, eos=())
    small.sessions.open(Fence(LATE, 1, 40), late, Step(EMPTY, 0, 0), answers)
    for _ in range(GRACE_STEPS):
        small.device.step(small.verifier.advance)
    assert (answers, small.held.session.cached_len) == ([], 45)
    small.step(1, 46)
    assert len(small.run()) == 1
    assert small.sessions.counts().preemption_count == 1
    assert len(answers) == 1


def test_who_waits_is_weighed_once_for_all_behind_it(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a session that was refused, others that lack no less are not weighed in the same step, but in the next."""
    small.open(spec_of(range(1, 41), 60, eos=()), budget=10)
    small.run()
    answers = Answers()
    for number, length in enumerate((60, 50, 30, 20)):
        late = spec_of(range(100 + number, 100 + number + length), 64, eos=())
        fence = Fence(os.urandom(16), 1, length)
        small.sessions.open(fence, late, Step(EMPTY, 0, 0), answers)
    weighed = []

    def counting(asking: int, num_missing: int, holders: Sequence[CacheHolder]) -> list[int] | None:
        weighed.append((asking, num_missing))
        return victims(asking, num_missing, holders)

    monkeypatch.setattr(block_allocator, "victims", counting)
    for _ in range(2):
        small.device.step(small.verifier.advance)
    assert weighed == [(1, 4), (3, 2)] * 2


def test_a_proposal_without_room_is_decoded_plainly(small: Target, runner: ModelRunner) -> None:
    """Another session has the block of the proposal's rows, and keeps it; nothing counts as evaluated."""
    expected = plain(runner, spec_of(PROMPT, 64, eos=()))
    small.open(spec_of(PROMPT, 64, eos=()))
    small.run()
    answers = Answers()
    step = Step(TokenTree.chain(expected[47:51]), 0, 0)
    late = spec_of(expected[:47], 64, eos=(), prompt_len=len(PROMPT))
    small.sessions.open(Fence(LATE, 1, 47), late, step, answers)
    small.run()
    [answer] = answers
    assert answer.content is not None
    assert (answer.content.token_ids, answer.content.evaluated_count) == ((expected[47],), 0)
    assert small.held.session.cached_len == 5


def test_what_never_fits_is_refused_at_once(small: Target) -> None:
    """And costs no other session's cache."""
    small.open(spec_of(PROMPT, 60, eos=()))
    small.run()
    answers = Answers()
    small.sessions.open(Fence(LATE, 1, 70), spec_of(range(1, 71), 80), Step(EMPTY, 0, 0), answers)
    small.run()
    assert [type(answer.error) for answer in answers] == [PromptTooLong]
    assert "70 tokens are more than the key-value cache of 64 tokens" in str(answers[0].error)
    assert small.table.get(LATE) is None
    assert len(small.held.session.table) == 1
