"""Every newer epoch that finds a job running stops it, and each stopped job is counted once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.basics import Answers, SteppedDevice, spec_of
from support.models.tiny_models import write_tiny_model

from draft_service.sessions import DraftSessions
from draft_service.states import DraftState, Wanted
from outrider.drafters.model_drafter import DraftTask, ModelDrafter
from outrider.engine.runner import ModelRunner
from outrider.model_service.leases import LeaseTable
from outrider.rpc.fencing import Fence

SPEC = spec_of((5, 17, 200, 3, 90), 60, eos=())
SESSION_ID = os.urandom(16)
OWNER = Answers()


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    folder = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=257, context_len=64)
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=256)


def _open(sessions: DraftSessions, epoch: int) -> None:
    sessions.open(Fence(SESSION_ID, epoch, 5), SPEC, Wanted(4, 0), OWNER)


def _advance(sessions: DraftSessions, epoch: int) -> None:
    sessions.advance(Fence(SESSION_ID, epoch, 6), (9,), Wanted(4, 0), OWNER)


def _roll_back(sessions: DraftSessions, epoch: int) -> None:
    sessions.rollback(Fence(SESSION_ID, epoch, 5))


@pytest.mark.parametrize("begin", [_open, _advance, _roll_back])
def test_a_newer_epoch_counts_the_job_it_stops(
    runner: ModelRunner, begin: Callable[[DraftSessions, int], None]
) -> None:
    """Whichever message begins it; without a running job nothing is counted."""
    table = LeaseTable[DraftState](60.0)
    device, drafter = SteppedDevice[DraftTask](), ModelDrafter(runner, table.with_room, line_s=0.0)
    sessions = DraftSessions(runner, table, device.submit)
    _open(sessions, 1)
    assert device.step(drafter.advance)
    begin(sessions, 2)
    assert sessions.counts().stopped_job_count == 1
    device.run(drafter.advance)
    begin(sessions, 3)
    assert sessions.counts().stopped_job_count == 1
