"""Tests of target_service.sessions: opens that broke off are taken up, and only a session's own link drives it."""

import os
import time

from support.basics import Answers, spec_of
from support.services.stepped_target import PROMPT, Target, plain

from outrider.model_service.outbox import SessionAnswer
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY
from target_service.states import Step

SPEC = spec_of(PROMPT, 40, eos=())


def _open_again(target: Target, budget: int = 0) -> list[SessionAnswer]:
    """Opens the session again on another link."""
    answers = Answers()
    target.sessions.open(target.fence(1, len(PROMPT)), SPEC, Step(EMPTY, budget, 0), answers)
    return answers


def test_an_open_whose_job_was_stopped_begins_anew(target: Target) -> None:
    """The link broke before the answer, and the same open comes on another one."""
    target.open(SPEC)
    target.table.leave(target.answers)
    answers = _open_again(target)
    assert target.run() == []
    assert len(answers) == 1
    assert target.table.num_leased == 0


def test_a_stretch_that_was_stopped_goes_on(target: Target) -> None:
    """What was answered comes again, and then the rest of what the budget allows."""
    target.open(SPEC, budget=6)
    for _ in range(3):
        target.device.step(target.verifier.advance)
    target.table.leave(target.answers)
    answers = _open_again(target, budget=6)
    target.device.run(target.verifier.advance)
    assert [answer.fence.base_len for answer in answers] == list(range(5, 12))
    expected = plain(target.runner, SPEC)
    assert target.tokens == expected[:12]


def test_only_the_owner_drives_a_session(target: Target) -> None:
    """Messages of another link change nothing; it is asked for tokens unless its epoch is over."""
    target.open(SPEC, epoch=2)
    target.run()
    answers = Answers()
    for epoch in (1, 2, 3):
        fence = target.fence(epoch, 6)
        target.sessions.step(fence, Step(EMPTY, 9, 0), answers)
        target.sessions.acknowledge(fence, 9, 0, answers)
        target.table.close(fence, answers)
    assert target.run() == []
    assert [(answer.fence.epoch, answer.content, answer.error) for answer in answers] == [
        (2, None, None),
        (3, None, None),
    ]
    assert (target.held.epoch, len(target.tokens)) == (2, 6)


def test_an_evicted_session_is_in_no_forward(target: Target) -> None:
    """Not even when it was evicted, with its job, to make room for a session of the same forward."""
    target.open(SPEC)
    leased = target.held
    target.table.leave(target.answers)
    # The link's end would stop the job; this one begins after it.
    target.step(1, 5)
    other = os.urandom(16)
    step = Step(EMPTY, 0, time.perf_counter_ns())
    target.sessions.open(Fence(other, 1, 5), SPEC, step, target.answers)
    hog = target.runner.open(range(1, 7), 6)
    hog.table.reserve((target.runner.pool.num_free - 1) * target.runner.pool.block_size)
    assert len(target.run()) == 1
    assert (target.table.get(target.session_id), leased.session.cached_len) == (None, 0)
    assert len(leased.session.table) == 0
    hog.free()


def test_a_rollback_that_overtakes_its_open_is_remembered(target: Target) -> None:
    """The older open is stale; the next one is taken."""
    target.sessions.rollback(target.fence(2, 5))
    target.open(SPEC, epoch=1)
    assert target.run() == []
    assert len(target.table) == 0
    target.open(SPEC, epoch=2)
    assert len(target.run()) == 1


def test_a_repeated_step_takes_nothing_back(target: Target) -> None:
    """The limit that an acknowledgement raised stays, while the step is under way; a new step ends the stretch."""
    target.open(SPEC)
    target.run()
    target.step(1, 6)
    target.acknowledge(1, 6, 4)
    target.step(1, 6)
    assert [answer.fence.base_len for answer in target.run()] == [6, 7, 8, 9, 10]
    target.acknowledge(1, 11, 9)
    target.device.step(target.verifier.advance)
    target.step(1, 12)
    assert [answer.fence.base_len for answer in target.run()] == [11, 12]
