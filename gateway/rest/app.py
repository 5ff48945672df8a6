"""Puts the REST surface together: middleware, error handlers, routes."""

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from gateway.generation.frontend import Frontend
from gateway.rest import chat, completions, page, status
from gateway.rest.middleware import BodyLimits, CrossOrigin, RequestIds, RestSettings, SiteGuard
from gateway.rest.openapi import DocumentedApp
from gateway.rest.validation import handle_http_exception, handle_outrider_error, handle_validation_error
from outrider.errors import OutriderError

EXPOSED_HEADERS = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")
DESCRIPTION = "What OpenAI's clients speak, answered by speculative decoding. docs/rest.md has every field."


def build_app(frontend: Frontend, settings: RestSettings, registry: CollectorRegistry) -> FastAPI:
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
    app.add_exception_handler(OutriderError, handle_outrider_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
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
    app.add_middleware(RequestIds, registry=registry)
    app.include_router(completions.routes(frontend, settings))
    app.include_router(chat.routes(frontend, settings))
    app.include_router(status.routes(frontend, registry))
    app.include_router(page.routes(frontend, settings))
    return app
