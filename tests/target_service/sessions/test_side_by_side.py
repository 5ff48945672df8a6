"""Tests of target_service.sessions without a thread: sessions that share batches and blocks, and faults of one."""

import os

from support.basics import Answers, spec_of
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target

from outrider.engine.runner import ModelRunner
from outrider.errors import NoTokenLeft
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY
from target_service.states import Step


def test_sessions_side_by_side_say_what_they_say_alone(runner: ModelRunner) -> None:
    """Eight requests of all kinds in one batch give each request's own tokens."""
    specs = [
        spec_of((*PROMPT, number), 30 + number, seed=number, eos=(), temperature=0.2 * number) for number in range(8)
    ]
    expected = [Target(runner) for _ in specs]
    for alone, spec in zip(expected, specs, strict=True):
        alone.open(spec, budget=40)
        alone.run()
    together = Target(runner)
    ids = [os.urandom(16) for _ in specs]
    for together.session_id, spec in zip(ids, specs, strict=True):
        together.open(spec, budget=40)
    together.run()
    for together.session_id, alone in zip(ids, expected, strict=True):
        assert together.tokens == alone.tokens
        alone.table.clear()
    together.table.clear()
    assert runner.pool.num_free == runner.pool.num_blocks


def test_a_session_that_cannot_draw_fails_alone(target: Target) -> None:
    """All tokens forbidden is a fault of one request, and not of its batch."""
    forbidden = spec_of(PROMPT, 40, eos=range(VOCABULARY_SIZE), temperature=1.0, min_tokens=5)
    answers = Answers()
    target.open(spec_of(PROMPT, 40, eos=()))
    target.sessions.open(Fence(bytes(16), 1, 5), forbidden, Step(EMPTY, 0, 0), answers)
    assert len(target.run()) == 1
    assert [type(answer.error) for answer in answers] == [NoTokenLeft]
    assert str(answers[0].error) == "no token may follow the 0 of the answer: sampling.min_tokens leaves none"
    assert target.table.get(bytes(16)) is None
