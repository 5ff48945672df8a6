"""Lets other sites' pages make the gateway do nothing. Decides nothing itself: `gateway.settings` does.

Reading is left to the browser, which shows answers to other sites' pages only as CORS allows.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.rest.errors import error_response
from gateway.settings import SiteRefused, Sites

READING = frozenset({"GET", "HEAD", "OPTIONS"})


class SiteGuard:
    """The middleware."""

    def __init__(self, app: ASGIApp, sites: Sites) -> None:
        self._app = app
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that is refused itself."""
        if scope["type"] == "http" and scope["method"] not in READING:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            try:
                if origin is not None:
                    self._sites.check(origin, headers.get("host", ""), headers.get("sec-fetch-site", ""))
            except SiteRefused as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class CrossOrigin(CORSMiddleware):
    """CORS for the sites that were named; a refused preflight is an error like any other, and not Starlette's text."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks before it sends."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        origin = request_headers["origin"][:200]
        words = bytes(response.body).decode()
        refused = SiteRefused(f"a page of {origin!r} may not ask this: {words}", field="origin", value=origin)
        return error_response(refused, {"vary": response.headers.get("vary", "Origin")})
