"""How a service ends whose device does not answer, in this process and in its own."""

import asyncio
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.basics import PATIENCE_S, check_empty, eventually, spec_of
from support.models.tiny_models import PROMPT, SETTINGS
from support.services.session_clients import TargetClient, channel_to

from outrider.engine.models import decoder
from outrider.errors import InvalidRequest, OutriderError
from outrider.model_service import server
from outrider.model_service.server import DEVICE_PATIENCE_S, load_model
from outrider.process.children import QUIET_GRPC, STOP_GRACE_S
from outrider.process.progress import FITTING, FileProgress
from outrider.rpc.channels import DRAIN_S, AddressTaken
from target_service.server import start

# Else a line of gRPC's own may stand beside those that are looked at.
QUIET = os.environ | QUIET_GRPC

ROOT = Path(__file__).resolve().parents[3]


def test_a_supervisor_waits_longer() -> None:
    """It kills only what does not end by itself, stuck device or not."""
    assert DRAIN_S + DEVICE_PATIENCE_S < STOP_GRACE_S


@pytest.mark.parametrize("num_sessions", [0, 1])
async def test_whoever_stops_a_stuck_device_gets_control_back(
    monkeypatch: pytest.MonkeyPatch, num_sessions: int
) -> None:
    """With a session that waits for the device, or without; when it answers again, the stop can be completed."""
    monkeypatch.setattr(server, "DEVICE_PATIENCE_S", 0.05)
    running = await start(replace(SETTINGS, kv_tokens=512))
    gate = threading.Event()
    async with channel_to(running.address) as channel:
        for _ in range(num_sessions):
            client = TargetClient(channel)
            await client.open(spec_of(PROMPT, 60, eos=()))
            await client.verdict()
        running.worker.post(lambda: gate.wait(PATIENCE_S) and None)
        with pytest.raises(OutriderError, match="the device has not answered"):
            await asyncio.wait_for(running.stop(0.05), PATIENCE_S)
        gate.set()
        await asyncio.wait_for(running.stop(PATIENCE_S), PATIENCE_S)
    check_empty(running.runner.pool)


async def test_a_taken_address_for_metrics_ends_the_start() -> None:
    """The device thread that was there already ends with it; a service that serves says where its metrics are."""
    running = await start(replace(SETTINGS, kv_tokens=512, metrics_listen="127.0.0.1:0"))
    try:
        taken, before = running.further_addresses["metrics"], set(threading.enumerate())
        with pytest.raises(AddressTaken, match=taken):
            await start(replace(SETTINGS, kv_tokens=512, metrics_listen=taken))
        await eventually(lambda: "target device" not in {each.name for each in {*threading.enumerate()} - before})
    finally:
        await running.stop(0)


STUCK = """
import threading
from outrider.engine.models import decoder
from outrider.model_service import server
from outrider.process.options import run_app
from target_service.__main__ import app
from target_service.verifier import Verifier

Verifier.advance = lambda self, tasks: threading.Event().wait()
server.DEVICE_PATIENCE_S = 0.2
run_app(app)
"""
FLAGS = ("--listen", "127.0.0.1:0", "--kv-tokens", "512", "--drain-seconds", "0.1", "--log-level", "error")


@pytest.mark.slow
async def test_sigterm_ends_a_process_with_a_stuck_device() -> None:
    """Not at the watchdog's limit, but soon after the grace: one line is logged, and the exit code is 70."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", STUCK, "--model", str(ROOT / "models" / "target"), *FLAGS)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=ROOT, env=QUIET)
    try:
        assert process.stdout is not None
        address = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))["address"]
        async with channel_to(address) as channel:
            client = TargetClient(channel)

            async def is_stuck() -> bool:
                return (await client.info()).stalled_us >= 100_000

            await client.open(spec_of(PROMPT))
            await eventually(is_stuck)
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 70
        [line] = errors.decode().splitlines()
        assert "the device has not answered" in line
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_context_beyond_the_model_s_is_refused_by_its_option() -> None:
    """With what the model reads, before a weight is loaded."""
    with pytest.raises(
        InvalidRequest, match=r"^--context-len is 4097, but must be in \[1, 4096\], which is what target"
    ):
        load_model(replace(SETTINGS, context_len=4097))


def test_what_the_cache_takes_is_in_the_log_with_its_reason() -> None:
    """As `outrider up` shows it."""
    with capture_logs() as lines:
        load_model(replace(SETTINGS, kv_tokens=None, context_len=100))
    found = [FileProgress.of(line) for line in lines if line["event"] == FITTING]
    [said] = [each.sentence for each in found if each is not None]
    assert said.startswith("fitting the cache: 87,376 tokens in 512 MiB, room for a whole context of 100")


@pytest.mark.parametrize("flag", ["--kv-tokens", "--context-len"])
def test_a_cache_that_does_not_fit_is_refused_by_its_option(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """With the value and the most that there is room for: a token takes 6 KiB."""
    monkeypatch.setattr(decoder, "available_bytes", lambda: 2000 * 6144)
    asked = {flag[2:].replace("-", "_"): 2001}
    with pytest.raises(InvalidRequest, match=f"{flag} is 2001, but must be at most 2000 here: a token takes 6 KiB"):
        load_model(replace(SETTINGS, **{"kv_tokens": None} | asked))  # type: ignore[arg-type] - numbers
