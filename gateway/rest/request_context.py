"""What every request has whatever it asks for: an id, a trace, headers for its answer, and a wall against surprises.

Knows no route. The id is the client's `x-request-id` where that is short and plain, and in every line that is logged
meanwhile.
"""

import re
import time
import uuid
from urllib.parse import quote

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.rest.answer_counts import AnswerCounts
from gateway.rest.errors import error_response, unexpected
from outrider.process.logs import bound
from outrider.process.tracing import span

TRACE_HEADERS = ("traceparent", "tracestate")
PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log = structlog.get_logger()


class RequestContext:
    """The middleware around everything else. What nobody expected becomes a 500, or the end of the connection."""

    def __init__(self, app: ASGIApp, counts: AnswerCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets the request pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        answer = _Answer(send, request_id)
        started_s = time.monotonic()
        # As it is on the wire: decoded, it may have characters that change what a terminal shows.
        path = quote(scope["path"])
        facts = {"http.request.method": scope["method"], "url.path": path}
        with bound(request_id=request_id), span("rest", _trace(headers), **facts):
            try:
                await self._guarded(scope, receive, answer)
            finally:
                self._counts.count(scope, answer.status)
            took_ms = round(1e3 * (time.monotonic() - started_s))
            log.debug("answered", method=scope["method"], path=path, status=answer.status, took_ms=took_ms)

    async def _guarded(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if answer.status:
                # Whoever closes the connection logs it as well.
                raise
            await error_response(unexpected(error))(scope, receive, answer)


class _Answer:
    """A send that puts headers on the response and remembers its status, 0 until the headers are out."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            headers["x-content-type-options"] = "nosniff"
            if headers.get("content-type", "").startswith("application/json"):
                headers.setdefault("cache-control", "no-store")
        await self._send(message)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


def _trace(headers: Headers) -> dict[str, str]:
    """What the caller says of its own trace."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
