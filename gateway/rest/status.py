"""Routes about the gateway: models, liveness, readiness, metrics, version."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

import outrider
from gateway.generation.frontend import Frontend
from gateway.rest.errors import UnknownModel
from gateway.rest.openapi import documented
from outrider.errors import NotReady, OutriderError, PeerLost
from outrider.parameters import GenerationDefaults

Scrape = Callable[[Sequence[str]], Awaitable[tuple[bytes, str]]]
"""Gives what a scraper reads, all of it or the series of some names, and its content type."""


class Model(BaseModel):
    """A served model; max_model_len and generation_defaults, which count where a request says nothing, are null while
    the target is away.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["outrider"] = "outrider"
    max_model_len: int | None
    generation_defaults: GenerationDefaults | None


class ModelList(BaseModel):
    """All names of the served model."""

    object: Literal["list"] = "list"
    data: list[Model]


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


DraftState = Literal["present", "absent", "misfit", "none"]


class Ready(BaseModel):
    """The target is there. The draft need not be: without it answers are the same, later. One that is a misfit answers,
    but is not used, and the gateway's log says why.

    `hosted` are the drafters in the target's own process, and `further_drafts` the drafts beside the first by name.
    `failing` is work in the background that is to start again, `left_out` says which targets are there and get no
    requests.
    """

    status: Literal["ready"] = "ready"
    target: Literal["present"] = "present"
    draft: DraftState
    further_drafts: dict[str, DraftState] = {}
    hosted: list[str] = []
    failing: list[str] = []
    left_out: list[str] = []


class Version(BaseModel):
    """Number of the release that this gateway runs."""

    version: str


def routes(frontend: Frontend, scrape: Scrape) -> APIRouter:
    router = APIRouter()

    def served(name: str) -> Model:
        target, created = frontend.backend.target.info, int(frontend.started_s)
        context_len, defaults = (None, None) if target is None else (target.context_len, target.defaults)
        return Model(id=name, created=created, max_model_len=context_len, generation_defaults=defaults)

    @router.get("/v1/models", responses=documented())
    async def models() -> ModelList:
        """The served model, by all its names."""
        return ModelList(data=[served(name) for name in frontend.names.listed])

    @router.get("/v1/models/{model:path}", responses=documented(404))
    async def model(model: str) -> Model:
        """The served model, by one of its names."""
        if model not in frontend.names:
            raise UnknownModel(model, frontend.model_name)
        return served(model)

    @router.get("/live", responses=documented())
    async def live() -> Alive:
        """Whether the process answers at all."""
        return Alive()

    @router.get("/ready", responses=documented(503))
    @router.get("/health", responses=documented(503))
    async def ready() -> Ready:
        """Whether requests can be served now; an error while the target is away, and when the gateway stops."""
        if frontend.admission.is_leaving:
            raise NotReady("The gateway is stopping")
        try:
            target = frontend.backend.target.present()
        except OutriderError as error:
            # What answers and does not fit is no target either, and another may come.
            raise error if isinstance(error, PeerLost) else NotReady(error.message) from None
        states: dict[str, DraftState] = {name: draft.state for name, draft in frontend.backend.drafts.items()}
        first = states.pop(next(iter(states), ""), "none")
        failing, left_out = list(frontend.backend.upkeep.failing), frontend.backend.target.left_out
        hosted = list(target.drafters)
        return Ready(draft=first, further_drafts=states, hosted=hosted, failing=failing, left_out=left_out)

    @router.get("/version", responses=documented(403))
    async def show_version() -> Version:
        """The version of the gateway."""
        return Version(version=outrider.__version__)

    @router.get("/metrics", response_class=Response, responses=documented(403, text="text/plain"))
    async def metrics(names: Annotated[list[str], Query(alias="name[]", default_factory=list)]) -> Response:
        """Figures for Prometheus in its text format, all or those of some names."""
        body, content_type = await scrape(names)
        return Response(body, headers={"content-type": content_type})

    return router
