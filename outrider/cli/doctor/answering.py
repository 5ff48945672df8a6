"""Who answers on an address: a service of ours of which role, something else, or nobody. Judges nothing."""

import asyncio
import http.client
import json
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.model_facts import model_facts
from outrider.errors import OutriderError
from outrider.rpc.channels import open_channel

TIMEOUT_S = 3.0
GENERATION_SERVICE = "outrider.v1.GenerationService"
# Other servers of models have /version and /v1/models too.
STATUS_PATH = "/api/status"
SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"
MAX_BODY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answerer:
    """Who answers; `role` is gateway, target, draft, rest, or "other" for a program that is not ours."""

    role: str
    detail: str = ""


async def is_open(address: str) -> bool:
    """Whether anybody takes a connection there."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return False
    writer.close()
    return True


async def who_answers(address: str) -> Answerer | None:
    """Who is there; None for nobody."""
    if not await is_open(address):
        return None
    status = await asyncio.to_thread(rest_json, address, STATUS_PATH)
    if status is not None and "gateway" in status:
        return Answerer("rest")
    health = await generation_status(address)
    if health is not None:
        return Answerer("gateway", health)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            facts = await model_facts(address)
    except (OutriderError, TimeoutError):
        return Answerer("other")
    return Answerer(facts.role, facts.model)


async def generation_status(address: str) -> str | None:
    """What the health service of a gateway says about generation; None where there is no gateway."""
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    return SERVING if answer.status == health_pb2.HealthCheckResponse.SERVING else NOT_SERVING


def rest_json(address: str, path: str) -> dict[str, Any] | None:
    """The JSON object that HTTP GET gives, None for any other answer. Blocks for at most some seconds."""
    found = rest_text(address, path)
    try:
        value = json.loads(found) if found else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def rest_text(address: str, path: str, most_bytes: int = MAX_BODY_BYTES) -> str | None:
    """The body of a successful HTTP GET, None for any other answer. Blocks for at most some seconds."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(most_bytes)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body.decode(errors="replace") if response.status == 200 else None
