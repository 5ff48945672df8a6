"""The health probe against a real health service."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from support.certificates import issue, shown_by

from outrider.process.health_probe import status_of
from outrider.rpc.channels import serve
from outrider.rpc.tls import TlsFiles


@pytest.fixture
def service() -> Iterator[tuple[health.HealthServicer, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def probe(*words: str) -> "subprocess.CompletedProcess[str]":
    """How the command ends, as a container calls it."""
    command = [sys.executable, "-m", "outrider.process.health_probe", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_follows_the_health_service(service: tuple[health.HealthServicer, str]) -> None:
    """SERVING is success, everything else is not."""
    servicer, address = service
    assert status_of(address) == "SERVING"
    assert probe(address).returncode == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert status_of(address) == "NOT_SERVING"
    assert probe(address).returncode == 69


@pytest.mark.slow
def test_any_answer_is_a_sign_of_life(service: tuple[health.HealthServicer, str]) -> None:
    """Who drains lives; who takes a connection and says nothing does not, nor who is not there."""
    servicer, address = service
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert probe("--live", address).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        assert probe("--live", f"127.0.0.1:{hangs.getsockname()[1]}").returncode == 69
    assert probe("--live", "127.0.0.1:1").returncode == 69


@pytest.mark.slow
async def test_a_refused_certificate_is_a_sign_of_life_too(tmp_path: Path) -> None:
    """One that has expired ends no process; but where no process answers, a certificate makes no difference."""
    certificates = issue(tmp_path, "target")
    shown = shown_by(certificates, "target")
    words = (shown.ca, shown.cert, shown.key)
    server = await serve("127.0.0.1:0", {}, tls=TlsFiles(shown))
    assert (await asyncio.to_thread(probe, "--live", server.address, shown.ca)).returncode == 0
    refused = await asyncio.to_thread(probe, server.address, shown.ca)
    assert refused.returncode == 69
    assert "lets nobody in without a certificate" in refused.stderr
    await server.stop(0)
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        address = f"127.0.0.1:{hangs.getsockname()[1]}"
        assert (await asyncio.to_thread(probe, "--live", address, *words)).returncode == 69


def test_nobody_there() -> None:
    """An address without a server is not serving, and the command says so by its exit code."""
    ended = probe("127.0.0.1:1")
    assert ended.returncode == 69
    assert ended.stderr == "127.0.0.1:1 is not serving.\n"


def test_wrong_usage() -> None:
    """No address is wrong usage."""
    assert probe().returncode == 64
    assert probe("--live").returncode == 64
