"""Processes whose logs cannot be written: a full disk, no reader, a reader that does not read. It is no outage."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from faults.service import KV_TOKENS, MODELS, Process, launch_of
from support.basics import eventually

from outrider.process.children import Launch
from outrider.process.metrics import scraped

FULL = '2>/dev/full exec "$@"'
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 16, "seed": 3, "temperature": 0.8}


def redirected(launch: Launch, line: str) -> Launch:
    """A launch with its streams as a line of a shell makes them, in which it is "$@"."""
    return replace(launch, command=("bash", "-c", line, "bash", *launch.command))


@dataclass
class World:
    """A gateway whose log cannot be written, and a target whose log cannot either."""

    target: Process
    gateway: Process
    rest: str
    metrics: str
    http: httpx.AsyncClient

    async def says(self) -> str:
        """What a request says."""
        reply = await self.http.post("/v1/completions", json=BODY)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    async def ready(self) -> tuple[int, list[str]]:
        """Status, and what is failing."""
        reply = await self.http.get("/ready")
        return reply.status_code, reply.json().get("failing", [])

    async def lost(self) -> float:
        """Lines of the gateway's log that were lost."""
        text = (await asyncio.to_thread(scraped, self.metrics, ["outrider_lost_lines_total"]))[0].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if not line.startswith("#"))


@asynccontextmanager
async def world(line: str, *flags: str) -> AsyncIterator[World]:
    """All of it; an exporter of traces has nowhere to send them, and complains."""
    async with AsyncExitStack() as life:
        target_launch = launch_of("target_service", model=MODELS["target"], threads=1, kv_tokens=KV_TOKENS)
        target = await life.enter_async_context(Process(redirected(target_launch, FULL)))
        launch = launch_of("gateway", target=target.address, tokenizer=MODELS["target"], lookup_memory_tokens=0)
        launch = replace(launch, command=(*launch.command, "--log-level", "debug", *flags))
        launch = replace(launch, further={"rest": "127.0.0.1:0", "metrics": "127.0.0.1:0"})
        launch = replace(launch, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
        gateway = await life.enter_async_context(Process(redirected(launch, line)))
        assert gateway._process is not None
        places = gateway._process.launch.further
        http = await life.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{places['rest']}", timeout=120, trust_env=False)
        )
        yield World(target, gateway, places["rest"], places["metrics"], http)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [FULL, 'exec 2> >(exec 0<&-; exec true); wait $!; exec "$@"'],
    ids=["full disk", "no reader"],
)
async def test_a_target_comes_back_though_nothing_can_be_logged(line: str) -> None:
    """Requests are answered, a target that dies is missed and found again, and all of that is counted as lost lines."""
    async with world(line) as here:
        said = await here.says()
        await here.target.kill()

        async def is_(status: int) -> bool:
            return await here.ready() == (status, [])

        await eventually(lambda: is_(503))
        await here.target.launch(here.target.address)
        await eventually(lambda: is_(200))
        assert await here.says() == said
        assert await here.lost() > 5


@pytest.mark.slow
async def test_a_reader_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    """Far more than a pipe takes: what has no room is lost, and the requests are answered."""
    pipe = tmp_path / "pipe"
    # Somebody holds the other end, and reads nothing.
    async with world(f'mkfifo {pipe}; exec 3<>{pipe}; 2>{pipe} exec "$@"') as here:
        said = await here.says()

        async def is_losing() -> bool:
            texts = await asyncio.gather(*(here.says() for _ in range(8)))
            assert texts == [said] * 8
            await asyncio.gather(*(here.http.post("/v1/completions", content="{") for _ in range(400)))
            return await here.lost() > 0

        await eventually(is_losing)
        assert await here.ready() == (200, [])
