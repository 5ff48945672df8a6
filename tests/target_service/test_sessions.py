"""Tests of target_service.sessions and verifier without a thread: what a step commits, repeats, and commits unasked."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from helpers import SteppedDevice, spec_of
from tiny_models import write_tiny_model

from outrider.engine.runner import ModelRunner
from outrider.engine.tree import EMPTY, TokenTree
from outrider.errors import CacheFull, InvalidRequest, OutriderError, ProtocolViolation
from outrider.fencing import Fence
from outrider.parameters import FinishReason, SessionSpec
from outrider.sessions import SessionTable
from target_service.sessions import UNACKNOWLEDGED_WINDOW, Answer, Step, TargetSession, TargetSessions
from target_service.verifier import Verifier, VerifyTask

PROMPT = (5, 17, 200, 3, 90)
VOCABULARY_SIZE = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=VOCABULARY_SIZE, context_len=640
    )


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)


class Target:
    """The sessions of a target and their device; one session's answers in the order in which they came."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.device = SteppedDevice[VerifyTask]()
        self.table = SessionTable[TargetSession](60.0)
        self.sessions = TargetSessions(runner, self.table, self.device.submit)
        self.verifier = Verifier(runner, self.table.with_room)
        self.answers: list[Answer | OutriderError] = []
        self.session_id = os.urandom(16)

    def fence(self, epoch: int, base_len: int) -> Fence:
        return Fence(self.session_id, epoch, base_len)

    def open(self, spec: SessionSpec, epoch: int = 1, tree: TokenTree = EMPTY, budget: int = 0) -> None:
        step = Step(tree, budget, time.perf_counter_ns())
        self.sessions.open(self.fence(epoch, len(spec.token_ids)), spec, step, self, self.answers.append)

    def step(self, epoch: int, base_len: int, guesses: Sequence[int] = (), budget: int = 0) -> None:
        step = Step(TokenTree.chain(guesses), budget, time.perf_counter_ns())
        self.sessions.step(self.fence(epoch, base_len), step, self.answers.append)

    def acknowledge(self, epoch: int, base_len: int, budget: int) -> None:
        self.sessions.acknowledge(self.fence(epoch, base_len), budget, time.perf_counter_ns())

    def run(self) -> list[Answer]:
        """Advances until nothing is to do; returns the answers since the last call, which must not be errors."""
        self.device.run(self.verifier.advance)
        answers, self.answers[:] = list(self.answers), []
        assert all(isinstance(answer, Answer) for answer in answers), answers
        return [answer for answer in answers if isinstance(answer, Answer)]

    @property
    def held(self) -> TargetSession:
        """The session."""
        held = self.table.get(self.session_id)
        assert held is not None
        return held

    @property
    def tokens(self) -> list[int]:
        """What the session has committed."""
        return self.held.session.token_ids


@pytest.fixture
def target(runner: ModelRunner) -> Iterator[Target]:
    made = Target(runner)
    yield made
    made.table.clear()
    runner.pool.check_integrity()
    assert runner.pool.num_free == runner.pool.num_blocks


def plain(runner: ModelRunner, spec: SessionSpec) -> list[int]:
    """Plain decoding to the end, one step at a time, in a session of its own."""
    alone = Target(runner)
    alone.open(spec)
    answers = alone.run()
    while alone.held.finish_reason is None:
        alone.step(1, len(alone.tokens))
        answers += alone.run()
    tokens = list(alone.tokens)
    alone.table.clear()
    assert [token for answer in answers if answer.verdict for token in answer.verdict.token_ids] == tokens[
        len(PROMPT) :
    ]
    return tokens


def assert_like_fresh(target: Target) -> None:
    """The cache holds bit for bit what a prefill of the same tokens computes."""
    session = target.held.session
    keys, values = target.runner.kv_state(session)
    fresh = Target(target.runner)
    fresh.open(spec_of(session.token_ids[: session.cached_len], 10**6))
    fresh.run()
    fresh_keys, fresh_values = target.runner.kv_state(fresh.held.session)
    fresh.table.clear()
    assert torch.equal(keys, fresh_keys[:, : session.cached_len])
    assert torch.equal(values, fresh_values[:, : session.cached_len])


