"""API keys over HTTP: every path asks for one but those that say whether the gateway lives, and the page's own files.

The page itself has no secrets, and asks for the key when its first call is refused. A path that is not served asks for
one too, so that a new route is closed until it is named here.
"""

from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.keys.door import REST, Door, Entrance
from gateway.keys.tenant import Tenant
from gateway.rest.errors import error_response
from outrider.errors import KeyForbidden, OutriderError

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/"})
OPEN_FILES = "/static/"
READING = frozenset({"GET", "HEAD"})
FIGURES = "/metrics"
UNITS = ("requests", "tokens")
LIMIT_HEADERS = tuple(f"x-ratelimit-{what}-{unit}" for unit in UNITS for what in ("limit", "remaining", "reset"))


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
                MutableHeaders(scope=message).update(limit_headers(tenant))
            await send(message)

        await self._app(scope, receive, send_with_limits)


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no key."""
    return method in READING and tells_nothing(path)


def tells_nothing(path: str) -> bool:
    """Whether what is read there may be known to everybody: that the gateway lives, and the page's own files."""
    return path in OPEN_PATHS or path.startswith(OPEN_FILES)


def entrance_of(request: Request) -> Entrance | None:
    """The request's entrance, found each time it is asked for; None where no keys are asked for."""
    found: Entrance | None = request.scope.get("state", {}).get("enter")
    return found


def limit_headers(tenant: Tenant) -> dict[str, str]:
    """Headers about what is left of the limits by the minute, under OpenAI's names; none without a limit."""
    found: dict[str, str] = {}
    for unit, allowance in zip(UNITS, (tenant.requests, tenant.tokens), strict=True):
        if allowance is not None:
            found |= {
                f"x-ratelimit-limit-{unit}": str(allowance.limit),
                f"x-ratelimit-remaining-{unit}": str(allowance.remaining),
                f"x-ratelimit-reset-{unit}": f"{allowance.reset_s:.3f}s",
            }
    return found


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for each, value in scope["headers"] if each == name]
