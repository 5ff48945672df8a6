"""Tests of draft_service.sessions and the model drafter without a thread: guesses, caches, stops, repetitions."""

import os
from pathlib import Path

import pytest
from support.basics import Answers, spec_of
from support.services.stepped_draft import CONTEXT_LEN, PROMPT, SPEC, Draft, assert_like_fresh, continued, fresh_guesses

from draft_service.states import Wanted
from outrider.engine.runner import ModelRunner
from outrider.errors import CacheFull
from outrider.rpc.fencing import Fence


@pytest.mark.parametrize("draft_count", [1, 2, 5])
def test_guesses_are_a_chain_of_draws(draft: Draft, draft_count: int) -> None:
    """A longer proposal begins like a shorter one, and each guess took one forward."""
    draft.open(SPEC, draft_count)
    [answer] = draft.run()
    assert answer.content is not None
    assert answer.content.token_ids == fresh_guesses(draft.runner, SPEC, 8)[:draft_count]
    assert answer.content.parents == tuple(range(draft_count))
    assert (answer.cached_len, answer.times.forward_count) == (5, draft_count)


def test_a_draft_count_of_zero_only_reads(draft: Draft) -> None:
    """The prompt is cached and the proposal empty; the next request begins there."""
    draft.open(SPEC, 0)
    [answer] = draft.run()
    assert (answer.content is not None and len(answer.content), answer.cached_len) == (0, 5)
    draft.advance(1, 6, [9], 3)
    assert draft.guesses() == fresh_guesses(draft.runner, continued(SPEC, [9]), 3)


def test_committed_tokens_replace_what_was_guessed(draft: Draft) -> None:
    """Right guesses stay cached, wrong ones leave no trace: guesses and cache are those of a new session."""
    draft.open(SPEC, 5)
    first = draft.guesses()
    committed = [*first[:2], (first[2] + 1) % 257]
    draft.advance(1, 8, committed, 4)
    assert draft.held.session.cached_len == 7
    assert draft.guesses() == fresh_guesses(draft.runner, continued(SPEC, committed), 4)
    assert_like_fresh(draft)
    second = draft.held.session.token_ids[8:]
    draft.advance(1, 13, [*second, 77], 4)
    [answer] = draft.run()
    assert answer.times.forward_count == 4
    assert answer.cached_len == 13
    assert_like_fresh(draft)


def test_reported_cache_counts_committed_tokens_only(draft: Draft) -> None:
    """Guesses are cached too, but they are not committed."""
    draft.open(SPEC, 5)
    [answer] = draft.run()
    assert draft.held.session.cached_len == 9
    assert answer.cached_len == 5


def test_a_repeated_request_is_answered_again(draft: Draft) -> None:
    """The answer comes again without a second effect, after open and advance; one under way is answered once."""
    draft.open(SPEC, 3)
    draft.open(SPEC, 3)
    [first] = draft.run()
    draft.open(SPEC, 3)
    assert draft.run() == [first]
    draft.advance(1, 6, [9], 3)
    [second] = draft.run()
    draft.advance(1, 6, [9], 3)
    assert draft.run() == [second]
    assert len(draft.held.session) == 9


def test_older_messages_are_dropped(draft: Draft) -> None:
    """Messages of an older epoch, and of a lower length within an epoch, do nothing."""
    draft.open(SPEC, 2, epoch=2)
    draft.advance(2, 7, [9, 8], 2)
    draft.run()
    draft.advance(1, 8, [1], 2)
    draft.advance(2, 6, [9], 2)
    draft.open(SPEC, 2, epoch=1)
    assert draft.run() == []
    assert draft.held.committed_len == 7


def test_missing_tokens_are_asked_for(draft: Draft) -> None:
    """An unknown session knows nothing, a known one says how much."""
    draft.advance(1, 9, [1], 2)
    draft.open(SPEC, 2)
    draft.run()
    draft.advance(1, 9, [1], 2)
    [answer] = draft.run()
    assert (answer.content, answer.known_len, answer.cached_len) == (None, 5, 5)
    assert draft.held.committed_len == 5


def test_a_request_that_is_overtaken_is_answered_with_what_there_is(draft: Draft) -> None:
    """Both requests get exactly one answer each, in order."""
    draft.open(SPEC, 6)
    draft.step()
    draft.step()
    draft.advance(1, 6, [9], 2)
    first, second = draft.run()
    expected = fresh_guesses(draft.runner, SPEC, 2)
    assert (first.fence.base_len, first.content and first.content.token_ids) == (5, expected)
    assert second.fence.base_len == 6


def test_rollback_stops_a_running_job(draft: Draft) -> None:
    """The job ends between two steps, its answer is never sent, its guesses are gone, and the stop is counted."""
    draft.open(SPEC, 8)
    for _ in range(3):
        draft.step()
    rolled = draft.sessions.rollback(draft.fence(2, 5))
    assert (rolled.fence.epoch, rolled.fence.base_len, rolled.cached_len, rolled.job_stopped) == (2, 5, 5, True)
    assert draft.run() == []
    assert draft.sessions.counts().stopped_job_count == 1
    assert draft.held.session.token_ids == list(PROMPT)
    assert_like_fresh(draft)


