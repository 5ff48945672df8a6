"""The sessions of a target and their device, without thread and server: tasks advance when a test says so."""

import os
import time
from collections.abc import Sequence

import torch

from outrider.engine.runner import ModelRunner
from outrider.model_service.session_store import LeaseTable, SessionAnswer
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from support.basics import Answers, SteppedDevice, spec_of
from support.engine_cases import kv_state
from target_service.sessions import Step, TargetSessions, TargetState
from target_service.verifier import Verifier, VerifyTask

PROMPT = (5, 17, 200, 3, 90)
VOCABULARY_SIZE = 257


class Target:
    """The sessions of a target and their device; one session's answers in the order in which they came."""

    def __init__(self, runner: ModelRunner, *, prefix_cache: bool = True) -> None:
        self.runner = runner
        self.device = SteppedDevice[VerifyTask]()
        self.table = LeaseTable[TargetState](60.0)
        self.sessions = TargetSessions(runner, self.table, self.device.submit, prefix_cache=prefix_cache)
        self.verifier = Verifier(runner, self.table)
        self.answers = Answers()
        self.session_id = os.urandom(16)

    def fence(self, epoch: int, base_len: int) -> Fence:
        return Fence(self.session_id, epoch, base_len)

    def open(self, spec: SessionSpec, epoch: int = 1, tree: TokenTree = EMPTY, budget: int = 0) -> None:
        step = Step(tree, budget, time.perf_counter_ns())
        self.sessions.open(self.fence(epoch, len(spec.token_ids)), spec, step, self.answers)

    def step(self, epoch: int, base_len: int, guesses: Sequence[int] = (), budget: int = 0) -> None:
        step = Step(TokenTree.chain(guesses), budget, time.perf_counter_ns())
        self.sessions.step(self.fence(epoch, base_len), step, self.answers)

    def acknowledge(self, epoch: int, base_len: int, budget: int) -> None:
        self.sessions.acknowledge(self.fence(epoch, base_len), budget, time.perf_counter_ns(), self.answers)

    def run(self) -> list[SessionAnswer]:
        """Advances until nothing is to do; returns the answers since the last call, which must not be errors."""
        self.device.run(self.verifier.advance)
        answers, self.answers[:] = list(self.answers), []
        assert all(answer.error is None for answer in answers), answers
        return answers

    @property
    def held(self) -> TargetState:
        """The session."""
        held = self.table.get(self.session_id)
        assert held is not None
        return held

    @property
    def tokens(self) -> list[int]:
        """What the session has committed."""
        return self.held.session.token_ids


def plain(runner: ModelRunner, spec: SessionSpec) -> list[int]:
    """Plain decoding to the end, one step at a time, in a session of its own."""
    alone = Target(runner, prefix_cache=False)
    alone.open(spec)
    answers = alone.run()
    while alone.held.finish_reason is None:
        alone.step(1, len(alone.tokens))
        answers += alone.run()
    tokens = list(alone.tokens)
    alone.table.clear()
    assert [token for answer in answers if answer.content for token in answer.content.token_ids] == tokens[
        len(PROMPT) :
    ]
    return tokens


def assert_like_fresh(target: Target) -> None:
    """The cache holds bit for bit what a prefill of the same tokens computes."""
    session = target.held.session
    keys, values = kv_state(target.runner, session)
    fresh = Target(target.runner, prefix_cache=False)
    fresh.open(spec_of(session.token_ids[: session.cached_len], 10**6))
    fresh.run()
    fresh_keys, fresh_values = kv_state(target.runner, fresh.held.session)
    fresh.table.clear()
    assert torch.equal(keys, fresh_keys[:, : session.cached_len])
    assert torch.equal(values, fresh_values[:, : session.cached_len])
