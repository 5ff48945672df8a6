"""Pings over real streams of the target service: answered at once, whatever the device does, and without an effect."""

import asyncio
import threading

import grpc
import pytest
from support.basics import PATIENCE_S, spec_of
from support.session_clients import TargetClient
from support.tiny_models import PROMPT

from outrider.errors import InvalidRequest
from outrider.model_service.server import RunningModelService
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb


def ping(client: TargetClient, epoch: int, base_len: int) -> target_pb.VerifyRequest:
    """A ping of the client's session."""
    return target_pb.VerifyRequest(fence=client.fence(epoch, base_len), ping=pb.Ping())


async def test_a_pong_does_not_wait_for_the_device(client: TargetClient, service: RunningModelService) -> None:
    """It comes while a job holds the device, with the ping's fence and the incarnation; the session is as before."""
    await client.open(spec_of(PROMPT))
    await client.verdict()
    gate, entered = threading.Event(), threading.Event()
    blocked = service.worker.call(lambda: (entered.set(), gate.wait(PATIENCE_S)))
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    await client.step(1, 7)
    # Neither the epoch nor the length of a ping means anything to the session.
    await client.send(ping(client, 9, 300))
    response = await client.read()
    fence = client.fence(9, 300)
    fence.instance_id = service.facts.instance_id
    assert response == target_pb.VerifyResponse(fence=fence, pong=pb.Pong())
    assert not gate.is_set()
    gate.set()
    await blocked
    assert (await client.verdict())[0] == 7
    await client.close(1)


async def test_a_ping_comes_after_the_open(client: TargetClient) -> None:
    """Like every other message but the open."""
    await client.send(ping(client, 1, 1))
    with pytest.raises(InvalidRequest, match="action is 'ping', but must be open"):
        await client.read()
    assert await client.call.code() == grpc.StatusCode.INVALID_ARGUMENT
