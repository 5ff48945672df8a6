"""`outrider up --json` with the real services: its lines from the first start to the last stop."""

import asyncio
import json
import os
import signal
import sys
from typing import Any

from outrider.cli.doctor.answering import rest_text

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "up", "--json", "--no-draft")
FREE_PORTS = ("--port", "0", "--rest-port", "0", "--target-port", "0")
READY_S, END_S = 120.0, 60.0


async def test_a_life_in_lines() -> None:
    """Starting, serving with all addresses, a killed gateway that comes back, and everything stopped on SIGTERM."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *FREE_PORTS, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    output = process.stdout

    async def until(name: str) -> dict[str, Any]:
        """Reads to the next event of this name."""
        while True:
            event: dict[str, Any] = json.loads(await asyncio.wait_for(output.readline(), READY_S))
            if event["event"] == name:
                return event

    try:
        assert (await until("starting"))["service"] == "target"
        serving = await until("serving")
        assert serving["models"] == {"target": "target"}
        assert serving["page"] == f"http://{serving['rest']}/"
        assert serving["metrics"]["gateway"] == serving["rest"]
        scraped = await asyncio.to_thread(rest_text, serving["metrics"]["target"], "/metrics", 1 << 20)
        assert "outrider_kv_blocks" in (scraped or "")
        os.kill(serving["pids"]["target"], signal.SIGKILL)
        back = await until("restarted")
        assert (back["service"], back["metrics"]) == ("target", serving["metrics"]["target"])
        os.kill(serving["pids"]["gateway"], signal.SIGKILL)
        assert (await until("died"))["ending"] == "was ended by signal 9"
        back = await until("restarted")
        assert (back["service"], back["address"]) == ("gateway", serving["gateway"])
        assert back["pid"] != serving["pids"]["gateway"]
        assert (back["rest"], back["metrics"]) == (serving["rest"], serving["rest"])
        process.send_signal(signal.SIGTERM)
        assert [(await until("stopped"))["service"] for _ in range(2)] == ["gateway", "target"]
        assert await asyncio.wait_for(process.wait(), END_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