def test_rollback_is_idempotent(draft: Draft) -> None:
    """The same epoch again changes nothing, and an older one is answered without an effect."""
    draft.open(SPEC, 2)
    draft.run()
    rolled = draft.sessions.rollback(draft.fence(2, 4))
    assert (rolled.fence.base_len, rolled.job_stopped) == (4, False)
    for epoch, base_len in ((2, 3), (1, 2)):
        assert draft.sessions.rollback(draft.fence(epoch, base_len)) == rolled
    unknown = draft.sessions.rollback(Fence(bytes(16), 1, 4))
    assert (unknown.fence.base_len, unknown.cached_len, unknown.job_stopped) == (0, 0, False)


def test_drafting_goes_on_after_a_rollback(draft: Draft) -> None:
    """An advance without a new token at the same length gets the guesses of a new session."""
    draft.open(SPEC, 8)
    draft.step()
    draft.sessions.rollback(draft.fence(2, 5))
    draft.advance(2, 5, [], 4)
    assert draft.guesses() == fresh_guesses(draft.runner, SPEC, 4)


def test_a_newer_epoch_may_ride_in_the_next_message(draft: Draft) -> None:
    """It stops the running job without an answer."""
    draft.open(SPEC, 8)
    draft.step()
    draft.advance(2, 6, [9], 3)
    assert draft.guesses() == fresh_guesses(draft.runner, continued(SPEC, [9]), 3)
    assert draft.sessions.counts().stopped_job_count == 1


def test_nothing_is_guessed_past_an_end(draft: Draft) -> None:
    """An EOS or stop token is the last guess."""
    expected = fresh_guesses(draft.runner, SPEC, 8)
    stop = expected[3]
    draft.open(spec_of(PROMPT, 60, seed=11, eos=(), stops=(stop,), temperature=1.0), 8)
    assert draft.guesses() == expected[: expected.index(stop) + 1]


@pytest.mark.parametrize(("max_len", "count"), [(6, 0), (7, 1), (9, 3), (60, 8)])
def test_the_last_token_is_left_to_the_target(draft: Draft, max_len: int, count: int) -> None:
    """A proposal has at most max_len - base_len - 1 guesses."""
    draft.open(spec_of(PROMPT, max_len, eos=()), 8)
    assert len(draft.guesses()) == count


@pytest.mark.parametrize(("length", "count"), [(CONTEXT_LEN - 3, 3), (CONTEXT_LEN, 0)])
def test_no_guess_lies_past_the_context(draft: Draft, length: int, count: int) -> None:
    """The draft's context bounds a proposal, whatever the request's own length allows."""
    draft.open(spec_of(range(1, length + 1), 1000, eos=()), 8)
    assert len(draft.guesses()) == count


def test_sessions_side_by_side_guess_what_they_guess_alone(runner: ModelRunner) -> None:
    """Eight requests with other lengths and draft counts in one batch; one step is a token of each."""
    specs = [
        spec_of((*PROMPT, *range(number)), 60, seed=number, eos=(), temperature=0.2 * number) for number in range(8)
    ]
    expected = [fresh_guesses(runner, spec, number + 1) for number, spec in enumerate(specs)]
    together = Draft(runner)
    ids = [os.urandom(16) for _ in specs]
    for number, spec in enumerate(specs):
        together.session_id = ids[number]
        together.open(spec, number + 1)
    num_steps = 0
    while together.step():
        num_steps += 1
    assert num_steps == 8
    found = {answer.fence.session_id: answer.content for answer in together.run() if answer.content}
    assert [found[session_id].token_ids for session_id in ids] == expected
    together.table.clear()


def test_a_full_pool_refuses_one_session(folder: Path) -> None:
    """The one that finds no room fails and gives back what it had; the other goes on."""
    small = ModelRunner.load(str(folder), dtype="float32", kv_tokens=48)
    draft = Draft(small)
    draft.open(spec_of(range(1, 30), 60, eos=()), 2)
    errors = Answers()
    late = spec_of(range(2, 32), 60, eos=())
    draft.sessions.open(Fence(bytes(16), 1, 30), late, Wanted(2, 0), errors)
    assert len(draft.guesses()) == 2
    assert [type(answer.error) for answer in errors] == [CacheFull]
    draft.table.leave(draft.answers)
    draft.sessions.open(Fence(bytes(16), 1, 30), late, Wanted(2, 0), draft.answers)
    assert len(draft.guesses()) == 2
    assert draft.table.get(draft.session_id) is None
    draft.table.clear()
    assert small.pool.num_free == small.pool.num_blocks
