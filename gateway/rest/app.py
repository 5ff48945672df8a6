"""Puts the REST surface together: middleware, error handlers, routes. Decides nothing about a request."""

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.generation.frontend import Frontend
from gateway.rest import chat, completions, failures, status
from gateway.rest.answer_counts import AnswerCounts
from gateway.rest.documents import DocumentedApp
from gateway.rest.limits import BodyLimits
from gateway.rest.page import page_routes
from gateway.rest.request_context import RequestContext
from gateway.rest.settings import RestSettings
from gateway.rest.site_guard import CrossOrigin, SiteGuard
from outrider.errors import OutriderError
from outrider.metrics_server import Registry

EXPOSED_HEADERS = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")
DESCRIPTION = "What OpenAI's clients speak, answered by speculative decoding. docs/rest.md has every field."


def build_app(door: Frontend, settings: RestSettings, registry: Registry) -> FastAPI:
    """The application: /v1, the routes for operators, and the page."""
    app = DocumentedApp(
        title="Outrider",
        description=DESCRIPTION,
        version=version("outrider"),
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Spans of its own would stand between ours and the services', with the query in them.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.add_exception_handler(OutriderError, failures.told)
    app.add_exception_handler(RequestValidationError, failures.misfit)
    app.add_exception_handler(HTTPException, failures.unrouted)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(SiteGuard, sites=settings.sites)
    if settings.sites.origins:
        app.add_middleware(
            CrossOrigin,
            allow_origins=settings.sites.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestContext, counts=AnswerCounts(registry))
    app.include_router(completions.routes(door, settings))
    app.include_router(chat.routes(door, settings))
    app.include_router(status.routes(door, registry))
    app.include_router(page_routes(door, settings))
    return app
