"""Pings over a real stream of the draft service."""

from pathlib import Path

from support.basics import spec_of
from support.session_clients import DraftClient, channel_to

from draft_service.server import start
from outrider.model_service_flags import ModelServiceSettings
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import types_pb2 as pb


async def test_a_ping_is_answered_with_its_fence(folder: Path) -> None:
    """And with nothing else; the session guesses on as if there had been none."""
    running = await start(ModelServiceSettings(str(folder), dtype="float32", kv_tokens=256))
    async with channel_to(running.address) as channel:
        client = DraftClient(channel)
        await client.open(spec_of((5, 6, 7), eos=()), 2)
        assert len(await client.guesses()) == 2
        await client.send(draft_pb.ProposeRequest(fence=client.fence(1, 3), ping=pb.Ping()))
        fence = client.fence(1, 3)
        fence.instance_id = running.facts.instance_id
        assert await client.read() == draft_pb.ProposeResponse(fence=fence, pong=pb.Pong())
        await client.advance(1, 4, [9], 3)
        assert len(await client.guesses()) == 3
        await client.close(1)
    await running.stop(0)
