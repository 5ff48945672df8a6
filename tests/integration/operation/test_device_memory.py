"""A device that is out of memory: one request's error, never another's, and never the end of a service."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.models.tiny_models import write_tiny_model
from support.rest.rest_stack import RestStack, rest_stack
from support.stack import PATIENT
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.runner import ModelRunner
from outrider.errors import DeviceFull

CULPRIT_ID = 250
PROMPTS = [[first, *range(1, 60)] for first in (201, 202, CULPRIT_ID, 203)]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("memory") / "model", "llama", vocab_size=257)


def fill(runner: ModelRunner, patch: pytest.MonkeyPatch, is_full: Callable[[RowPlan], bool]) -> None:
    """Lets forwards of some plans run out of memory when all is computed."""
    forward = runner.model.forward

    def forward_or_not(plan: RowPlan, *others: Any) -> Tensor:
        logits: Tensor = forward(plan, *others)
        if is_full(plan):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return logits

    patch.setattr(runner.model, "forward", forward_or_not)


async def ask_all(rest: RestStack) -> list[tuple[int, ...] | DeviceFull]:
    async def ask(token_ids: list[int]) -> tuple[int, ...] | DeviceFull:
        try:
            return (await rest.stack.generate(token_ids=token_ids, **GREEDY)).token_ids
        except DeviceFull as error:
            return error

    return list(await asyncio.gather(*map(ask, PROMPTS)))


async def test_a_device_out_of_memory_fails_one_request_at_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches are made smaller, one that is too much alone is 503 with what to do, and a draft costs guesses."""
    # Every prompt is read whole.
    options: dict[str, Any] = {each: {"prefix_cache": False} for each in ("target_options", "draft_options")}
    async with rest_stack(target=str(folder), draft=str(folder), kv_tokens=2048, gateway=PATIENT, **options) as rest:
        expected = await ask_all(rest)
        target, draft = rest.stack.target.runner, rest.stack.draft.runner
        with monkeypatch.context() as patch, capture_logs() as logs:
            fill(target, patch, lambda plan: plan.num_rows > 40)
            assert await ask_all(rest) == expected
            fill(draft, patch, lambda plan: plan.num_rows > 1)
            assert await ask_all(rest) == expected
            assert "the device is out of memory, and prompts are read in smaller pieces" in {
                line["event"] for line in logs
            }
        with monkeypatch.context() as patch, capture_logs():
            fill(target, patch, lambda plan: CULPRIT_ID in plan.token_ids)
            found = await ask_all(rest)
            assert isinstance(found.pop(2), DeviceFull)
            assert found == [*expected[:2], expected[3]]
            body = {"model": await rest.model(), "prompt": PROMPTS[2], "max_tokens": 3}
            reply = await rest.http.post("/v1/completions", json=body)
            told = reply.json()["error"]
            assert (reply.status_code, told["code"]) == (503, "device_memory_full")
            assert "--kv-memory-share" in told["message"]
            assert reply.headers["retry-after"]
        assert await ask_all(rest) == expected
