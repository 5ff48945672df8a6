"""The sessions of a draft and their device, without thread and server: tasks advance when a test says so."""

import os
from collections.abc import Sequence

import torch
from support.basics import Answers, SteppedDevice, spec_of
from support.models.engine_cases import kv_state

from draft_service.sessions import DraftSessions
from draft_service.states import DraftState, Wanted
from draft_service.tasks import Steps, Task
from outrider.drafters.beam_drafter import BeamDrafter
from outrider.drafters.drafter import Drafter
from outrider.drafters.model_drafter import MODEL, ModelDrafter
from outrider.drafters.shelf.cascade import Cascade
from outrider.engine.runner import ModelRunner
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import SessionAnswer
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import TokenTree, TreeShape

PROMPT = (5, 17, 200, 3, 90)
CONTEXT_LEN = 64


class Draft:
    """The sessions of a draft and their device; one session's answers in the order in which they came."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        prefix_cache: bool = True,
        cascade: Cascade | None = None,
        drafters: Sequence[Drafter] = (),
        line_s: float = 0.0,
    ) -> None:
        """Each step is one guess of a chain, or as many as ModelDrafter makes in line_s."""
        self.runner = runner
        self.device = SteppedDevice[Task]()
        self.table = LeaseTable[DraftState](60.0)
        self.sessions = DraftSessions(
            runner, self.table, self.device.submit, prefix_cache=prefix_cache, ahead=cascade, drafters=drafters
        )
        self.drafter = ModelDrafter(runner, self.table.with_room, ahead=cascade, line_s=line_s)
        self.answers = Answers()
        self.session_id = os.urandom(16)

    @property
    def steps(self) -> Steps:
        """Whoever makes steps: tests may put another drafter there."""
        return Steps(self.drafter, BeamDrafter(self.runner, self.table.with_room))

    def fence(self, epoch: int, base_len: int) -> Fence:
        return Fence(self.session_id, epoch, base_len)

    def open(
        self,
        spec: SessionSpec,
        draft_count: int,
        epoch: int = 1,
        shape: TreeShape | None = None,
        drafter: str = MODEL,
    ) -> None:
        fence = self.fence(epoch, len(spec.token_ids))
        self.sessions.open(fence, spec, Wanted(draft_count, 0, shape), self.answers, drafter)

    def advance(
        self,
        epoch: int,
        base_len: int,
        token_ids: Sequence[int],
        draft_count: int,
        shape: TreeShape | None = None,
    ) -> None:
        wanted = Wanted(draft_count, 0, shape)
        self.sessions.advance(self.fence(epoch, base_len), tuple(token_ids), wanted, self.answers)

    def step(self) -> bool:
        """One step of all tasks."""
        return self.device.step(self.steps.advance)

    def run(self) -> list[SessionAnswer]:
        """Advances until nothing is to do; returns the answers since the last call, which must not be errors."""
        self.device.run(self.steps.advance)
        answers, self.answers[:] = list(self.answers), []
        assert all(answer.error is None for answer in answers), answers
        return answers

    def guesses(self) -> tuple[int, ...]:
        """The guesses of the one answer that is due."""
        [answer] = self.run()
        assert answer.content is not None
        return answer.content.token_ids

    def tree(self) -> TokenTree:
        """The proposal of the one answer that is due."""
        [answer] = self.run()
        assert isinstance(answer.content, TokenTree)
        return answer.content

    @property
    def held(self) -> DraftState:
        """State of the session in the draft."""
        held = self.table.get(self.session_id)
        assert held is not None
        return held


def fresh_guesses(runner: ModelRunner, spec: SessionSpec, draft_count: int) -> tuple[int, ...]:
    """What a new session guesses."""
    alone = Draft(runner, prefix_cache=False)
    alone.open(spec, draft_count)
    guesses = alone.guesses()
    alone.table.clear()
    return guesses


def fresh_tree(
    runner: ModelRunner, spec: SessionSpec, draft_count: int, shape: TreeShape | None, drafter: str = MODEL
) -> TokenTree:
    """What a new session proposes, without having learned anything."""
    alone = Draft(runner, prefix_cache=False)
    alone.open(spec, draft_count, shape=shape, drafter=drafter)
    tree = alone.tree()
    alone.table.clear()
    return tree


def assert_like_fresh(draft: Draft) -> None:
    """The cache holds bit for bit what a prefill of the same tokens computes."""
    session = draft.held.session
    keys, values = kv_state(draft.runner, session)
    fresh = Draft(draft.runner, prefix_cache=False)
    fresh.open(spec_of(session.token_ids[: session.cached_len], 10**6), 0)
    fresh.run()
    fresh_keys, fresh_values = kv_state(draft.runner, fresh.held.session)
    fresh.table.clear()
    assert torch.equal(keys, fresh_keys[:, : session.cached_len])
    assert torch.equal(values, fresh_values[:, : session.cached_len])


SPEC = spec_of(PROMPT, 60, seed=11, eos=(), temperature=1.0)


def continued(spec: SessionSpec, token_ids: Sequence[int]) -> SessionSpec:
    """The spec with more committed tokens."""
    return spec_of(
        (*spec.token_ids, *token_ids),
        spec.max_len,
        seed=spec.seed,
        eos=(),
        prompt_len=spec.prompt_len,
        temperature=spec.sampling.temperature,
    )
