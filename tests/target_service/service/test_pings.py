"""Pings over a real link of the target service: answered at once, whatever the device does, and without an effect."""

import asyncio
import threading

import pytest
from support.basics import PATIENCE_S, spec_of
from support.models.tiny_models import PROMPT
from support.services.session_clients import TargetClient

from outrider.errors import InvalidRequest
from outrider.model_service.server import RunningModelService
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb


async def test_a_pong_does_not_wait_for_the_device(client: TargetClient, service: RunningModelService) -> None:
    """It comes while a job holds the device, with the ping's fence and the incarnation; the session is as before."""
    await client.open(spec_of(PROMPT))
    await client.verdict()
    gate, entered = threading.Event(), threading.Event()
    blocked = service.worker.call(lambda: (entered.set(), gate.wait(PATIENCE_S)))
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    await client.step(1, 7)
    # Neither the epoch nor the length of a ping means anything to the session.
    await client.ping(9, 300)
    frame = await client.link.frame()
    assert frame.instance_id == service.facts.instance_id
    assert list(frame.responses) == [target_pb.VerifyResponse(fence=client.fence(9, 300), pong=pb.Pong())]
    assert not gate.is_set()
    gate.set()
    await blocked
    assert (await client.verdict())[0] == 7
    await client.close(1)


async def test_a_ping_needs_no_session(client: TargetClient) -> None:
    """It measures the way and not a session; only its fence has to be one."""
    await client.ping(1, 1)
    assert (await client.read()).HasField("pong")
    await client.ping(0, 1)
    with pytest.raises(InvalidRequest, match=r"fence\.epoch is 0, but must be at least 1"):
        await client.read()
    await client.ping(1, 1)
    assert (await client.read()).HasField("pong")
    assert (await client.info()).session_count == 0