def test_a_step_commits_what_plain_decoding_says(target: Target) -> None:
    """Right guesses are kept, the first wrong one is corrected, and the cache is that of a fresh prefill."""
    spec = spec_of(PROMPT, 40, seed=3, eos=(), temperature=1.0)
    expected = plain(target.runner, spec)
    target.open(spec)
    target.run()
    right = expected[6:9]
    target.step(1, 6, [*right, (expected[9] + 1) % VOCABULARY_SIZE, 1])
    [answer] = target.run()
    assert answer.verdict is not None
    assert (answer.fence.base_len, answer.verdict.accepted_rows) == (6, (1, 2, 3))
    assert (answer.verdict.next_token_id, answer.verdict.evaluated_count) == (expected[9], 4)
    assert target.tokens == expected[:10]
    assert answer.cached_len == target.held.session.cached_len == 9
    assert_like_fresh(target)
    target.step(1, 10, expected[10:14])
    [answer] = target.run()
    assert answer.verdict is not None
    assert (answer.verdict.accepted_rows, answer.verdict.next_token_id) == ((1, 2, 3, 4), expected[14])
    assert_like_fresh(target)


def test_a_tree_is_followed_along_the_right_branch(target: Target) -> None:
    """Rows that are kept but not in a row are moved together; the cache shows nothing of the others."""
    spec = spec_of(PROMPT, 40, eos=())
    expected = plain(target.runner, spec)
    target.open(spec)
    target.run()
    wrong = [(token + 1) % VOCABULARY_SIZE for token in expected]
    tree = TokenTree((wrong[6], expected[6], wrong[7], expected[7], expected[8]), (0, 0, 2, 2, 4))
    target.sessions.step(target.fence(1, 6), Step(tree, 0, 0), target.answers.append)
    [answer] = target.run()
    assert answer.verdict is not None
    assert answer.verdict.accepted_rows == (2, 4, 5)
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
    """By the verdict that comes anyway."""
    target.open(spec_of(PROMPT, 40, eos=()))
    target.step(1, 5)
    assert len(target.run()) == 1


def test_a_repeated_open_is_answered_where_it_was_repeated(target: Target) -> None:
    """Before its verdict and behind it; the session belongs to the newer stream."""
    spec = spec_of(PROMPT, 40, eos=())
    target.open(spec)
    newer: list[Answer | OutriderError] = []
    for _ in range(2):
        target.sessions.open(target.fence(1, 5), spec, Step(EMPTY, 0, 0), newer, newer.append)
        assert target.run() == []
    assert len(newer) == 2
    assert newer[0] == newer[1]
    assert target.held.owner is newer


def test_missing_tokens_are_asked_for(target: Target) -> None:
    """An unknown session knows nothing, a known one says how much."""
    target.step(1, 9)
    [answer] = target.run()
    assert (answer.verdict, answer.known_len, answer.cached_len) == (None, 0, 0)
    target.open(spec_of(PROMPT, 40, eos=()))
    target.run()
    target.step(1, 30)
    [answer] = target.run()
    assert (answer.verdict, answer.known_len, answer.cached_len) == (None, 6, 5)


def test_older_epochs_are_dropped(target: Target) -> None:
    """Steps, opens, acknowledgements and closes of an epoch that is over do nothing."""
    target.open(spec_of(PROMPT, 40, eos=()), epoch=3)
    target.run()
    tokens = list(target.tokens)
    target.step(2, 6)
    target.open(spec_of(PROMPT[:2], 40), epoch=2)
    target.acknowledge(2, 6, 8)
    target.table.close(target.fence(2, 6))
    assert target.run() == []
    assert target.tokens == tokens


def test_a_newer_epoch_takes_the_session_back(target: Target) -> None:
    """A rollback may ride in the next step: what lay behind its length is decided anew."""
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
    """With nothing cached."""
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
    assert target.sessions.counts().stopped_jobs == 1
    assert len(target.tokens) == 6


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_unasked_verdicts_respect_the_budget(target: Target, budget: int) -> None:
    """One for each token while the committed length is below base_len + 1 + budget; the tokens are plain decoding's."""
    spec = spec_of(PROMPT, 60, seed=2, eos=(), temperature=1.0)
    target.open(spec, budget=budget)
    answers = target.run()
    assert [answer.fence.base_len for answer in answers] == list(range(5, 6 + budget))
    assert target.tokens == plain(target.runner, spec)[: 6 + budget]
    assert all(answer.times.forward_count == 1 for answer in answers)


def test_the_budget_counts_from_the_step_and_not_from_the_verdict(target: Target) -> None:
    """Accepted tokens use it up."""
    spec = spec_of(PROMPT, 60, eos=())
    expected = plain(target.runner, spec)
    target.open(spec)
    target.run()
    target.step(1, 6, expected[6:9], budget=5)
    assert [answer.fence.base_len for answer in target.run()] == [6, 10, 11]


