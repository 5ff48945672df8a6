"""Lets other sites' pages make the gateway do nothing. Decides nothing itself: `gateway.sites` does.

Reading is left to the browser, which shows answers to other sites' pages only as CORS allows.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.rest.errors import error_response
from gateway.sites import SiteRefused, Sites

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
