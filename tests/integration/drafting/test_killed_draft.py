"""Real processes, real signals: a draft that dies in the middle of a round costs time and nothing else."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from support.basics import grid
from support.network import SMALL_WINDOW
from support.stack import request_of, until_quiet

from outrider.cli.local_stack import Stack, start_stack
from outrider.model_files.model_names import embedded_model
from outrider.process.children import RestartPolicy, Supervisor
from outrider.rpc.channels import open_channel
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.slow

REQUEST = {"text": "Once upon a time there was a miller who had", "seed": 3, "max_tokens": 600, "ignore_eos": True}
LOST = (pb.FALLBACK_REASON_DRAFT_LOST, pb.FALLBACK_REASON_DRAFT_ABSENT)
QUICK = RestartPolicy(first_s=0.05, longest_s=0.2)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[GenerationServiceStub, Supervisor]]:
    """The embedded pair as `outrider up` runs it, with a supervisor that restarts what dies; holds nothing at last."""
    reports: list[str] = []
    async with Supervisor(reports.append, lambda name, line: reports.append(f"{name}: {line}"), QUICK) as supervisor:
        addresses = await start_stack(supervisor, Stack(embedded_model("target"), embedded_model("draft")))
        watching = asyncio.create_task(supervisor.watch())
        try:
            async with open_channel(addresses.gateway, further=SMALL_WINDOW) as channel:
                yield GenerationServiceStub(channel), supervisor
            for address in (addresses.target, addresses.draft):
                assert address is not None
                async with open_channel(address) as channel:
                    await until_quiet(channel)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def tokens(stub: GenerationServiceStub, **fields: object) -> tuple[list[int], pb.SpeculationFigures]:
    """Tokens and figures of a request that nothing happens to."""
    said: list[int] = []
    async for message in stub.Generate(request_of(**REQUEST, **fields)):
        said += [token.token_id for token in message.round.tokens]
    return said, message.completion.speculation


@pytest.mark.parametrize("branches", [*grid("0"), "16"])
async def test_a_draft_killed_in_the_middle_of_a_round_is_not_noticed(
    branches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of plain decoding, no error is seen, and the same request speculates again afterwards."""
    monkeypatch.setenv("OUTRIDER_BRANCHES", branches)
    async with served() as (stub, supervisor):
        plain, _ = await tokens(stub, draft_count=0)
        said: list[int] = []
        rounds: list[pb.Round] = []
        async for message in stub.Generate(request_of(**REQUEST, draft_count=4)):
            said += [token.token_id for token in message.round.tokens]
            rounds.append(message.round)
            if len(rounds) == 3:
                os.kill(supervisor.pid("draft"), signal.SIGKILL)
        assert said == plain
        lost = next(index for index, each in enumerate(rounds) if each.facts.fallback_reason in LOST)
        assert message.completion.speculation.fallback_rounds > 0
        again, figures = await eventually_speculates(stub)
        assert again == plain
        assert figures.fallback_rounds == 0
        assert lost >= 3


async def eventually_speculates(stub: GenerationServiceStub) -> tuple[list[int], pb.SpeculationFigures]:
    """Asks until the draft is back from the first round to the last."""
    async with asyncio.timeout(60):
        while True:
            said, figures = await tokens(stub, draft_count=4)
            if figures.draft_tokens and not figures.fallback_rounds:
                return said, figures


@pytest.mark.parametrize("branches", ["0", *grid("16")])
async def test_a_frozen_draft_costs_one_deadline(branches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is stopped, not dead, misses its deadline; the request ends with the tokens of plain decoding."""
    monkeypatch.setenv("OUTRIDER_BRANCHES", branches)
    async with served() as (stub, supervisor):
        plain, _ = await tokens(stub, draft_count=0)
        said: list[int] = []
        reasons = set()
        count = 0
        pid = supervisor.pid("draft")
        try:
            async for message in stub.Generate(request_of(**REQUEST, draft_count=4)):
                said += [token.token_id for token in message.round.tokens]
                reasons.add(message.round.facts.fallback_reason)
                count += 1
                if count == 3:
                    os.kill(pid, signal.SIGSTOP)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert said == plain
        assert pb.FALLBACK_REASON_DRAFT_LATE in reasons
