"""A stack as `outrider up` keeps it alive: who answers is left alone, and who hangs is replaced in mid-stream."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from support.network import SMALL_WINDOW
from support.stack import DRAFT, TARGET, request_of

from outrider.cli.local_stack import Addresses, Stack, start_stack
from outrider.cli.up import BUDGET_FLAG, LOAD_S, outlasting
from outrider.process import children
from outrider.process.children import RestartPolicy, Supervisor, metrics_miss
from outrider.rpc.channels import open_channel
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

QUICK = RestartPolicy(first_s=0.05, longest_s=0.2, ask_every_s=0.05, answer_s=1.0)
REQUEST = {"text": "Once upon a time there was a miller who had", "seed": 3, "max_tokens": 400, "ignore_eos": True}


@asynccontextmanager
async def kept_alive(
    stack: Stack, policy: RestartPolicy
) -> AsyncIterator[tuple[Addresses, Supervisor, "asyncio.Task[None]"]]:
    """A running stack, who watches over it, and the watch."""
    async with Supervisor(lambda _sentence: None, lambda _name, _line: None, policy) as supervisor:
        addresses = await start_stack(supervisor, outlasting(policy, stack))
        watching = asyncio.create_task(supervisor.watch())
        try:
            yield addresses, supervisor, watching
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


@pytest.mark.slow
async def test_a_gateway_of_several_workers_lives_through_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file of keys too: it answers on a port of its own whether it hangs, and nothing is replaced."""
    answers: list[bool] = []
    asked_often = asyncio.Event()

    async def counted(address: str, answer_s: float) -> bool:
        answers.append(await metrics_miss(address, answer_s))
        if len(answers) == 3:
            asked_often.set()
        return answers[-1]

    monkeypatch.setattr(children, "metrics_miss", counted)
    policy = replace(QUICK, answer_s=60.0)
    async with kept_alive(Stack(TARGET, None, rest_port=0, workers=2), policy) as (_, supervisor, watching):
        pid, asked = supervisor.pid("gateway"), asyncio.create_task(asked_often.wait())
        await asyncio.wait({asked, watching}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        assert not watching.done()
        assert (answers[:3], supervisor.pid("gateway")) == ([False] * 3, pid)


@pytest.mark.slow
async def test_a_stream_whose_target_freezes_goes_on_when_it_was_replaced() -> None:
    """It waits as long as that takes, and says the tokens that it says without a fault."""
    async with kept_alive(Stack(TARGET, DRAFT), QUICK) as (addresses, supervisor, _):
        frozen = supervisor.pid("target")
        async with open_channel(addresses.gateway, further=SMALL_WINDOW) as channel:
            generate = GenerationServiceStub(channel).Generate
            undisturbed = [message async for message in generate(request_of(**REQUEST))]
            said = []
            # What was said before would be guessed, and accepted, at once.
            async for message in generate(request_of(**REQUEST, draft_count=4)):
                said.append(message)
                if len(said) == 3:
                    os.kill(frozen, signal.SIGSTOP)
        assert supervisor.pid("target") != frozen
    first, second = (
        [token.token_id for message in messages for token in message.round.tokens] for messages in (undisturbed, said)
    )
    assert second == first
    assert said[-1].completion.survival.target_reopens > 0


def test_requests_outlast_the_replacement_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers of the policy that replaces it, with time to load; what the operator says comes first."""
    monkeypatch.delenv("OUTRIDER_REBUILD_BUDGET_SECONDS", raising=False)
    policy = RestartPolicy()
    longest_s = policy.ask_every_s + policy.max_misses * policy.answer_s + policy.longest_s
    assert outlasting(policy, Stack(TARGET, None)).gateway_flags == {BUDGET_FLAG: longest_s + LOAD_S}
    slower = replace(policy, answer_s=100.0)
    assert outlasting(slower, Stack(TARGET, None)).gateway_flags == {BUDGET_FLAG: longest_s + 3 * 90.0 + LOAD_S}
    monkeypatch.setenv("OUTRIDER_REBUILD_BUDGET_SECONDS", "7")
    assert outlasting(policy, Stack(TARGET, None)).gateway_flags == {}
