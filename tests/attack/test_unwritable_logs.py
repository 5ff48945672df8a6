"""The hostile side beside streams of a stack whose logs cannot be written: no token is lost, and nothing is a 5xx."""

import asyncio
import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
import pytest
from attack.attackers import Tally, post_bodies
from attack.streams import IS_LONG, NUM_MESSAGES, Streams
from attack.test_attack import NUM_BODIES, REST, attacks
from support.basics import eventually
from support.stack import DRAFT, TARGET

from outrider.cli.local_stack import Stack, start_stack
from outrider.process.children import Launch, Supervisor
from outrider.process.metrics import scraped

# How the log of each process cannot be written: a full disk, a reader that is gone, one that does not read.
LINES = {
    "gateway": '2>/dev/full exec "$@"',
    "target": 'exec 2> >(exec 0<&-; exec true); wait $!; exec "$@"',
    "draft": 'mkfifo "$FOLDER/pipe"; exec 3<>"$FOLDER/pipe"; 2>"$FOLDER/pipe" exec "$@"',
}
LOST = "outrider_lost_lines_total"


class Unheard(Supervisor):
    """Starts services so."""

    async def start(self, *launches: Launch) -> list[str]:
        """Starts services like any supervisor, with every line of theirs at `debug`."""
        return await super().start(*map(self._unheard, launches))

    def _unheard(self, launch: Launch) -> Launch:
        words = [*launch.command[:-1], "debug"]
        return replace(launch, command=("bash", "-c", f"rm -f $FOLDER/pipe; {LINES[launch.name]}", "bash", *words))


@pytest.mark.slow
async def test_nobody_suffers_where_nothing_can_be_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams say what they said before, also those whose target is killed under them, and lost lines are counted."""
    monkeypatch.setenv("FOLDER", str(tmp_path))
    loop, pool = asyncio.get_running_loop(), ProcessPoolExecutor(1, get_context("spawn"))
    async with Unheard(lambda _: None, lambda _name, _line: None) as supervisor:
        addresses = await start_stack(supervisor, Stack(TARGET, DRAFT, rest_port=0))
        watching = asyncio.create_task(supervisor.watch())
        sendings = await attacks(addresses)
        # The short attack of the other test has sent to every method.
        names = [name for name in sendings if IS_LONG or name == REST or "GenerationService" in name]

        async def attack(name: str) -> Tally:
            count = NUM_BODIES if name == REST else NUM_MESSAGES
            return await loop.run_in_executor(pool, sendings[name](count))

        async with Streams(addresses) as streams, streams.running():
            tallies = [await attack(name) for name in names]
            await streams.listened(1)
            target = supervisor.pid("target")
            os.kill(target, signal.SIGKILL)
            await eventually(lambda: supervisor.pid("target") != target)
            async with httpx.AsyncClient(trust_env=False) as http:
                document = (await http.get(f"http://{addresses.rest}/openapi.json")).json()
            tallies.append(await loop.run_in_executor(pool, partial(post_bodies, str(addresses.rest), document, 50, 7)))
            await streams.listened(1)
        text = (await asyncio.to_thread(scraped, addresses.metrics["gateway"], [LOST]))[0].decode()
        [count] = (float(line.split()[1]) for line in text.splitlines() if line.startswith(LOST))
        assert count > NUM_BODIES
        watching.cancel()
        await asyncio.wait({watching})
    pool.shutdown()
    faults = [fault for tally in tallies for fault in tally.faults]
    assert not faults, json.dumps(faults[:10], indent=1)
