"""Puts the REST surface together: middleware, error handlers, routes."""

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

import outrider
from gateway.generation.frontend import Frontend
from gateway.rest import page, status, tokens
from gateway.rest.anthropic import messages, messages_answer
from gateway.rest.bodies import BodyLimits
from gateway.rest.guard import KeyGuard, SiteGuard
from gateway.rest.ids import RequestIds
from gateway.rest.openai import chat, completions, responses_api, responses_api_answer
from gateway.rest.openai.models import ChatChunk
from gateway.rest.openapi import DocumentedApp
from gateway.rest.server import OriginForm
from gateway.rest.settings import RestSettings
from gateway.rest.status import Scrape
from gateway.rest.validation import handle_error
from outrider.errors import OutriderError

DESCRIPTION = "What OpenAI's clients speak, answered by speculative decoding. docs/rest.md has every field."


def build_app(frontend: Frontend, settings: RestSettings, registry: CollectorRegistry, scrape: Scrape) -> FastAPI:
    """The application: /v1, the routes for operators, and the page; it counts in the registry, and shows a scrape."""
    app = DocumentedApp(
        title="Outrider",
        description=DESCRIPTION,
        version=outrider.__version__,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Spans of its own would stand between ours and the services', with the query in them.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for kind in (OutriderError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle_error)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimits, settings=settings)
    if settings.door is not None:
        app.add_middleware(KeyGuard, door=settings.door)
    app.add_middleware(SiteGuard, sites=settings.sites)
    app.add_middleware(RequestIds, registry=registry, is_leaving=lambda: frontend.admission.is_leaving)
    app.add_middleware(OriginForm)
    app.include_router(completions.routes(frontend, settings))
    app.include_router(chat.routes(frontend, settings))
    app.include_router(messages.routes(frontend, settings))
    app.include_router(responses_api.routes(frontend, settings))
    app.has_keys = settings.door is not None
    app.streamed = (ChatChunk, *messages_answer.EVENTS, *responses_api_answer.EVENTS)
    app.include_router(_with_heads(tokens.routes(frontend, settings)))
    app.include_router(_with_heads(status.routes(frontend, scrape)))
    app.include_router(page.routes(frontend, settings))
    return app


def _with_heads(router: APIRouter) -> APIRouter:
    """The router, whose routes that are read also answer those who ask for the head alone."""
    for route in [*router.routes]:
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            router.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    return router
