"""SIGTERM to real services with running sessions: health first, then no new sessions, then the rest; exit code 0."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import PATIENCE_S, spec_of
from support.services.session_clients import DraftClient, TargetClient, channel_to

from outrider.errors import NotReady, PeerLost

MODELS = Path(__file__).resolve().parents[3] / "models"
SPEC = spec_of((0, 401, 913), 900, eos=())
CLIENTS: dict[str, Any] = {"draft": DraftClient, "target": TargetClient}
STATUS = health_pb2.HealthCheckResponse


@asynccontextmanager
async def running(role: str, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A service process and its address."""
    words = ("--model", str(MODELS / role), "--listen", "127.0.0.1:0", "--threads", "1", "--kv-tokens", "4096", *flags)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"{role}_service", *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, json.loads(line)["address"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def opened(role: str, channel: grpc.aio.Channel) -> Any:
    """A client whose session has its first answer."""
    client = CLIENTS[role](channel)
    await (client.open(SPEC, 2) if role == "draft" else client.open(SPEC))
    await client.read()
    return client


async def drained(process: asyncio.subprocess.Process, channel: grpc.aio.Channel) -> None:
    """Sends SIGTERM and waits until those who watch the health know of it."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == STATUS.SERVING
    process.send_signal(signal.SIGTERM)
    assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == STATUS.NOT_SERVING
    watch.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_drain_lets_running_sessions_end(role: str) -> None:
    """They go on as before; a new one is refused, beside them or on another link, and the process ends with the last,
    before its time.
    """
    async with running(role, "--drain-seconds", "600") as (process, address), channel_to(address) as channel:
        client = await opened(role, channel)
        await drained(process, channel)
        async with channel_to(address) as other:
            with pytest.raises(PeerLost, match="UNAVAILABLE"):
                await CLIENTS[role](other).read()
        late = client.beside()
        await (late.open(SPEC, 2) if role == "draft" else late.open(SPEC))
        with pytest.raises(NotReady, match="the service is stopping"):
            await late.read()
        for base_len in (4, 5, 6):
            await (client.advance(1, base_len, [9], 2) if role == "draft" else client.step(1, base_len))
            assert (await client.read()).fence.base_len == base_len
        await client.close(1)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_drain_ends(role: str) -> None:
    """A session that does not end by itself is cut off when the time is up, and the process ends well all the same."""
    async with running(role, "--drain-seconds", "0.2") as (process, address), channel_to(address) as channel:
        client = await opened(role, channel)
        await drained(process, channel)
        with pytest.raises(PeerLost):
            await client.read()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
