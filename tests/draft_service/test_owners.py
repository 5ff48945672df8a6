"""Tests of draft_service.sessions: opens that broke off are taken up, and only a session's own link drives it."""

import os

from support.basics import Answers, spec_of
from support.services.stepped_draft import PROMPT, SPEC, Draft, fresh_guesses

from draft_service.states import Wanted
from outrider.rpc.fencing import Fence


def test_an_open_whose_job_was_stopped_begins_anew(draft: Draft) -> None:
    """The link broke before the answer, some guesses in; the same open on another one has all of them."""
    draft.open(SPEC, 4)
    draft.step()
    draft.step()
    draft.table.leave(draft.answers)
    answers = Answers()
    draft.sessions.open(draft.fence(1, len(PROMPT)), SPEC, Wanted(4, 0), answers)
    assert draft.run() == []
    [answer] = answers
    assert answer.content is not None
    assert answer.content.token_ids == fresh_guesses(draft.runner, SPEC, 4)
    assert draft.table.num_leased == 0


def test_only_the_owner_drives_a_session(draft: Draft) -> None:
    """Messages of another link change nothing; it is asked for tokens unless its epoch is over."""
    draft.open(SPEC, 2, epoch=2)
    draft.run()
    answers = Answers()
    for epoch in (1, 2, 3):
        draft.sessions.advance(draft.fence(epoch, 6), (9,), Wanted(2, 0), answers)
        draft.table.close(draft.fence(epoch, 6), answers)
    assert draft.run() == []
    assert [(answer.fence.epoch, answer.content, answer.error) for answer in answers] == [
        (2, None, None),
        (3, None, None),
    ]
    assert (draft.held.epoch, draft.held.committed_len) == (2, 5)


def test_an_evicted_session_is_in_no_forward(draft: Draft) -> None:
    """Not even when it was evicted, with its job, to make room for a session of the same forward."""
    draft.open(SPEC, 2)
    leased = draft.held
    draft.table.leave(draft.answers)
    # The link's end would stop the job; this one begins after it.
    draft.advance(1, 5, (), 2)
    other = spec_of((*PROMPT, 4), 60, eos=())
    draft.sessions.open(Fence(os.urandom(16), 1, 6), other, Wanted(2, 0), draft.answers)
    hog = draft.runner.open(range(1, 7), 6)
    hog.table.reserve((draft.runner.pool.num_free - 1) * draft.runner.pool.block_size)
    [answer] = draft.run()
    assert answer.fence.base_len == 6
    assert (draft.table.get(draft.session_id), len(leased.session.table)) == (None, 0)
    hog.free()


def test_a_rollback_that_overtakes_its_open_is_remembered(draft: Draft) -> None:
    """The older open is stale; the next one is taken."""
    draft.sessions.rollback(draft.fence(2, 5))
    draft.open(SPEC, 2, epoch=1)
    assert draft.run() == []
    assert len(draft.table) == 0
    draft.open(SPEC, 2, epoch=2)
    assert len(draft.guesses()) == 2
