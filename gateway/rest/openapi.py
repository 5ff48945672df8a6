"""What the OpenAPI document says of errors and of bodies that no model describes."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from gateway.rest.responses import ChatChunk

SCHEMAS = "#/components/schemas/"
JSON_TEXT = {"type": "string", "contentMediaType": "application/json"}
MEANINGS = {
    400: "The request must change; `param` names the field.",
    403: "A page of another site asked, which the operator did not allow.",
    404: "There is no such model or path.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not said to be JSON in UTF-8.",
    429: "As many requests wait as may; try again after `retry-after`.",
    500: "Something went wrong that should not have.",
    503: "The target is away; try again after `retry-after`.",
    504: "The deadline passed.",
}


class DocumentedApp(FastAPI):
    """An application whose document has no errors but ours: the framework adds its own to every route with a body."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        operations = (operation for path in document["paths"].values() for operation in path.values())
        for operation in operations:
            operation["responses"].pop("422", None)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        # No route answers whole with what a stream of chat consists of.
        chunk = ChatChunk.model_json_schema(ref_template=f"{SCHEMAS}{{model}}", mode="serialization")
        schemas |= {**chunk.pop("$defs", {}), ChatChunk.__name__: chunk}
        return document


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetails


def documented(*statuses: int, text: str = "") -> dict[int | str, dict[str, Any]]:
    """The responses of a route beside its JSON: errors, and a media type of text when the route answers with one."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": MEANINGS[status]} for status in (*statuses, 500)
    }
    if text:
        responses[200] = {"content": {text: {"schema": {"type": "string"}}}, "description": "Text."}
    return responses


def documented_answer(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that generates: whole as JSON, or chunks in a stream, and what can go wrong before."""
    contents = [{"$ref": f"{SCHEMAS}{model.__name__}"} for model in (chunk, ErrorBody)]
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "type": "string",
                "description": "A chunk as JSON; last [DONE], or instead of it an error as JSON.",
                "anyOf": [{"const": "[DONE]"}, *({**JSON_TEXT, "contentSchema": each} for each in contents)],
            }
        },
    }
    return documented(400, 403, 404, 408, 413, 415, 429, 503, 504) | {
        200: {
            "content": {"text/event-stream": {"itemSchema": event}},
            "description": "The answer, whole or as server-sent events when `stream` is true.",
        }
    }
