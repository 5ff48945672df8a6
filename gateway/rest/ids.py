"""Middleware around every request: an id, a trace, headers, and a count of its answer."""

import re
import time
import uuid
from collections.abc import Callable
from urllib.parse import quote

import structlog
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.rest.errors import (
    error_response,
    unexpected,
)
from outrider.process.telemetry import bound, span
from outrider.rpc.guard import Throttle

TRACE_HEADERS = ("traceparent", "tracestate")
PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})

log = structlog.get_logger()


class RequestIds:
    """The middleware around everything else: it gives each request an id, a trace and headers, and counts its answer.

    The id is the client's `x-request-id` where that is short and plain, and in every line that is logged meanwhile.
    An unexpected error becomes a 500, or the end of the connection. Refusals are sent at a pace; see Throttle. While
    the gateway `is_leaving` no connection is kept, so that the next request finds another one.
    """

    def __init__(
        self, app: ASGIApp, registry: CollectorRegistry, is_leaving: Callable[[], bool] = lambda: False
    ) -> None:
        self._app, self._is_leaving, self._throttle = app, is_leaving, Throttle()
        labels = ("method", "route", "status")
        self._answers = Counter("outrider_http_answers", "Answers over REST.", labels, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        request_id = given_id if PLAIN_ID.fullmatch(given_id) else uuid.uuid4().hex
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        # As it is on the wire: decoded, it may have characters that change what a terminal shows.
        method, path = scope["method"], quote(scope["path"])
        status = 0  # until the headers are out

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                own = MutableHeaders(scope=message)
                own["x-request-id"], own["x-content-type-options"] = request_id, "nosniff"
                # Where Anthropic's clients look for it.
                own["request-id"] = request_id
                if self._is_leaving():
                    own["connection"] = "close"
                if own.get("content-type", "").startswith("application/json"):
                    own.setdefault("cache-control", "no-store")
                if 400 <= status < 500:
                    await self._throttle.turn()
            await send(message)

        started_s = time.monotonic()
        with bound(request_id=request_id), span("rest", trace, **{"http.request.method": method, "url.path": path}):
            try:
                await self._app(scope, receive, send_with_headers)
            except Exception as error:
                if status:
                    # The code that closes the connection logs it as well.
                    raise
                await error_response(unexpected(error), scope["path"])(scope, receive, send_with_headers)
            finally:
                # Clients choose paths and methods, so those that are not served share one label; what a middleware
                # answers has met no route. Without a status the client was gone before there was one.
                route = getattr(scope.get("route"), "path", "other")
                label = method if method in METHODS else "other"
                self._answers.labels(label, route, str(status or "none")).inc()
            took_ms = round(1e3 * (time.monotonic() - started_s))
            log.debug("answered", method=method, path=path, status=status, took_ms=took_ms)
