"""When a device is given up, with a clock that goes on only when the watchdog sleeps."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import PATIENCE_S, spec_of
from support.services.session_clients import TargetClient, channel_to

from outrider.model_service.watchdog import LAST_WORDS_S, watch
from outrider.process.children import QUIET_GRPC

# Else a line of gRPC's own may stand beside those that are looked at.
QUIET = os.environ | QUIET_GRPC

ROOT = Path(__file__).resolve().parents[3]
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Life:
    """What happened when; `stalled_s` says for how long the device has stalled at a time."""

    stalled_s: Callable[[float], float]
    now_s: float = 0.0
    diary: list[tuple[float, object]] = field(default_factory=list)

    async def sleep(self, delay_s: float) -> None:
        """Lets time pass."""
        self.now_s += delay_s

    async def say_unwell(self) -> None:
        """Remembers that it was called."""
        self.diary.append((self.now_s, "unwell"))

    def end(self, code: int) -> None:
        """Remembers the code."""
        self.diary.append((self.now_s, code))

    async def watch(self, limit_s: float) -> list[tuple[float, object]]:
        """The diary of a watchdog over this device."""
        await watch(lambda: int(self.stalled_s(self.now_s) * 1e6), limit_s, self.say_unwell, self.end, self.sleep)
        return self.diary


@pytest.mark.parametrize(
    ("stalled_s", "given_up_s"),
    [
        (lambda now_s: now_s, 10.0),
        (lambda now_s: max(0.0, now_s - 3.0), 13.0),
        (lambda now_s: now_s if now_s < 9.0 else max(0.0, now_s - 42.5), 52.5),
        (lambda now_s: now_s % 8.0 if now_s < 80.0 else now_s - 80.0, 90.0),
    ],
)
async def test_a_stall_is_noticed_at_its_limit(stalled_s: Callable[[float], float], given_up_s: float) -> None:
    """Whenever it begins, and however often the device was slow before; then health turns red, and the process ends."""
    assert await Life(stalled_s).watch(10.0) == [(given_up_s, "unwell"), (given_up_s + LAST_WORDS_S, 70)]


STUCK = """
import sys, threading
from outrider.process.run import run_service
from target_service import server
from target_service.verifier import Verifier

Verifier.advance = lambda self, tasks: threading.Event().wait()
settings = server.TargetSettings(
    sys.argv[1], "127.0.0.1:0", threads=1, kv_tokens=1024, stall_seconds=0.3, log_level="error"
)
run_service("target", server.start, settings)
"""


async def begun(script: str) -> asyncio.subprocess.Process:
    """A process that runs a script with the embedded target."""
    pipe, target = asyncio.subprocess.PIPE, str(ROOT / "models" / "target")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, target, stdout=pipe, stderr=pipe, cwd=ROOT, env=QUIET
    )


@pytest.mark.slow
async def test_a_stuck_device_ends_its_process() -> None:
    """A device thread that really hangs: health turns red under every name, one line is logged, the exit code is 70."""
    process = await begun(STUCK)
    try:
        assert process.stdout is not None
        address = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))["address"]
        async with channel_to(address) as channel:
            watches = [_watch(channel, name) for name in ("", "outrider.v1.TargetService", "outrider.v1.ModelService")]
            client = TargetClient(channel)
            await client.open(spec_of((5, 6, 7)))
            for watch in watches:
                async with asyncio.timeout(PATIENCE_S):
                    while (await watch.read()).status != NOT_SERVING:
                        pass
            assert (await client.info()).stalled_us >= 300_000
            _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 70
        [line] = errors.decode().splitlines()
        assert "the device has stalled" in line
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


DEAD = STUCK.replace(
    "Verifier.advance = lambda self, tasks: threading.Event().wait()",
    "from outrider.model_service.outbox import Outboxes\nOutboxes.flush = lambda self: sys.exit()",
).replace("stall_seconds=0.3", "stall_seconds=1000")


@pytest.mark.slow
async def test_a_dead_device_thread_ends_its_process() -> None:
    """Nothing would be answered any more; the log says why, and the exit code is 70, long before a stall's limit."""
    process = await begun(DEAD)
    assert process.stdout is not None
    address = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))["address"]
    async with channel_to(address) as channel:
        await TargetClient(channel).open(spec_of((5, 6, 7)))
        _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 70
    assert [json.loads(line)["event"] for line in errors.decode().splitlines()] == [
        "the device thread has died",
        "the device has stalled",
    ]


async def test_a_device_is_given_up_though_nobody_can_be_told() -> None:
    """Whatever keeps health from turning red."""

    class Mute(Life):
        async def say_unwell(self) -> None:
            raise RuntimeError("a bug")

    assert await Mute(lambda now_s: now_s).watch(10.0) == [(10.0 + LAST_WORDS_S, 70)]


def _watch(channel: grpc.aio.Channel, name: str) -> "grpc.aio.UnaryStreamCall":
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
