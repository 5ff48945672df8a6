"""The sessions of a target and their device, without thread and server: tasks advance when a test says so."""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.basics import Answers, SteppedDevice, spec_of
from support.models.engine_cases import kv_state

from outrider.drafters.drafter import Drafter, GuessLimits
from outrider.drafters.scales import Ranks, Scales
from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import SessionAnswer
from outrider.parameters import Rule, SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree, TreeShape
from target_service.sessions import TargetSessions
from target_service.states import Step, TargetState
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

    def open(
        self,
        spec: SessionSpec,
        epoch: int = 1,
        tree: TokenTree = EMPTY,
        budget: int = 0,
        *,
        tells_reading: bool = False,
    ) -> None:
        step, fence = Step(tree, budget, time.perf_counter_ns()), self.fence(epoch, len(spec.token_ids))
        self.sessions.open(fence, spec, step, self.answers, tells_reading=tells_reading)

    def step(self, epoch: int, base_len: int, guesses: Sequence[int] | TokenTree = (), budget: int = 0) -> None:
        tree = guesses if isinstance(guesses, TokenTree) else TokenTree.chain(guesses)
        step = Step(tree, budget, time.perf_counter_ns())
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
        """State of the session in the target."""
        held = self.table.get(self.session_id)
        assert held is not None
        return held

    @property
    def tokens(self) -> list[int]:
        """What the session has committed."""
        return self.held.session.token_ids


class OwnTarget(Target):
    """A target whose sessions have one drafter in its process."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, shape: TreeShape | None = None) -> None:
        """`shape` is that of all guesses that are asked for."""
        super().__init__(runner)
        self.shape = shape
        self.sessions = TargetSessions(runner, self.table, self.device.submit, drafters=[drafter])
        self.drafter = drafter.name

    def ask(self, spec: SessionSpec, count: int, budget: int = 0, epoch: int = 1) -> None:
        """Opens the session with all tokens of the spec."""
        fence = self.fence(epoch, len(spec.token_ids))
        self.sessions.open(
            fence, spec, Step(EMPTY, budget, 0, GuessLimits(count, self.shape)), self.answers, self.drafter
        )

    def go_on(self, count: int, budget: int = 0, epoch: int = 1, tree: TokenTree = EMPTY) -> None:
        fence = self.fence(epoch, len(self.tokens))
        self.sessions.step(fence, Step(tree, budget, 0, GuessLimits(count, self.shape)), self.answers)

    def to_the_end(self, spec: SessionSpec, count: int, budget: int = 0) -> list[SessionAnswer]:
        """All answers of a request, and none that does not follow from the tokens and the proposal that it names."""
        self.ask(spec, count, budget)
        answers = self.run()
        while self.held.finish_reason is None:
            self.go_on(count, budget)
            answers += self.run()
        said = list(spec.token_ids)
        for answer in answers:
            verdict = answer.content
            assert answer.fence.base_len == len(said)
            assert [verdict.hosted.tree.token_ids[row - 1] for row in verdict.accepted_rows] == list(
                verdict.token_ids[: len(verdict.accepted_rows)]
            )
            said += verdict.token_ids
        assert said == self.tokens
        return answers


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


Proposals = list[tuple[list[int], TokenTree]]
"""What a drafter proposed after which tokens."""


def storm(own: OwnTarget, spec: SessionSpec, chance: random.Random) -> tuple[list[list[int]], Proposals]:
    """A request to its end, with all that can happen to a session on the way.

    Returns what was committed after each event, and all proposals.
    """
    said: list[list[int]] = []
    proposals: Proposals = []
    epoch = 1

    def take() -> None:
        for answer in own.run():
            if answer.content is not None and answer.content.hosted.tree:
                proposals.append((own.tokens[: answer.fence.base_len], answer.content.hosted.tree))

    own.ask(spec, 3)
    take()
    while own.held.finish_reason is None:
        event, count = chance.randrange(7), chance.choice((0, 1, 3, 5))
        length = chance.randrange(len(PROMPT), len(own.tokens) + 1)
        if event == 0:
            epoch += 1
            own.sessions.rollback(Fence(own.session_id, epoch, length))
            own.go_on(count, chance.choice((0, 9)), epoch)
        elif event == 1:
            epoch += 1
            own.ask(replace(spec, token_ids=tuple(own.tokens[:length])), count, chance.choice((0, 9)), epoch)
        elif event == 2:
            own.held.session.free()
            own.go_on(count, 0, epoch)
        elif event == 3:
            assert own.held.hosted is not None
            own.held.hosted.part.free()
            own.go_on(count, 5, epoch)
        else:
            own.go_on(count, chance.choice((0, 4)), epoch)
            if event == 4:
                own.device.step(own.verifier.advance)
                if own.held.finish_reason is None:
                    own.go_on(count, 0, epoch)
        take()
        said.append(list(own.tokens))
    return said, proposals


def check_storm(
    runner: ModelRunner,
    drafter: Drafter,
    own: OwnTarget,
    spec: SessionSpec,
    shape: TreeShape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter that learns nothing proposes pure trees in a storm, and under `match` the tokens are those of plain
    decoding.
    """
    monkeypatch.setattr(Scales, "learn", lambda *_arguments: None)
    monkeypatch.setattr(Ranks, "learn", lambda *_arguments: None)
    said, proposals = storm(own, spec, random.Random(7))
    rule = spec.acceptance.rule
    if rule is Rule.MATCH:
        tokens = plain(runner, spec)
        assert own.tokens == tokens
        assert all(each == tokens[: len(each)] for each in said)
    assert len(proposals) > 5
    assert all(bool(tree.distributions) == rule.needs_distributions for _, tree in proposals)
    check_pure(runner, drafter, spec, proposals, shape)
    own.table.clear()


def check_pure(
    runner: ModelRunner, drafter: Drafter, spec: SessionSpec, proposals: Proposals, shape: TreeShape | None = None
) -> None:
    """Fresh sessions of target and drafter propose the same after the same tokens, bit for bit."""
    for before, tree in proposals:
        session, fresh = runner.open(before, spec.prompt_len), drafter.open(spec, None)
        try:
            runner.forward([Feed(session, without_last=True)])
            fresh.propose(session, GuessLimits(len(tree), shape, max(tree.depths)))
            while fresh.proposal is None:
                drafter.advance([fresh])
            assert fresh.proposal.tree == tree
        finally:
            fresh.free()
            session.free()
