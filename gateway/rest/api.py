"""What the page calls: /api/generate, a stream of typed events, and /api/status. Decides nothing about a request.

The events are `opened`, `round`, `completion` and `error`, one JSON object each; docs/page.md has their fields. /v1 has
no such events, because clients of OpenAI take every event for a chunk.
"""

import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.generation.frontend import Frontend
from gateway.generation.generate import Event, RoundEvent
from gateway.generation.request import GenerationRequest
from gateway.rest.api_body import ask_from
from gateway.rest.api_events import completion_view, error_view, opened, round_view
from gateway.rest.api_status import status_view
from gateway.rest.settings import RestSettings
from gateway.rest.sse import EventStream, typed
from outrider.errors import OutriderError

NO_STORE = {"cache-control": "no-store"}


def api_routes(door: Frontend, settings: RestSettings) -> APIRouter:
    """The page's own routes. Errors before the stream are raised as OutriderError."""

    async def generate(request: Request) -> Response:
        # The middleware has read it once already, strictly and off the loop where it is long.
        ask = ask_from(json.loads(await request.body() or "null"))
        stream = EventStream(frames(door, ask), settings.keep_alive_s, settings.client_stall_s)
        await stream.begin(request.receive)
        return stream

    async def status(_: Request) -> Response:
        return JSONResponse(status_view(door, settings.grpc_port), headers=NO_STORE)

    router = APIRouter(include_in_schema=False)
    router.routes += [Route("/api/generate", generate, methods=["POST"]), Route("/api/status", status)]
    return router


async def frames(door: Frontend, ask: GenerationRequest) -> AsyncGenerator[bytes, None]:
    """The events of a request. What is wrong before it has its place is raised, what goes wrong later is an event."""
    started_ns = time.perf_counter_ns()
    admitted = False
    try:
        async with door.open([ask]) as generation:
            target = door.backend.target.present()
            told = opened(generation.requests[0], door.model_name, target.model_hash, target.numerics_id)
            admitted = True
            yield _frame("opened", told)
            async for _, event in generation.events:
                yield _event(event, (time.perf_counter_ns() - started_ns) // 1000)
    except OutriderError as error:
        if not admitted:
            raise
        yield _frame("error", error_view(error))


def _event(event: Event, time_us: int) -> bytes:
    if isinstance(event, RoundEvent):
        return _frame("round", round_view(event, time_us))
    return _frame("completion", completion_view(event))


def _frame(name: str, told: dict[str, Any]) -> bytes:
    return typed(name, json.dumps(told, ensure_ascii=False, allow_nan=False))
