"""Tests of target_service.sessions and verifier without a thread: what a step commits, repeats and takes back."""

import pytest
from support.basics import Answers, spec_of
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target, assert_like_fresh, plain

from outrider.errors import InvalidRequest, ProtocolViolation
from outrider.parameters import FinishReason
from outrider.token_tree import EMPTY, TokenTree
from target_service.states import Step


def test_a_step_commits_what_plain_decoding_says(target: Target) -> None:
    """Right guesses are kept, the first wrong one is corrected, and the cache is that of a fresh prefill."""
    spec = spec_of(PROMPT, 40, seed=3, eos=(), temperature=1.0)
    expected = plain(target.runner, spec)
    target.open(spec)
    target.run()
    right = expected[6:9]
    target.step(1, 6, [*right, (expected[9] + 1) % VOCABULARY_SIZE, 1])
    [answer] = target.run()
    assert answer.content is not None
    assert (answer.fence.base_len, answer.content.accepted_rows) == (6, (1, 2, 3))
    assert (answer.content.next_token_id, answer.content.evaluated_count) == (expected[9], 4)
    assert target.tokens == expected[:10]
    assert answer.cached_len == target.held.session.cached_len == 9
    assert_like_fresh(target)
    target.step(1, 10, expected[10:14])
    [answer] = target.run()
    assert answer.content is not None
    assert (answer.content.accepted_rows, answer.content.next_token_id) == ((1, 2, 3, 4), expected[14])
    assert_like_fresh(target)


def test_a_tree_is_followed_along_the_right_branch(target: Target) -> None:
    """Rows that are kept but not in a row are moved together; the cache shows nothing of the others."""
    spec = spec_of(PROMPT, 40, eos=())
    expected = plain(target.runner, spec)
    target.open(spec)
    target.run()
    wrong = [(token + 1) % VOCABULARY_SIZE for token in expected]
    tree = TokenTree((wrong[6], expected[6], wrong[7], expected[7], expected[8]), (0, 0, 2, 2, 4))
    target.sessions.step(target.fence(1, 6), Step(tree, 0, 0), target.answers)
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.accepted_rows == (2, 4, 5)
    assert target.tokens == expected[:10]
    assert_like_fresh(target)


def test_a_repeated_step_is_answered_without_a_second_effect(target: Target) -> None:
    """All verdicts from its length on come again, in order; an acknowledged one does not."""
    target.open(spec_of(PROMPT, 40, eos=()), budget=3)
    first = target.run()
    assert [answer.fence.base_len for answer in first] == [5, 6, 7, 8]
    tokens = list(target.tokens)
    target.step(1, 6)
    assert target.run() == first[1:]
    target.step(1, 5)
    assert target.run() == []
    assert target.tokens == tokens


def test_a_repeat_of_a_step_under_way_is_answered_once(target: Target) -> None:
    """The verdict that comes anyway is the answer to both."""
    target.open(spec_of(PROMPT, 40, eos=()))
    target.step(1, 5)
    assert len(target.run()) == 1


def test_a_repeated_open_is_answered_where_it_was_repeated(target: Target) -> None:
    """Repeated before its verdict or after it, it is answered to the newer stream, which owns the session then."""
    spec = spec_of(PROMPT, 40, eos=())
    target.open(spec)
    newer = Answers()
    for _ in range(2):
        target.sessions.open(target.fence(1, 5), spec, Step(EMPTY, 0, 0), newer)
        assert target.run() == []
    assert len(newer) == 2
    assert newer[0] == newer[1]
    assert target.held.owner is newer


def test_missing_tokens_are_asked_for(target: Target) -> None:
    """An unknown session knows nothing, a known one says how much."""
    target.step(1, 9)
    [answer] = target.run()
    assert (answer.content, answer.known_len, answer.cached_len) == (None, 0, 0)
    target.open(spec_of(PROMPT, 40, eos=()))
    target.run()
    target.step(1, 30)
    [answer] = target.run()
    assert (answer.content, answer.known_len, answer.cached_len) == (None, 6, 5)


def test_older_epochs_are_dropped(target: Target) -> None:
    """Steps, opens, acknowledgements and closes of an epoch that is over do nothing."""
    target.open(spec_of(PROMPT, 40, eos=()), epoch=3)
    target.run()
    tokens = list(target.tokens)
    target.step(2, 6)
    target.open(spec_of(PROMPT[:2], 40), epoch=2)
    target.acknowledge(2, 6, 8)
    target.table.close(target.fence(2, 6), target.answers)
    assert target.run() == []
    assert target.tokens == tokens


