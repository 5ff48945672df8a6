"""What every request passes before its route: an id, a trace and a count, the guard against other sites' pages, and the
limits of bodies, which are read, checked and parsed here once.
"""

import asyncio
import collections
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import quote

import structlog
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.generation.request import MAX_TEXT_CHARS
from gateway.keys.door import Door
from gateway.rest.errors import (
    AmbiguousBody,
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    HeadersTooLarge,
    InvalidJson,
    UnsupportedMedia,
    error_response,
    unexpected,
)
from gateway.rest.keys import LIMIT_HEADERS, tells_nothing
from gateway.rest.server import HEAD_BYTES
from gateway.settings import OWN_PAGE, SiteRefused, Sites
from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.process.telemetry import bound, span
from outrider.rpc.guard import Throttle

TRACE_HEADERS = ("traceparent", "tracestate")
PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
# What is read there is for programs, which call the gateway by any name.
API = "/v1/"
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;\s*charset\s*=\s*\"?utf-?8\"?\s*)?", re.IGNORECASE)
# Reading more than this takes long enough to be felt by other requests.
LONG_BODY = 1 << 15

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Path: TypeAlias = tuple[str | int, ...]
# Keys of all objects together. Unknown ones are found one by one, which takes the loop's time.
MAX_KEYS = 50_000
MAX_NAME_LEN = 200
# Names the fields of a body that were accepted without effect.
IGNORED_HEADER = "x-outrider-ignored"
MAX_IGNORED_LEN = 2048
# Half of a surrogate pair, which no encoding can carry; whole pairs have become characters already.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RestSettings:
    """Limits and habits of the REST surface. Sizes are bytes or characters, times are seconds."""

    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment says that it is alive."""
    client_stall_s: float = 30.0
    """For how long a client may take nothing of what is written to it."""
    sites: Sites = OWN_PAGE
    door: Door | None = None
    """Where keys are asked for; None lets everybody in."""
    max_body_bytes: int = 4 << 20
    max_held_bytes: int = 256 << 20
    """Of the bodies of all requests together."""
    body_wait_s: float = 30.0
    """For how long a client may send its body."""
    max_json_depth: int = 64
    max_prompt_chars: int = MAX_TEXT_CHARS
    grpc_port: int = 50050
    """Where the same gateway serves gRPC; the page names it in the code that it offers."""
    drops_tools: bool = False
    """Whether tools that no chat template has a place for are left out instead of refused."""
    ignores_unknown: bool = False
    """Whether unknown fields of a body are left out instead of refused."""


class RequestIds:
    """The middleware around everything else: it gives each request an id, a trace and headers, and counts its answer.

    The id is the client's `x-request-id` where that is short and plain, and in every line that is logged meanwhile.
    What nobody expected becomes a 500, or the end of the connection. Refusals are sent at a pace; see Throttle. While
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
                    # Whoever closes the connection logs it as well.
                    raise
                await error_response(unexpected(error), scope["path"])(scope, receive, send_with_headers)
            finally:
                # Clients choose paths and methods, so those that nobody serves share one label; what a middleware
                # answers has met no route. Without a status the client was gone before there was one.
                route = getattr(scope.get("route"), "path", "other")
                label = method if method in METHODS else "other"
                self._answers.labels(label, route, str(status or "none")).inc()
            took_ms = round(1e3 * (time.monotonic() - started_s))
            log.debug("answered", method=method, path=path, status=status, took_ms=took_ms)


