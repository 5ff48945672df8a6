"""Guards of what comes over HTTP: API keys, where keys are asked for, and the pages of other sites.

Every path asks for a key but those that say whether the gateway lives, and the page's own files.

The page itself has no secrets, and asks for the key when its first call is refused. A path that is not served asks for
one too, so that a new route is closed until it is named here.
"""

from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.keys.door import REST, Door, Entrance
from gateway.keys.tenant import Tenant
from gateway.rest.bodies import IGNORED_HEADER
from gateway.rest.errors import error_response
from gateway.settings import SiteRefused, Sites
from outrider.errors import KeyForbidden, OutriderError

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/"})
OPEN_FILES = "/static/"
OPEN_METHODS = frozenset({"GET", "HEAD"})
FIGURES = "/metrics"
UNITS = ("requests", "tokens")
LIMIT_HEADERS = tuple(f"x-ratelimit-{what}-{unit}" for unit in UNITS for what in ("limit", "remaining", "reset"))
READING = frozenset({"GET", "HEAD", "OPTIONS"})
# What is read there is for programs, which call the gateway by any name.
API = "/v1/"
ASKED_METHOD, ASKED_HEADERS = "access-control-request-method", "access-control-request-headers"
# A page of a public network that asks a machine of this one, as browsers call it; and what they want to hear.
NETWORKS = {
    f"access-control-request-{name}-network": f"access-control-allow-{name}-network" for name in ("private", "local")
}


class SiteGuard(CORSMiddleware):
    """CORS for the origins that were named, and a refusal of whatever else pages of other sites want to have done.

    Reading is left to the browser, which shows answers to other sites' pages only as CORS allows. A site whose name was
    made to lead here is none of these to it, and is known by the name alone.
    """

    def __init__(self, app: ASGIApp, sites: Sites) -> None:
        told = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry", IGNORED_HEADER)
        exposed = (*told, *LIMIT_HEADERS)
        super().__init__(self._check, sites.origins, expose_headers=exposed)
        self._next, self._sites = app, sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks_first = scope["method"] == "OPTIONS" and ASKED_METHOD in Headers(scope=scope)
        await (super().__call__ if self._sites.origins or asks_first else self._check)(scope, receive, send)

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
        """The answer to a browser that asks before it sends. A site that was named may ask with any method and headers,
        and from a public network: what it asks for says itself what is wrong with it. A refusal is an error like any
        other.
        """
        origin, varies = request_headers["origin"], ["origin", ASKED_METHOD, ASKED_HEADERS, *NETWORKS]
        headers = {"vary": ", ".join(varies)}
        try:
            self._sites.check(origin, request_headers.get("host", ""), request_headers.get("sec-fetch-site", ""))
        except SiteRefused as error:
            return error_response(error, "", headers)
        headers["access-control-allow-origin"] = "*" if self.allow_all_origins else origin
        headers["access-control-allow-methods"] = request_headers[ASKED_METHOD]
        headers["access-control-max-age"] = "600"
        if ASKED_HEADERS in request_headers:
            headers["access-control-allow-headers"] = request_headers[ASKED_HEADERS]
        headers |= {NETWORKS[name]: "true" for name in NETWORKS if name in request_headers}
        return Response(status_code=HTTPStatus.OK, headers=headers)


class KeyGuard:
    """Lets requests with a known key in, and the route ask whose it is; answers say what is left of its limits."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_open(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        entrance = Entrance(self._door, REST, _values(scope, b"authorization"), _values(scope, b"x-api-key"))
        try:
            tenant = entrance.tenant()
            if scope["path"] == FIGURES and not tenant.key.metrics:
                message = f"{FIGURES} tells of all keys; to read it the key {tenant.name!r} needs metrics = true"
                raise KeyForbidden(message, key=tenant.name)
        except OutriderError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state.update(enter=entrance, tenant=tenant)
        if "welcome" in state:
            state["welcome"]()

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                # A request that is over its limits, or finds all places taken, does not pay for that.
                if "num_bytes" in state and 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS:
                    entrance.refused(state["num_bytes"])
                MutableHeaders(scope=message).update(await limit_headers(tenant))
            await send(message)

        await self._app(scope, receive, send_with_limits)


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no key."""
    return method in OPEN_METHODS and tells_nothing(path)


def tells_nothing(path: str) -> bool:
    """Whether what is read there may be known to everybody: that the gateway lives, and the page's own files."""
    return path in OPEN_PATHS or path.startswith(OPEN_FILES)


def entrance_of(request: Request) -> Entrance | None:
    """The request's entrance, found each time it is asked for; None where no keys are asked for."""
    found: Entrance | None = request.scope.get("state", {}).get("enter")
    return found


async def limit_headers(tenant: Tenant) -> dict[str, str]:
    """Headers about what is left of the limits by the minute, under OpenAI's names; none without a limit."""
    found: dict[str, str] = {}
    for unit, allowance in zip(UNITS, await tenant.allowances(), strict=True):
        if allowance is not None:
            found |= {
                f"x-ratelimit-limit-{unit}": str(allowance.limit),
                f"x-ratelimit-remaining-{unit}": str(allowance.remaining),
                f"x-ratelimit-reset-{unit}": f"{allowance.reset_s:.3f}s",
            }
    return found


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for each, value in scope["headers"] if each == name]
