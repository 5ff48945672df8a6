"""The page at `/` and its files, from memory, under a strict content policy. Knows no request and no model.

The files are read once: what is served cannot leave gateway/web, and an edit shows after a restart.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.generation.frontend import Frontend
from gateway.rest.api import api_routes
from gateway.rest.settings import RestSettings

WEB = "web"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# No inline script or style, nothing from elsewhere, no frames around it: text of a model can be nothing but text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Browsers ask again, and mostly hear that nothing has changed.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file of the page."""

    content: bytes
    media_type: str
    tag: str

    def answer(self, request: Request) -> Response:
        """The file, or that the browser has it already."""
        headers = {**HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def page_routes(door: Frontend, settings: RestSettings) -> APIRouter:
    """`/`, `/static/*`, and `/api/*`, which the page uses."""
    web_files = read_files()

    async def page(request: Request) -> Response:
        return web_files["index.html"].answer(request)

    async def static(request: Request) -> Response:
        found = web_files.get(request.path_params["name"])
        return found.answer(request) if found else Response("There is no such file.", 404, media_type="text/plain")

    router = APIRouter(include_in_schema=False)
    router.routes += [Route("/", page), Route("/static/{name}", static)]
    router.include_router(api_routes(door, settings))
    return router


def read_files() -> dict[str, WebFile]:
    """All files of gateway/web by name."""
    found = {}
    for entry in files("gateway").joinpath(WEB).iterdir():
        media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            found[entry.name] = WebFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
