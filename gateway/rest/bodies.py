"""Limits of bodies, which are read, checked and parsed once before their route; and the routes that take them so."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.keys.tenant import Tenant
from gateway.rest.asking.json_body import Json, read_json
from gateway.rest.errors import (
    AmbiguousBody,
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    HeadersTooLarge,
    UnsupportedMedia,
    error_response,
)
from gateway.rest.server import HEAD_BYTES
from gateway.rest.settings import RestSettings
from gateway.rest.sse import while_there
from gateway.text.json_counts import JsonCounts
from outrider.errors import OutriderError, Overloaded
from outrider.rpc.memory import WAIT_S, Share

BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;\s*charset\s*=\s*\"?utf-?8\"?\s*)?", re.IGNORECASE)
# Reading more than this takes long enough to be felt by other requests.
LONG_BODY = 1 << 15

# Names the fields of a body that were accepted without effect.
IGNORED_HEADER = "x-outrider-ignored"
MAX_IGNORED_LEN = 2048


class BodyLimits:
    """Reads the whole body, which is limited in size and time and must be JSON, before anything is spent on it.

    The same goes for what comes before it. Its value goes to the route in the request's state, its bytes to any reader.
    What both hold is taken from the memory of all requests, before they are there, until the answer begins.
    """

    def __init__(self, app: ASGIApp, settings: RestSettings) -> None:
        self._app = app
        self._settings = settings
        # One body at a time, because the parser keeps all other threads from running, and until its value is checked,
        # because unchecked values are the largest.
        self._parser, self._lock = ThreadPoolExecutor(1, "bodies"), asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # With the marks between them.
        num_bytes = sum(len(name) + len(value) + 4 for name, value in headers.raw)
        if len(scope["raw_path"]) + len(scope["query_string"]) + num_bytes > HEAD_BYTES:
            await error_response(HeadersTooLarge(HEAD_BYTES), scope["path"])(scope, receive, send)
            return
        if {"content-length", "transfer-encoding"} <= set(headers):
            error = AmbiguousBody("A body has a content-length or a transfer-encoding, and not both")
            await error_response(error, scope["path"], {"connection": "close"})(scope, receive, send)
            return
        if scope["method"] not in BODY_METHODS:
            await self._app(scope, receive, send)
            return
        state, memory = scope.setdefault("state", {}), self._settings.memory
        tenant: Tenant | None = state.get("tenant")
        whose = "" if tenant is None else tenant.name
        state["num_bytes"] = 0
        with memory.coming.share(whose) as coming, memory.kept.share(whose) as kept:
            messages: list[Message] = []

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            async def let_go(message: Message) -> None:
                turn.end()
                if message["type"] == "http.response.start" and message["status"] < 400:
                    # The code that answers has made of them what it needs; an error may still have hold of them.
                    messages.clear()
                    state.pop("json", None)
                    kept.give_back()
                await send(message)

            turn = ParserTurn(self._lock, self._parser)
            try:
                try:
                    body = await self._read(headers, receive, coming, state)
                    if body:
                        state.update(json=await self._parsed(body, headers, receive, kept, turn), turn=turn)
                except OutriderError as error:
                    # The server drops what is left of the body: closing would take the answer from a client that still
                    # sends.
                    await error_response(error, scope["path"])(scope, receive, send)
                    return
                messages.append({"type": "http.request", "body": body, "more_body": False})
                del body
                # From here on it is counted among what is kept.
                coming.give_back()
                await self._app(scope, replay, let_go)
            finally:
                turn.end()

    async def _read(self, headers: Headers, receive: Receive, coming: Share, state: dict[str, Any]) -> bytes:
        """The body, for which there is room before any of it is looked at: halves of several would keep each other
        from an end.
        """
        max_bytes, body = self._settings.max_body_bytes, bytearray()
        too_large = BodyTooLarge(f"The body is longer than {max_bytes} bytes", limit=f"at most {max_bytes} bytes")
        length = headers.get("content-length", "")
        # Without a length it may be as long as any.
        most = int(length) if length.isdecimal() else max_bytes if "transfer-encoding" in headers else 0
        if most > max_bytes:
            raise too_large
        if most > LONG_BODY and "tenant" in state:
            await state["tenant"].check_left()
        await coming.take(most)
        try:
            async with asyncio.timeout(self._settings.body_wait_s):
                message: Message = {"more_body": True}
                while message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("The client left before its request was there")
                    part = message.get("body", b"")
                    if len(body) + len(part) > most:
                        raise too_large
                    body += part
                    state["num_bytes"] = len(body)
        except TimeoutError:
            raise BodyTimeout(f"The body did not come within {self._settings.body_wait_s:g} seconds") from None
        return bytes(body)

    async def _parsed(self, body: bytes, headers: Headers, receive: Receive, kept: Share, turn: "ParserTurn") -> Json:
        kind, encoding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UnsupportedMedia("The body must not be compressed", field="content-encoding", value=encoding[:80])
        if not JSON_TYPE.fullmatch(kind.strip()):
            message = f"content-type is {kind[:80]!r}, but must be application/json in UTF-8"
            raise UnsupportedMedia(message, field="content-type", value=kind[:80])
        counts, parse = JsonCounts(), partial(read_json, body, self._settings.max_json_depth)
        if len(body) <= LONG_BODY:
            counts.add("body", body)
            await kept.take(len(body) + counts.memory_bytes)
            return parse()
        # Of those who leave before their turn nothing is parsed.
        async with while_there(receive):
            await turn.begin()
            await turn.run(partial(counts.add, "body", body))
            await kept.take(len(body) + counts.memory_bytes)
            value: Json = await turn.run(parse)
        return value


class ParserTurn:
    """The time that a long body has with the parser, until it is checked; a short one has none, and needs none."""

    def __init__(self, lock: asyncio.Lock, parser: ThreadPoolExecutor) -> None:
        self._lock, self._parser = lock, parser
        self.has_begun = False

    async def begin(self) -> None:
        """Waits for it; raises Overloaded where that takes too long."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._lock.acquire()
        except TimeoutError:
            raise Overloaded(f"{WAIT_S:g} seconds were not enough for the bodies that came before this one") from None
        self.has_begun = True

    async def run(self, job: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the job makes
        """Does a job where long bodies are parsed, off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, job)

    def end(self) -> None:
        """Lets the next one have its turn; again without effect."""
        if self.has_begun:
            self.has_begun = False
            self._lock.release()


class ParsedRequest(Request):
    """A request with a body that `BodyLimits` has parsed, and that `check` may have made what its route takes."""

    model: object = None

    async def json(self) -> object:
        """Value that the route goes on with; a body that is checked already is not checked again."""
        return self.state.json if self.model is None else self.model

    async def check(self, bodies: TypeAdapter[Any] | None) -> None:
        """Checks a long body where it was parsed: the framework would do it on the loop. Raises what that raises."""
        turn: ParserTurn | None = getattr(self.state, "turn", None)
        if bodies is None or turn is None or not turn.has_begun:
            return
        value: Json = self.state.json

        def validated() -> tuple[object, list[Any]]:
            try:
                return bodies.validate_python(value), []
            except ValidationError as error:
                # There may be thousands.
                return None, error.errors()

        # A message that comes after it says that the client leaves.
        await self.body()
        async with while_there(self.receive):
            self.model, findings = await turn.run(validated)
        turn.end()
        if findings:
            raise RequestValidationError(findings, body=value)


class ParsedBodyRoute(APIRoute):
    """A route that takes the value of its body from `BodyLimits` instead of parsing the bytes again."""

    @property
    def body_type(self) -> Any:  # noqa: ANN401 - whatever a route takes
        """Type of the route's bodies; None where it takes none."""
        return self.body_field.field_info.annotation if self.body_field else None

    @property
    def bodies(self) -> TypeAdapter[Any] | None:
        """Adapter that makes bodies of values; None where the route takes none."""
        return None if self.body_type is None else TypeAdapter(self.body_type)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, bodies = super().get_route_handler(), self.bodies

        async def handle_parsed(unparsed: Request) -> Response:
            request = ParsedRequest(unparsed.scope, unparsed.receive)
            await request.check(bodies)
            return await handle(request)

        return handle_parsed


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields which were accepted without effect; none when there are none."""
    # Some of them are keys that a client made up.
    named = ", ".join(quote(name, safe="%./=") for name in dict.fromkeys(names))
    return {IGNORED_HEADER: named[:MAX_IGNORED_LEN]} if named else {}