def test_a_newer_epoch_takes_the_session_back(target: Target) -> None:
    """A rollback may ride in the next step: what lay after its length is decided anew."""
    spec = spec_of(PROMPT, 40, eos=())
    expected = plain(target.runner, spec)
    target.open(spec, budget=6)
    target.run()
    target.step(2, 7, expected[7:9])
    [answer] = target.run()
    assert (answer.fence.epoch, answer.fence.base_len) == (2, 7)
    assert target.tokens == expected[:10]
    assert_like_fresh(target)


def test_rollback_truncates_once_an_epoch(target: Target) -> None:
    """The same epoch again changes nothing, an older one is only answered, and the cache is as if freshly made."""
    target.open(spec_of(PROMPT, 40, eos=()), budget=9)
    target.run()
    rolled = target.sessions.rollback(target.fence(2, 8))
    assert (rolled.fence.epoch, rolled.fence.base_len, rolled.cached_len, rolled.job_stopped) == (2, 8, 7, False)
    assert_like_fresh(target)
    for epoch, base_len in ((2, 6), (1, 6)):
        assert target.sessions.rollback(target.fence(epoch, base_len)) == rolled
    assert target.sessions.rollback(target.fence(3, 100)).fence.base_len == 8


def test_rollback_of_an_unknown_session_is_answered(target: Target) -> None:
    """The answer says that nothing is cached."""
    rolled = target.sessions.rollback(target.fence(1, 8))
    assert (rolled.fence.base_len, rolled.cached_len, rolled.job_stopped) == (0, 0, False)


def test_rollback_stops_a_running_job(target: Target) -> None:
    """Its answer is never sent, and the stop is counted."""
    target.open(spec_of(PROMPT, 40, eos=()), budget=20)
    for _ in range(3):
        target.device.step(target.verifier.advance)
    assert len(target.answers) == 3
    assert target.sessions.rollback(target.fence(2, 6)).job_stopped
    target.answers.clear()
    assert target.run() == []
    assert target.sessions.counts().stopped_job_count == 1
    assert len(target.tokens) == 6


def test_the_end_is_found_inside_a_proposal(target: Target) -> None:
    """A stop token that is accepted is the last one, and a finished session takes no more steps."""
    expected = plain(target.runner, spec_of(PROMPT, 40, eos=()))
    stop = expected[8]
    length = expected.index(stop, 5) + 1
    target.open(spec_of(PROMPT, 40, eos=(), stops=(stop,)), tree=TokenTree.chain(expected[5:10]), budget=30)
    [answer] = target.run()
    assert answer.content is not None
    assert (answer.content.finish_reason, answer.content.next_token_id) == (FinishReason.STOP_TOKEN, None)
    assert target.tokens == expected[:length]
    assert answer.cached_len == length - 1
    target.step(1, 5)
    assert target.run() == [answer]
    with pytest.raises(ProtocolViolation, match="has ended"):
        target.step(1, length)
    target.sessions.rollback(target.fence(2, 6))
    target.step(2, 6)
    assert len(target.run()) == 1


def test_no_row_lies_past_the_end_of_the_request(target: Target) -> None:
    """A deeper proposal is refused, and the session goes on."""
    spec = spec_of(PROMPT, 8, eos=())
    target.open(spec)
    target.run()
    with pytest.raises(InvalidRequest, match="proposal"):
        target.step(1, 6, [1, 2, 3])
    target.step(1, 6, plain(target.runner, spec)[6:8])
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.finish_reason is FinishReason.LENGTH
    assert len(target.tokens) == 8


def test_opening_again_reuses_what_is_cached(target: Target) -> None:
    """Only the tokens that differ are computed again; the answers are those of a new session."""
    spec = spec_of(PROMPT, 40, eos=())
    expected = plain(target.runner, spec)
    target.open(spec, budget=9)
    target.run()
    target.table.leave(target.answers)
    again = spec_of(expected[:12], 40, eos=(), prompt_len=len(PROMPT))
    target.open(again, epoch=2)
    assert target.held.session.cached_len == 12
    assert target.table.num_leased == 0
    [answer] = target.run()
    assert (answer.fence.epoch, answer.fence.base_len) == (2, 12)
    assert target.tokens == expected[:13]
    other = spec_of((7, *expected[1:9]), 40, eos=())
    target.open(other, epoch=3)
    assert target.held.session.cached_len == 0
    target.run()
    assert_like_fresh(target)
