"""Which drafter an open may name: one that the service offers, or none."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from helpers import spec_of
from session_clients import DraftClient, channel_to
from tiny_models import write_tiny_model

from draft_service.server import start
from outrider import wire
from outrider.errors import InvalidRequest
from outrider.model_service_flags import ModelServiceSettings
from outrider.v1 import draft_service_pb2 as draft_pb

SPEC = spec_of((1, 2, 3), 40, eos=())


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[DraftClient]:
    folder = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=257)
    running = await start(ModelServiceSettings(str(folder), dtype="float32", kv_tokens=64))
    async with channel_to(running.address) as channel:
        yield DraftClient(channel, os.urandom(16))
    await running.stop(0)


async def open_with(client: DraftClient, drafter: str) -> None:
    """Opens a session with two guesses wanted from a drafter."""
    session = wire.open_message(SPEC, SPEC.token_ids)
    opening = draft_pb.DraftOpen(session=session, draft_count=2, drafter=drafter)
    await client.send(draft_pb.ProposeRequest(fence=client.fence(1, 3), open=opening))


@pytest.mark.parametrize("drafter", ["", "model"])
async def test_a_drafter_on_offer_guesses(client: DraftClient, drafter: str) -> None:
    """An empty name leaves the choice to the service."""
    await open_with(client, drafter)
    assert len(await client.guesses()) == 2
    await client.close(1)


async def test_a_drafter_that_is_not_on_offer_is_refused(client: DraftClient) -> None:
    """Field, value and the names that there are; no session is left."""
    await open_with(client, "oracle")
    with pytest.raises(InvalidRequest, match=r"open\.drafter is 'oracle', but must be one of model, or empty"):
        await client.read()
    assert (await client.info()).session_count == 0
