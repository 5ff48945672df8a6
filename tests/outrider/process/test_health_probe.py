"""The health probe against a real health service."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.process.health_probe import is_serving


@pytest.fixture
def service() -> Iterator[tuple[health.HealthServicer, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_follows_the_health_service(service: tuple[health.HealthServicer, str]) -> None:
    """SERVING is success, everything else is not."""
    servicer, address = service
    assert is_serving(address)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not is_serving(address)


def test_nobody_there() -> None:
    """An address without a server is not serving, and the command says so by its exit code."""
    ended = subprocess.run(
        [sys.executable, "-m", "outrider.process.health_probe", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 69
    assert ended.stderr == "127.0.0.1:1 is not serving.\n"


def test_success_is_exit_code_0(service: tuple[health.HealthServicer, str]) -> None:
    """The command line as a container calls it."""
    subprocess.run([sys.executable, "-m", "outrider.process.health_probe", service[1]], check=True)


def test_wrong_usage() -> None:
    """No address is wrong usage."""
    ended = subprocess.run([sys.executable, "-m", "outrider.process.health_probe"], capture_output=True, check=False)
    assert ended.returncode == 64
