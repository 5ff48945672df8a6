"""Parts of the OpenAPI document about errors, and about bodies that no model describes."""

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel

from gateway.rest.guard import is_open

SCHEMAS = "#/components/schemas/"
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
JSON_TEXT = {"type": "string", "contentMediaType": "application/json"}
MEANINGS = {
    400: "The request must change; `param` names the field.",
    401: "No API key came, or none that is known.",
    403: "A page of another site, or another name, that was not allowed; or the API key does not open this.",
    404: "There is no such model or path.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not said to be JSON in UTF-8.",
    429: "As many requests wait as may; try again after `retry-after`.",
    431: "Path and headers are too long.",
    500: "Something went wrong that should not have.",
    503: "The target is away, or the gateway stops; try again after `retry-after`.",
    504: "The deadline passed.",
}


class DocumentedApp(FastAPI):
    """An application whose document has no errors but ours: the framework adds its own to every route with a body.

    `streamed` are models of which streams consist, and that no route answers whole with.
    """

    streamed: Sequence[type[BaseModel]] = ()
    has_keys: bool = False
    """Whether API keys are asked for."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document of all routes."""
        document = super().openapi()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                operation["responses"].pop("422", None)
                if self.has_keys and not is_open(method.upper(), path):
                    operation["security"] = [{name: []} for name in SECURITY]
                    # In the shape of the route's other errors.
                    for status in (401, 403):
                        refusal = {**operation["responses"]["500"], "description": MEANINGS[status]}
                        operation["responses"].setdefault(str(status), refusal)
        if self.has_keys:
            document["components"]["securitySchemes"] = SECURITY
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for model in self.streamed:
            schema = model.model_json_schema(ref_template=f"{SCHEMAS}{{model}}", mode="serialization")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
        return document


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error, except of those below /v1/messages."""

    error: ErrorDetails


class MessagesErrorDetails(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """The body of every error below /v1/messages."""

    type: Literal["error"]
    error: MessagesErrorDetails


def documented(*statuses: int, text: str = "", error: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The responses of a route beside its JSON: errors, and a media type of text when the route answers with one."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": error, "description": MEANINGS[status]} for status in (*statuses, 500)
    }
    if text:
        responses[200] = {"content": {text: {"schema": {"type": "string"}}}, "description": "Text."}
    return responses


def documented_answer(
    *events: type[BaseModel], error: type[BaseModel] = ErrorBody, is_typed: bool = False
) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that generates: whole as JSON, or events in a stream, and what can go wrong before.

    Typed events have their type in the line before their data, and there is no [DONE].
    """
    contents = [{**JSON_TEXT, "contentSchema": {"$ref": f"{SCHEMAS}{model.__name__}"}} for model in (*events, error)]
    chunk = {
        "type": "string",
        "description": "A chunk as JSON; last [DONE], or instead of it an error as JSON.",
        "anyOf": [{"const": "[DONE]"}, *contents],
    }
    payload = {"type": "string", "description": "An event of that type as JSON.", "anyOf": contents}
    event = {
        "type": "object",
        "required": ["event", "data"] if is_typed else ["data"],
        "properties": {"event": {"type": "string"}, "data": payload} if is_typed else {"data": chunk},
    }
    return documented(400, 403, 404, 408, 413, 415, 429, 431, 503, 504, error=error) | {
        200: {
            "content": {"text/event-stream": {"itemSchema": event}},
            "description": "The answer, whole or as server-sent events when `stream` is true.",
        }
    }
