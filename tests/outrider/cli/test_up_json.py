"""`outrider up --json` with the real services: its lines from the first start to the last stop."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from outrider.cli.doctor.checks import rest_text

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "up", "--json", "--no-draft")
FREE_PORTS = ("--port", "0", "--rest-port", "0", "--target-port", "0")
READY_S, END_S = 120.0, 60.0


@dataclass
class Life:
    """A running command, whose lines are read one by one."""

    process: asyncio.subprocess.Process

    async def until(self, name: str) -> dict[str, Any]:
        """Reads to the next event of this name."""
        assert self.process.stdout is not None
        while True:
            event: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), READY_S))
            if event["event"] == name:
                return event


@asynccontextmanager
async def living() -> AsyncIterator[Life]:
    """The command while it runs; whatever happens, it does not outlive the test."""
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*COMMAND, *FREE_PORTS, stdout=pipe, stderr=nothing)
    try:
        yield Life(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def check_addresses(serving: dict[str, Any]) -> None:
    """The page and the metrics are where REST is answered, and the target's metrics can be scraped."""
    assert serving["models"] == {"target": "target"}
    assert serving["page"] == f"http://{serving['rest']}/"
    assert serving["metrics"]["gateway"] == serving["rest"]
    scraped = await asyncio.to_thread(rest_text, serving["metrics"]["target"], "/metrics", 1 << 20)
    assert "outrider_kv_blocks" in (scraped or "")


async def test_a_life_in_lines() -> None:
    """Starting, serving with all addresses, a killed gateway that comes back, and everything stopped on SIGTERM."""
    async with living() as life:
        until = life.until
        assert (await until("starting"))["service"] == "target"
        serving = await until("serving")
        await check_addresses(serving)
        os.kill(serving["pids"]["target"], signal.SIGKILL)
        back = await until("restarted")
        assert (back["service"], back["metrics"]) == ("target", serving["metrics"]["target"])
        os.kill(serving["pids"]["gateway"], signal.SIGKILL)
        assert (await until("died"))["ending"] == "was ended by signal 9"
        back = await until("restarted")
        assert (back["service"], back["address"]) == ("gateway", serving["gateway"])
        assert back["pid"] != serving["pids"]["gateway"]
        assert (back["rest"], back["metrics"]) == (serving["rest"], serving["rest"])
        life.process.send_signal(signal.SIGTERM)
        assert [(await until("stopped"))["service"] for _ in range(2)] == ["gateway", "target"]
        assert await asyncio.wait_for(life.process.wait(), END_S) == 0
