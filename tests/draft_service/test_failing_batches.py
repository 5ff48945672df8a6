"""A forward that raises, with the device's own thread: the guesses of the others are those of a session alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.basics import Answers, check_empty, eventually, spec_of
from support.services.stepped_draft import fresh_guesses

from draft_service.sessions import DraftSessions
from draft_service.states import DraftState, Wanted
from outrider.drafters.model_drafter import DraftTask, ModelDrafter
from outrider.engine.batching import Feed
from outrider.engine.device_thread import DeviceWorker
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import SessionAnswer
from outrider.rpc.fencing import Fence

DRAFT_COUNT = 6
SPECS = [spec_of((5, 17, first, 3, 90), 40, seed=first, eos=(), temperature=0.9) for first in (200, 111, 30)]


async def answers_of(
    runner: ModelRunner, spoil: Callable[[int, SessionAnswer], None]
) -> tuple[list[Answers], list[str]]:
    """What sessions that begin in one batch get, and what is logged; `spoil` may raise instead of an answer."""
    table = LeaseTable[DraftState](60.0)
    worker = DeviceWorker[DraftTask](ModelDrafter(runner, table.with_room).advance)
    sessions = DraftSessions(runner, table, worker.submit)

    class Spoiled(Answers):
        def put(self, answer: SessionAnswer) -> None:
            spoil(next(number for number, each in enumerate(answers) if each is self), answer)
            super().put(answer)

    answers = [Spoiled() for _ in SPECS]

    def open_all() -> None:
        for number, spec in enumerate(SPECS):
            fence = Fence(bytes([number] * 16), 1, len(spec.token_ids))
            sessions.open(fence, spec, Wanted(DRAFT_COUNT, 0), answers[number])

    # Tracebacks on a terminal take longer to print than everything else here.
    with capture_logs() as logs:
        await worker.call(open_all)
        await eventually(lambda: worker.call(lambda: all(held.task is None for held in table)))
        await worker.call(table.clear)
        await worker.close()
    check_empty(runner.pool)
    return answers, [line["event"] for line in logs if line["log_level"] == "error"]


def _spoil_nothing(_number: int, _answer: SessionAnswer) -> None:
    """Every answer is given."""


@pytest.mark.parametrize("culprit", [None, 1])
async def test_only_the_culprit_gets_no_guesses(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, culprit: int | None
) -> None:
    """Where every forward of several raises, and where one session's own does."""
    expected = [fresh_guesses(runner, spec, DRAFT_COUNT) for spec in SPECS]
    forward = runner.forward

    def spoiled(feeds: Sequence[Feed], *others: Any) -> ForwardResult:
        result = forward(feeds, *others)
        first_ids = [feed.session.token_ids[2] for feed in feeds]
        if len(feeds) > 1 or (culprit is not None and first_ids == [SPECS[culprit].token_ids[2]]):
            raise RuntimeError("secret of the device")
        return result

    monkeypatch.setattr(runner, "forward", spoiled)
    answers, _ = await answers_of(runner, _spoil_nothing)
    for number, [answer] in enumerate(answers):
        if number == culprit:
            assert str(answer.error) == "the computation of a step failed"
        else:
            assert answer.content is not None
            assert answer.content.token_ids == expected[number]


async def test_an_answer_that_cannot_be_given_takes_no_other_with_it(runner: ModelRunner) -> None:
    """All three are ready after the same forward, which is not made again."""

    def spoil(number: int, answer: SessionAnswer) -> None:
        if number == 0 and answer.error is None:
            raise KeyError("secret of the reply")

    expected = [fresh_guesses(runner, spec, DRAFT_COUNT) for spec in SPECS]
    (_, *others), logged = await answers_of(runner, spoil)
    assert logged == ["a step failed"]
    for [answer], guesses in zip(others, expected[1:], strict=True):
        assert answer.content is not None
        assert answer.content.token_ids == guesses
