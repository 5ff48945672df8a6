"""A server that echoes what it gets, behind the middleware that every request passes."""

from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.rest.bodies import BodyLimits
from gateway.rest.ids import RequestIds
from gateway.rest.settings import RestSettings

SETTINGS = RestSettings(max_body_bytes=100_000, body_wait_s=20)
JSON = {"content-type": "application/json"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it got; a body of "surprise" is one."""
    body = await Request(scope, receive).body()
    if body == b'"surprise"':
        raise ValueError("a secret")
    await JSONResponse({"got": body.decode()})(scope, receive, send)


def surface(settings: RestSettings) -> RequestIds:
    """The middleware before a server that echoes."""
    return RequestIds(BodyLimits(echo, settings), CollectorRegistry())


def client() -> httpx.AsyncClient:
    """A client of the application without a network."""
    app = surface(SETTINGS)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def posted(content: bytes, **headers: str) -> tuple[int, dict[str, Any], httpx.Headers]:
    """Status, body and headers of the answer."""
    async with client() as http:
        reply = await http.post("/", content=content, headers={**JSON, **headers})
        return reply.status_code, reply.json(), reply.headers
