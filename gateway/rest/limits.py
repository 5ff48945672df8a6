"""Stands in front of all routes: what a body may be, before anything is spent on it. Knows no route and no field.

It reads the whole body, which is limited in size and time, and hands it on in one piece.
"""

import asyncio
import re
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.rest.clients import ClientGone
from gateway.rest.errors import error_response
from gateway.rest.json_text import read_json
from gateway.rest.settings import RestSettings
from outrider.errors import OutriderError, Overloaded

METHODS = frozenset({"POST", "PUT", "PATCH"})
JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;\s*charset\s*=\s*\"?utf-?8\"?\s*)?", re.IGNORECASE)
# Reading more than this takes long enough to be felt by other requests.
LONG_BODY = 1 << 18


class BodyTooLarge(OutriderError):
    """The caller must send less."""

    status = "INVALID_ARGUMENT"
    reason = "BODY_TOO_LARGE"
    exit_code = 64


class BodyTimeout(OutriderError):
    """The caller must send its body faster."""

    status = "DEADLINE_EXCEEDED"
    reason = "BODY_TIMEOUT"
    exit_code = 75


class UnsupportedMedia(OutriderError):
    """The caller must send JSON in UTF-8, and say so."""

    status = "INVALID_ARGUMENT"
    reason = "UNSUPPORTED_MEDIA_TYPE"
    exit_code = 64


class AmbiguousBody(OutriderError):
    """The caller must say the length of its body in one way, or a proxy may see another request than this server."""

    status = "INVALID_ARGUMENT"
    reason = "AMBIGUOUS_BODY"
    exit_code = 64


class BodyLimits:
    """The middleware."""

    def __init__(self, app: ASGIApp, settings: RestSettings) -> None:
        self._app = app
        self._settings = settings
        self._num_held = 0  # bytes of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a body that is refused itself."""
        if scope["type"] == "http" and {"content-length", "transfer-encoding"} <= set(Headers(scope=scope)):
            error = AmbiguousBody("A body has a content-length or a transfer-encoding, and not both")
            await error_response(error, {"connection": "close"})(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            await self._handle(body, scope, receive, send)
        finally:
            self._num_held -= len(body)

    async def _handle(self, body: bytearray, scope: Scope, receive: Receive, send: Send) -> None:
        """Collects the body and passes it on."""
        try:
            await self._read(body, Headers(scope=scope), receive)
        except OutriderError as error:
            # The server drops what is left of the body. To close now would take the answer from whoever still sends.
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, _replayed(bytes(body), receive), send)

    async def _read(self, body: bytearray, headers: Headers, receive: Receive) -> None:
        most = self._settings.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(self._settings.body_wait_s):
                await self._collect(body, receive)
        except TimeoutError:
            raise BodyTimeout(f"The body did not come within {self._settings.body_wait_s:g} seconds") from None
        if body:
            _check_type(headers)
            check = partial(read_json, bytes(body), self._settings.max_json_depth)
            await asyncio.to_thread(check) if len(body) > LONG_BODY else check()

    async def _collect(self, body: bytearray, receive: Receive) -> None:
        is_whole = False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("The client left before its request was there")
            part = message.get("body", b"")
            if len(body) + len(part) > self._settings.max_body_bytes:
                raise _too_large(self._settings.max_body_bytes)
            if self._num_held + len(part) > self._settings.max_held_bytes:
                raise Overloaded(f"{self._num_held} bytes of requests are held already", num_bytes=self._num_held)
            body += part
            self._num_held += len(part)
            is_whole = not message.get("more_body", False)


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is longer than {most} bytes", limit=f"at most {most} bytes")


def _check_type(headers: Headers) -> None:
    kind, encoding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMedia("The body must not be compressed", field="content-encoding", value=encoding[:80])
    if not JSON_TYPE.fullmatch(kind.strip()):
        message = f"content-type is {kind[:80]!r}, but must be application/json in UTF-8"
        raise UnsupportedMedia(message, field="content-type", value=kind[:80])


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once, and then what the connection says."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
