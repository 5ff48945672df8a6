"""Costs of a model's forwards that a service measures before it serves."""

import asyncio
from pathlib import Path

import grpc
import pytest
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from draft_service.server import DraftSettings
from draft_service.server import start as start_draft
from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.decoder import ChainDraws
from outrider.engine.runner import ModelRunner
from outrider.model_service.row_costs import MOST_ROWS, measure_rows, warm_up
from outrider.v1 import model_service_pb2 as pb
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from target_service.server import TargetSettings
from target_service.server import start as start_target


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    write_tiny_model(tmp_path, "llama")
    return ModelRunner.load(str(tmp_path), num_threads=2, kv_tokens=4096)


def test_each_doubling_of_rows_is_measured(runner: ModelRunner) -> None:
    """And nothing stays: no block is taken, and no forward counts as one that was asked for."""
    found = measure_rows(runner, budget_s=60.0)
    assert list(found) == [1 << power for power in range(MOST_ROWS.bit_length())]
    assert all(us >= 1 for us in found.values())
    assert runner.pool.num_used == 0
    assert runner.forward_counts.num_rows == 0


def test_it_ends_where_model_or_time_do(tmp_path: Path, runner: ModelRunner) -> None:
    """A small cache holds few rows, and without time nothing is measured; with little, what says what a row costs."""
    assert measure_rows(runner, budget_s=0.0) == {}
    assert list(measure_rows(runner, budget_s=1e-9)) == [1, 2]
    small = ModelRunner.load(str(tmp_path), num_threads=1, kv_tokens=16)
    assert max(measure_rows(small, budget_s=60.0)) == 16


async def test_services_say_what_they_have_measured(tmp_path: Path) -> None:
    """Of their own model, and of one that drafts in the target's process."""
    write_tiny_model(tmp_path, "llama")
    name = str(tmp_path)
    target = TargetSettings(model=name, draft_model=name, listen="127.0.0.1:0", kv_tokens=4096)
    draft = DraftSettings(model=name, listen="127.0.0.1:0", kv_tokens=4096)
    for service in await asyncio.gather(start_target(target), start_draft(draft)):
        try:
            async with grpc.aio.insecure_channel(service.address) as channel:
                info = await ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        finally:
            await service.stop(0.0)
        offers = {offer.name: [each.row_count for each in offer.row_costs] for offer in info.drafter_offers}
        assert [each.row_count for each in info.row_costs][:3] == [1, 2, 4]
        assert all(each.compute_us >= 1 for each in info.row_costs)
        assert offers["hosted" if service.facts.role == "target" else "model"][:3] == [1, 2, 4]


def test_what_costs_more_the_first_time_is_made_before(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows that the model names, divided among sessions, a prompt, and a chain; nothing of it stays."""
    shapes = [(1, 1), (5, 5), (9, 4)]
    monkeypatch.setattr(type(runner.model), "step_shapes", shapes)
    plans, chains, forward = [], [], runner.model.forward

    def noted(plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        plans.append((plan.num_rows, plan.max_key_count))
        return forward(plan, cache, wanted)

    def chained(plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws) -> list[list[int]]:
        chains.append((plan.num_rows, len(draws.keys), len(plan.key_slots)))
        return []

    monkeypatch.setattr(runner.model, "forward", noted)
    monkeypatch.setattr(runner.model, "chain", chained)
    warm_up(runner)
    whole = min(runner.max_rows, runner.context_len)
    assert plans == [*shapes, (whole, whole)]
    # With a slot for the row below.
    assert chains == [(1, 2, 2)]
    assert runner.pool.num_used == 0
    assert runner.forward_counts.num_rows == 0


def test_a_model_without_such_steps_computes_nothing(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU every step costs the same from the first on."""
    monkeypatch.setattr(runner.model, "forward", None)
    warm_up(runner)
