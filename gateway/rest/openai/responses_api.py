"""POST /v1/responses: what OpenAI's newer clients speak. Every request brings its whole conversation."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.rest.answering import Responder, ResponseHeader
from gateway.rest.figures import ResponseFigures
from gateway.rest.openai import responses_api_answer as answer
from gateway.rest.openai.responses_api_body import FunctionTool, ResponsesRequest, translated
from gateway.rest.openapi import documented_answer
from gateway.rest.settings import RestSettings
from gateway.rest.validation import route_class
from outrider.parameters import SamplingParameters


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    router = APIRouter(route_class=route_class(settings))
    answers = documented_answer(*answer.EVENTS, is_typed=True)

    @router.post("/v1/responses", response_model=answer.ResponseBody, responses=answers)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Says what the assistant says next, as items."""
        translation = translated(body)
        asked = await translation.asked(frontend, settings)

        async def make_writer(header: ResponseHeader, figures: ResponseFigures) -> answer.ResponseWriter:
            obfuscates = body.stream_options is not None and bool(body.stream_options.include_obfuscation)
            return answer.ResponseWriter(header, figures, repeated(body, figures.requests[0].spec.sampling), obfuscates)

        names, ignored = translation.gateway_names, asked.ignored
        responder = Responder(
            frontend, settings, bool(body.stream), [asked.request], names, answer.ID_PREFIX, make_writer, ignored
        )
        return await responder.respond(request)

    return router


def repeated(body: ResponsesRequest, sampling: SamplingParameters) -> answer.ResponseEcho:
    """Fields of a request that its response repeats, with the defaults that took effect. Only served tools count."""
    values = body.model_dump(include={"tool_choice", "text", "reasoning"}, by_alias=True, exclude_none=True)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or () if isinstance(tool, FunctionTool)]
    return answer.ResponseEcho(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": None, "summary": None, **values.get("reasoning", {})},
        temperature=sampling.temperature,
        text={"format": {"type": "text"}, **values.get("text", {})},
        tool_choice=values.get("tool_choice", "auto"),
        tools=[{"parameters": None, "strict": None, **tool} for tool in tools],
        top_p=sampling.top_p,
    )
