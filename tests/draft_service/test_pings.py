"""Pings over a real link of the draft service."""

from pathlib import Path

from support.basics import spec_of
from support.services.session_clients import DraftClient, channel_to

from draft_service.server import DraftSettings, start
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import types_pb2 as pb


async def test_a_ping_is_answered_with_its_fence(folder: Path) -> None:
    """And with nothing else; the session guesses on as if there had been none."""
    running = await start(DraftSettings(str(folder), "127.0.0.1:0", dtype="float32", threads=1, kv_tokens=256))
    async with channel_to(running.address) as channel:
        client = DraftClient(channel)
        await client.open(spec_of((5, 6, 7), eos=()), 2)
        assert len(await client.guesses()) == 2
        await client.ping(1, 3)
        frame = await client.link.frame()
        assert frame.instance_id == running.facts.instance_id
        assert list(frame.responses) == [draft_pb.ProposeResponse(fence=client.fence(1, 3), pong=pb.Pong())]
        await client.advance(1, 4, [9], 3)
        assert len(await client.guesses()) == 3
        await client.close(1)
    await running.stop(0)
