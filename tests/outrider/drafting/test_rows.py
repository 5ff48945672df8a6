"""Rows without names: which is which, what is asked for them, and that nothing a draft does ends a step."""

import asyncio
import random

import numpy as np
import pytest
from support.basics import PATIENCE_S, eventually
from support.drafting.engine_rows import Request, RowEngine, plain
from support.services.counting_draft import CountingDraft

from outrider.drafting import DraftClient
from outrider.drafting.pace import Pace
from outrider.drafting.rows import KEEP_STEPS, RowProposer
from outrider.drafting.settings import ProposerSettings
from outrider.errors import InvalidRequest

MAX_LEN = 64


class Always(Pace):
    """Asks for as many as it may, whatever steps cost here."""

    def choose(self, num_rows: int) -> int:
        return self.max_count


def engine_on(client: DraftClient, deadline_s: float = PATIENCE_S, max_rows: int = 32) -> RowEngine:
    proposer = RowProposer(client, 4, MAX_LEN, deadline_s)
    proposer.pace = Always(4)
    return RowEngine(proposer, max_rows, MAX_LEN)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_move_come_go_and_are_preempted_keep_their_sequences(quick: DraftClient, seed: int) -> None:
    """Every answer is that of plain decoding, each request has one sequence for all its life, and guesses are kept."""
    chance, engine = random.Random(seed), engine_on(quick)
    # Two of each prompt, which nothing but their places tells apart at first.
    prompts = [[chance.randrange(900) for _ in range(chance.randrange(1, 20))] for _ in range(30)] * 2
    requests = [Request([*prompt], MAX_LEN) for prompt in prompts]
    waiting, away = [*requests], list[Request]()
    while waiting or away or engine.rows:
        while waiting and len(engine.rows) < 16:
            engine.rows.append(waiting.pop())
        engine.step()
        if chance.random() < 0.3:
            engine.move(chance)
        engine.rows += away
        away = [engine.preempt(0)] if len(engine.rows) > 8 and chance.random() < 0.2 else []
    assert [request.token_ids for request in requests] == [plain(prompt, MAX_LEN) for prompt in prompts]
    counters = engine.proposer.counters
    assert counters.sequences_opened == len(requests)
    assert counters.kept == engine.kept
    assert engine.kept > 0.5 * sum(len(request.token_ids) for request in requests)
    assert (counters.errors, counters.rows_lost, counters.rows_refused) == (0, 0, 0)


def test_sequences_that_no_row_has_are_closed(draft: CountingDraft, quick: DraftClient) -> None:
    """After a while in which a request that was preempted could have come back."""
    engine = engine_on(quick)
    for number in range(200):
        engine.rows = [Request([number], MAX_LEN)]
        engine.step()
        engine.step()
        assert quick.num_sequences <= KEEP_STEPS + 1
    engine.rows = []
    for _ in range(KEEP_STEPS + 1):
        engine.step()
    assert quick.num_sequences == 0


def test_a_draft_that_hangs_costs_two_deadlines_and_no_answer(draft: CountingDraft, quick: DraftClient) -> None:
    engine = engine_on(quick, deadline_s=0.02)
    engine.rows = [request := Request([5], MAX_LEN)]
    draft.gate.clear()
    while engine.rows:
        engine.step()
    draft.gate.set()
    assert request.token_ids == plain([5], MAX_LEN)
    counters = engine.proposer.counters
    assert counters.rows_late >= 2
    assert counters.rows_lost > 0


def test_a_draft_that_dies_in_the_middle_and_comes_back_is_used_again(draft: CountingDraft, quick: DraftClient) -> None:
    engine = engine_on(quick)
    engine.rows = [Request([5], MAX_LEN)]
    for _ in range(4):
        engine.step()
    draft.stop()
    kept = engine.kept
    asyncio.run(eventually(lambda: quick.info is None))
    for _ in range(3):
        engine.step()
    assert kept > 0
    draft.last.clear()
    draft.start(draft.address)
    quick.wait(PATIENCE_S)
    while engine.rows:
        engine.step()
    assert engine.kept > kept + 4
    assert engine.proposer.counters.errors == 0


def test_a_fault_of_the_proposer_ends_no_step(quick: DraftClient, caplog: pytest.LogCaptureFixture) -> None:
    """It is in the log and counted; the step has no guesses."""
    proposer = RowProposer(quick, 4, MAX_LEN, PATIENCE_S)
    assert proposer.propose([[1], [2]], [99_999, 1], np.zeros((1, 4), np.int32)) == [[], []]
    assert proposer.counters.errors == 1
    assert "the proposer failed" in caplog.text
    assert "errors 1" in proposer.told()


def test_settings_come_from_the_environment() -> None:
    settings = ProposerSettings.read({"OUTRIDER_DRAFT": "a:1, b:2", "OUTRIDER_DRAFT_DEADLINE_MS": "20"})
    assert (settings.addresses, settings.deadline_s, settings.credentials) == (("a:1", "b:2"), 0.02, None)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "OUTRIDER_DRAFT is '', but must be HOST:PORT"),
        (
            {"OUTRIDER_DRAFT": "a:1", "OUTRIDER_DRAFT_DEADLINE_MS": "0"},
            "OUTRIDER_DRAFT_DEADLINE_MS is '0', but must be",
        ),
        (
            {"OUTRIDER_DRAFT": "a:1", "OUTRIDER_DRAFT_LOG_SECONDS": "x"},
            "OUTRIDER_DRAFT_LOG_SECONDS is 'x', but must be",
        ),
        (
            {"OUTRIDER_DRAFT": "a:1", "OUTRIDER_DRAFT_TLS_CERT": "f"},
            "OUTRIDER_DRAFT_TLS_CERT is 'f', but must be given",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_named(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        ProposerSettings.read(environment)
