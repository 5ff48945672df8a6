"""Health follows the targets: a gateway without any takes no new clients, though requests that run wait for one.

Knows no requests. A missing draft changes nothing, because it only makes answers slower.
"""

import asyncio

import structlog
from grpc_health.v1 import health, health_pb2

from gateway.replicas import Replicas

READINESS_LOOK_S = 0.25

log = structlog.get_logger()


async def report_readiness(target: Replicas, servicer: health.aio.HealthServicer, names: tuple[str, ...]) -> None:
    """Keeps the health of the named services at SERVING while a target is there, until it is cancelled."""
    was_ready = True
    while True:
        is_ready = target.info is not None
        if is_ready != was_ready:
            log.warning("readiness changed", ready=is_ready)
            statuses = health_pb2.HealthCheckResponse
            for name in names:
                await servicer.set(name, statuses.SERVING if is_ready else statuses.NOT_SERVING)
        was_ready = is_ready
        await asyncio.sleep(READINESS_LOOK_S)