def test_an_acknowledgement_moves_the_limit(target: Target) -> None:
    """A target that ran into its limit goes on; one that is told 0 does not."""
    target.open(spec_of(PROMPT, 60, eos=()), budget=2)
    assert len(target.run()) == 3
    target.acknowledge(1, 7, 4)
    assert [answer.fence.base_len for answer in target.run()] == [8, 9, 10, 11]
    assert [answer.fence.base_len for answer in target.held.verdicts] == [7, 8, 9, 10, 11]
    target.acknowledge(1, 12, 0)
    assert target.run() == []
    assert target.held.verdicts == []
    target.acknowledge(1, 11, 9)
    target.acknowledge(1, 13, 9)
    assert target.run() == []


def test_the_window_ends_what_the_budget_allows(target: Target) -> None:
    """Never further than the window past the last acknowledged length."""
    target.open(spec_of(PROMPT, 600, eos=()), budget=4096)
    target.run()
    assert len(target.tokens) == len(PROMPT) + UNACKNOWLEDGED_WINDOW
    target.acknowledge(1, 100, 4096)
    target.run()
    assert len(target.tokens) == 100 + UNACKNOWLEDGED_WINDOW


def test_a_step_takes_over_a_target_that_is_going_on_alone(target: Target) -> None:
    """A proposal that comes between two unasked verdicts is verified at once."""
    spec = spec_of(PROMPT, 60, eos=())
    expected = plain(target.runner, spec)
    target.open(spec, budget=50)
    target.device.step(target.verifier.advance)
    target.device.step(target.verifier.advance)
    target.answers.clear()
    target.step(1, 7, expected[7:10])
    [answer] = target.run()
    assert answer.verdict is not None
    assert answer.verdict.accepted_rows == (1, 2, 3)


def test_the_end_is_found_inside_a_proposal(target: Target) -> None:
    """A stop token that is accepted is the last one, and a finished session takes no more steps."""
    expected = plain(target.runner, spec_of(PROMPT, 40, eos=()))
    stop = expected[8]
    length = expected.index(stop, 5) + 1
    target.open(spec_of(PROMPT, 40, eos=(), stops=(stop,)), tree=TokenTree.chain(expected[5:10]), budget=30)
    [answer] = target.run()
    assert answer.verdict is not None
    assert (answer.verdict.finish_reason, answer.verdict.next_token_id) == (FinishReason.STOP_TOKEN, None)
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
    assert answer.verdict is not None
    assert answer.verdict.finish_reason is FinishReason.LENGTH
    assert len(target.tokens) == 8


def test_opening_again_reuses_what_is_cached(target: Target) -> None:
    """Only the tokens that differ are computed again; the answers are those of a new session."""
    spec = spec_of(PROMPT, 40, eos=())
    expected = plain(target.runner, spec)
    target.open(spec, budget=9)
    target.run()
    target.table.leave(target.session_id, target)
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


def test_a_full_pool_evicts_leases_first_and_then_fails_one_session(folder: Path) -> None:
    """Whoever finds no room fails alone and gives back what it had; the others never notice."""
    small = ModelRunner.load(str(folder), dtype="float32", kv_tokens=64)
    target = Target(small)
    leased, running, late = (os.urandom(16) for _ in range(3))
    target.session_id = leased
    target.open(spec_of(range(1, 31), 40, eos=()))
    target.run()
    target.table.leave(leased, target)
    target.session_id = running
    target.open(spec_of(range(1, 31), 60, eos=()), budget=8)
    assert len(target.run()) == 9
    assert target.table.get(leased) is None
    errors: list[Answer | OutriderError] = []
    step = Step(EMPTY, 0, 0)
    target.sessions.open(Fence(late, 1, 40), spec_of(range(1, 41), 60), step, object(), errors.append)
    target.step(1, 39)
    assert len(target.run()) == 1
    assert [type(error) for error in errors] == [CacheFull]
    assert target.table.get(late) is None
    target.table.clear()
    small.pool.check_integrity()
    assert small.pool.num_free == small.pool.num_blocks


def test_a_session_that_cannot_draw_fails_alone(target: Target) -> None:
    """All tokens forbidden is a fault of one request, and not of its batch."""
    forbidden = spec_of(PROMPT, 40, eos=range(VOCABULARY_SIZE), temperature=1.0, min_tokens=5)
    errors: list[Answer | OutriderError] = []
    target.open(spec_of(PROMPT, 40, eos=()))
    target.sessions.open(Fence(bytes(16), 1, 5), forbidden, Step(EMPTY, 0, 0), object(), errors.append)
    assert len(target.run()) == 1
    assert [type(error) for error in errors] == [OutriderError]
    assert "no token can be drawn" in str(errors[0])
    assert target.table.get(bytes(16)) is None