class SiteGuard(CORSMiddleware):
    """CORS for the origins that were named, and a refusal of whatever else pages of other sites want to have done.

    Reading is left to the browser, which shows answers to other sites' pages only as CORS allows. A site whose name was
    made to lead here is none of these to it, and is known by the name alone.
    """

    def __init__(self, app: ASGIApp, sites: Sites) -> None:
        told = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry", IGNORED_HEADER)
        exposed = (*told, *LIMIT_HEADERS)
        super().__init__(self._check, sites.origins, ("GET", "POST"), ("*",), expose_headers=exposed)
        self._next, self._sites = app, sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (super().__call__ if self._sites.origins else self._check)(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if scope["method"] in READING:
                if not (tells_nothing(scope["path"]) or scope["path"].startswith(API)):
                    self._sites.check_host(headers.get("host", ""))
            elif "origin" in headers:
                self._sites.check(headers["origin"], headers.get("host", ""), headers.get("sec-fetch-site", ""))
        except SiteRefused as error:
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            await self._next(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Starlette's answer to a browser that asks before it sends; a refusal is an error like any other."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        origin = request_headers["origin"][:200]
        words = bytes(response.body).decode()
        refused = SiteRefused(f"a page of {origin!r} may not ask this: {words}", field="origin", value=origin)
        return error_response(refused, "", {"vary": response.headers.get("vary", "Origin")})


class BodyLimits:
    """Reads the whole body, which is limited in size and time and must be JSON, before anything is spent on it.

    So is what comes before it. Its value goes to the route in the request's state, its bytes to whoever reads them.
    """

    def __init__(self, app: ASGIApp, settings: RestSettings) -> None:
        self._app = app
        self._settings = settings
        self._num_held = 0  # bytes of all bodies
        # One at a time, because the parser keeps all other threads from running.
        self._parser = ThreadPoolExecutor(1, "bodies")

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
        body = bytearray()
        try:
            try:
                await self._read(body, headers, receive)
                if body:
                    value = await self._parsed(bytes(body), headers)
                    parser = self._parser if len(body) > LONG_BODY else None
                    scope.setdefault("state", {}).update(json=value, parser=parser)
            except OutriderError as error:
                # The server drops what is left of the body: closing would take the answer from whoever still sends.
                await error_response(error, scope["path"])(scope, receive, send)
                return
            messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self._app(scope, replay, send)
        finally:
            self._num_held -= len(body)

    async def _read(self, body: bytearray, headers: Headers, receive: Receive) -> None:
        max_bytes = self._settings.max_body_bytes
        too_large = BodyTooLarge(f"The body is longer than {max_bytes} bytes", limit=f"at most {max_bytes} bytes")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large
        try:
            async with asyncio.timeout(self._settings.body_wait_s):
                message: Message = {"more_body": True}
                while message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("The client left before its request was there")
                    part = message.get("body", b"")
                    if len(body) + len(part) > max_bytes:
                        raise too_large
                    if self._num_held + len(part) > self._settings.max_held_bytes:
                        held = self._num_held
                        raise Overloaded(f"{held} bytes of requests are held already", num_bytes=held)
                    body += part
                    self._num_held += len(part)
        except TimeoutError:
            raise BodyTimeout(f"The body did not come within {self._settings.body_wait_s:g} seconds") from None

    async def _parsed(self, body: bytes, headers: Headers) -> Json:
        kind, encoding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UnsupportedMedia("The body must not be compressed", field="content-encoding", value=encoding[:80])
        if not JSON_TYPE.fullmatch(kind.strip()):
            message = f"content-type is {kind[:80]!r}, but must be application/json in UTF-8"
            raise UnsupportedMedia(message, field="content-type", value=kind[:80])
        parse = partial(read_json, body, self._settings.max_json_depth)
        if len(body) <= LONG_BODY:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse)


class ParsedRequest(Request):
    """A request with a body that `BodyLimits` has parsed, and that `check` may have made what its route takes."""

    model: object = None

    async def json(self) -> object:
        """What the route goes on with; a body that is checked already is not checked again."""
        return self.state.json if self.model is None else self.model

    async def check(self, bodies: TypeAdapter[Any] | None) -> None:
        """Checks a long body where it was parsed: the framework would do it on the loop. Raises what that raises."""
        parser = getattr(self.state, "parser", None)
        if bodies is None or parser is None:
            return
        value: Json = self.state.json
        try:
            self.model = await asyncio.get_running_loop().run_in_executor(parser, bodies.validate_python, value)
        except ValidationError as error:
            raise RequestValidationError(error.errors(), body=value) from None


class ParsedBodyRoute(APIRoute):
    """A route that takes the value of its body from `BodyLimits` instead of parsing the bytes again."""

    @property
    def body_type(self) -> Any:  # noqa: ANN401 - whatever a route takes
        """What its bodies are; None where it takes none."""
        return self.body_field.field_info.annotation if self.body_field else None

    @property
    def bodies(self) -> TypeAdapter[Any] | None:
        """What makes them of values."""
        return None if self.body_type is None else TypeAdapter(self.body_type)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, bodies = super().get_route_handler(), self.bodies

        async def handle_parsed(unparsed: Request) -> Response:
            request = ParsedRequest(unparsed.scope, unparsed.receive)
            await request.check(bodies)
            return await handle(request)

        return handle_parsed


def read_json(text: bytes, max_depth: int) -> Json:
    """The value of a JSON text that every parser would read alike: no repeated keys, NaN, infinity, lone surrogates.

    Raises InvalidJson, and InvalidRequest about a value that is no JSON, naming its path.
    """
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"The body is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}") from None
    try:
        value = _loaded(decoded)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidJson(f"The body is not JSON: {error.msg.lower()} in {place}") from None
    except RecursionError:
        raise InvalidJson(f"The body nests values more than {max_depth} deep") from None
    if _checked_keys(value, (), max_depth) > MAX_KEYS:
        raise InvalidJson(f"The body has more than {MAX_KEYS} keys")
    return value


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields which were accepted without effect; none when there are none."""
    # Some of them are keys that a client made up.
    named = ", ".join(quote(name, safe="%./=") for name in dict.fromkeys(names))
    return {IGNORED_HEADER: named[:MAX_IGNORED_LEN]} if named else {}


def name_of(path: Iterable[str | int]) -> str:
    """The name of a place in the body, of bounded length: keys are the client's."""
    name = ".".join(map(str, path)) or "body"
    return name if len(name) <= MAX_NAME_LEN else name[: MAX_NAME_LEN - 3] + "..."


def _loaded(text: str) -> Json:
    try:
        value: Json = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python converts no integer of more than 4,300 digits. As a float it is infinite, which has a place; and what
        # comes behind it is read as well, which may be no JSON.
        value = json.loads(text, object_pairs_hook=_object, parse_int=float)
    return value


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
        name = name_of([twice])
        raise InvalidJson(f"The body names {name!r} twice in one object", field=name)
    return found


def _checked_keys(value: Json, path: Path, max_depth: int) -> int:
    """How many keys the objects in a value have; raises an error about what Python takes and JSON does not."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(name_of(path), value, "a finite number")
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        raise InvalidRequest(name_of(path), value, "text without lone surrogates")
    if not isinstance(value, dict | list):
        return 0
    if len(path) >= max_depth:
        raise InvalidJson(f"The body nests values more than {max_depth} deep")
    if isinstance(value, list):
        # Token ids come by the million, and there is nothing to see in a number without a fraction.
        if set(map(type, value)) == {int}:
            return 0
        return sum(_checked_keys(each, (*path, at), max_depth) for at, each in enumerate(value))
    for key in value:
        if LONE_SURROGATE.search(key):
            place = name_of(path)
            raise InvalidJson(f"{place} has the key {name_of([key])!r}, which is not text", field=place)
    return len(value) + sum(_checked_keys(each, (*path, key), max_depth) for key, each in value.items())
