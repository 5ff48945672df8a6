"""A forward that raises, with the device's own thread: who is at fault ends, and the others do not notice."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict
from support.basics import Answers, check_empty, eventually, spec_of
from support.services.stepped_target import plain
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.device_thread import DeviceWorker
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.walk import Walk
from outrider.errors import OutriderError
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import SessionAnswer
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from target_service import acceptance, verifier
from target_service.sessions import TargetSessions
from target_service.states import Step, TargetState
from target_service.verifier import Verifier, VerifyTask

MAX_LEN = 24
# One that fits into no other prompt, so that a feed shows whose it is.
CULPRIT_ID = 111
SPECS = [
    spec_of((5, 17, first, 3, 90), MAX_LEN, seed=first, eos=(), temperature=0.9) for first in (200, CULPRIT_ID, 30, 44)
]


class Served:
    """Four sessions on one device that begin in one batch; their answers in the order in which they came."""

    def __init__(self, runner: ModelRunner) -> None:
        self.table = LeaseTable[TargetState](60.0)
        self.worker = DeviceWorker[VerifyTask](Verifier(runner, self.table).advance)
        self.sessions = TargetSessions(runner, self.table, self.worker.submit)
        self.answers = [Answers() for _ in SPECS]
        self.logs: list[EventDict] = []

    async def run(self, trees: Sequence[TokenTree]) -> None:
        """Opens all, and waits until each has come to its end."""
        await self.worker.call(partial(self._open, trees))
        await eventually(lambda: self.worker.call(lambda: all(held.task is None for held in self.table)))

    def _open(self, trees: Sequence[TokenTree]) -> None:
        for number, (spec, tree) in enumerate(zip(SPECS, trees, strict=True)):
            fence = Fence(bytes([number] * 16), 1, len(spec.token_ids))
            step = Step(tree, MAX_LEN, time.perf_counter_ns())
            self.sessions.open(fence, spec, step, self.answers[number])


@asynccontextmanager
async def serving(runner: ModelRunner) -> AsyncIterator[Served]:
    """Ends the thread, and looks for what is left."""
    served = Served(runner)
    # Tracebacks on a terminal take longer to print than everything else here.
    with capture_logs() as served.logs:
        yield served
        await served.worker.call(served.table.clear)
        await served.worker.close()
    check_empty(runner.pool)


def assert_plain(spec: SessionSpec, expected: Sequence[int], answers: Sequence[SessionAnswer]) -> None:
    """The verdicts follow each other without a gap or a repetition, and spell what plain decoding does."""
    tokens = list(spec.token_ids)
    for answer in answers:
        assert answer.content is not None
        assert answer.fence.base_len == len(tokens)
        tokens += answer.content.token_ids
    assert tokens == list(expected)


def proposals(expected: Sequence[Sequence[int]]) -> list[TokenTree]:
    """Right guesses, a wrong one, a branch, and none."""
    right = [tokens[len(spec.token_ids) :][:3] for spec, tokens in zip(SPECS, expected, strict=True)]
    branch = TokenTree(((right[2][0] + 1) % 257, right[2][0], right[2][1]), (0, 0, 2))
    return [TokenTree.chain(right[0]), TokenTree.chain([(right[1][0] + 1) % 257]), branch, EMPTY]


def _is_too_much(feeds: Sequence[Feed]) -> bool:
    return len(feeds) > 1


def _has_culprit(feeds: Sequence[Feed]) -> bool:
    return any(CULPRIT_ID in feed.session.token_ids[:5] for feed in feeds)


def spoil(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, place: str, fails: Callable[..., bool]) -> None:
    """Lets a step raise when its keys and values are written but not counted, or when its forward is complete."""
    forward, model_forward, decide = runner.forward, runner.model.forward, acceptance.decide
    is_failing = False

    def spoiled_model(*arguments: object) -> object:
        logits = model_forward(*arguments)  # type: ignore[arg-type]
        if is_failing:
            raise RuntimeError("secret of the device")
        return logits

    def spoiled_forward(feeds: Sequence[Feed], max_prompt_rows: int) -> ForwardResult:
        nonlocal is_failing
        is_failing = fails(feeds)
        return forward(feeds, max_prompt_rows)

    def spoiled_decide(
        runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
    ) -> list[Walk | OutriderError]:
        ways = decide(runner, inputs, logits, ranges)
        if fails([draw_input.feed for draw_input in inputs]):
            raise RuntimeError("secret of the device")
        return ways

    if place == "in the forward":
        monkeypatch.setattr(runner, "forward", spoiled_forward)
        monkeypatch.setattr(runner.model, "forward", spoiled_model)
    else:
        monkeypatch.setattr(verifier, "decide", spoiled_decide)


@pytest.mark.parametrize("place", ["in the forward", "behind the forward"])
async def test_a_batch_that_fails_costs_nobody_a_token(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Every step of several sessions raises and is made alone: the verdicts are those of plain decoding, once each."""
    expected = [plain(runner, spec) for spec in SPECS]
    spoil(monkeypatch, runner, place, _is_too_much)
    async with serving(runner) as served:
        await served.run(proposals(expected))
        for spec, tokens, answers in zip(SPECS, expected, served.answers, strict=True):
            assert_plain(spec, tokens, answers)


@pytest.mark.parametrize("place", ["in the forward", "behind the forward"])
async def test_only_the_culprit_ends(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The session whose own step raises gets an error without Python's text and is gone; the others get all tokens."""
    expected = [plain(runner, spec) for spec in SPECS]
    spoil(monkeypatch, runner, place, _has_culprit)
    async with serving(runner) as served:
        await served.run(proposals(expected))
        [answer] = served.answers[1]
        assert str(answer.error) == "the computation of a step failed"
        assert len(served.table) == 3
        for number in (0, 2, 3):
            assert_plain(SPECS[number], expected[number], served.answers[number])


async def test_a_verdict_that_cannot_be_given_ends_its_own_session(runner: ModelRunner) -> None:
    """It does not go on with the verdict after; the others' verdicts of that forward are given, and only once."""
    expected = [plain(runner, spec) for spec in SPECS]
    async with serving(runner) as served:
        raised = list[KeyError]()

        class Spoiled(Answers):
            def put(self, answer: object) -> None:
                if len(self) == 2 and not raised:
                    raised.append(KeyError("secret of the reply"))
                    raise raised[0]
                super().put(answer)

        served.answers[1] = kept = Spoiled()
        await served.run([EMPTY] * 4)
        assert str(kept[-1].error) == "the computation of a step failed"
        assert (len(kept), len(served.table)) == (3, 3)
        assert [line["event"] for line in served.logs if line["log_level"] == "error"] == ["a step failed"]
        for number in (0, 2, 3):
            assert_plain(SPECS[number], expected[number], served.answers[number])
