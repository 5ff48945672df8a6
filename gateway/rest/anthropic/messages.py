"""POST /v1/messages and /v1/messages/count_tokens: what Anthropic's clients speak."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.generation.frontend import Frontend
from gateway.rest.answering import Responder, ResponseHeader
from gateway.rest.anthropic import messages_answer as answer
from gateway.rest.anthropic.messages_body import CountTokensRequest, MessagesRequest, translated
from gateway.rest.bodies import ignored_header
from gateway.rest.figures import ResponseFigures
from gateway.rest.openapi import MessagesErrorBody, documented, documented_answer
from gateway.rest.settings import RestSettings
from gateway.rest.validation import route_class


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    router = APIRouter(route_class=route_class(settings))
    answers = documented_answer(*answer.EVENTS, error=MessagesErrorBody, is_typed=True)
    errors = documented(400, 403, 404, 408, 413, 415, error=MessagesErrorBody)
    variables = frontend.chat_template.variables

    @router.post("/v1/messages", response_model=answer.AnthropicMessage, responses=answers)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Says what the assistant says next, in Anthropic's words."""
        translation = translated(body, variables)
        asked = await translation.asked(frontend, settings)

        async def make_writer(header: ResponseHeader, figures: ResponseFigures) -> answer.MessageWriter:
            return answer.MessageWriter(header, figures, body.max_tokens)

        names, ignored = translation.gateway_names, asked.ignored
        responder = Responder(
            frontend, settings, bool(body.stream), [asked.request], names, "msg_", make_writer, ignored, answer.PING
        )
        return await responder.respond(request)

    @router.post("/v1/messages/count_tokens", response_model=answer.MessagesTokenCount, responses=errors)
    async def count_tokens(body: CountTokensRequest) -> Response:
        """How many tokens the prompt of a conversation has."""
        translation = translated(body, variables)
        asked = await translation.asked(frontend, settings)
        text, special = asked.request.text or "", asked.request.add_special_tokens
        prompt = await frontend.backend.tokenizer.encode(text, special=special)
        return JSONResponse({"input_tokens": len(prompt)}, headers=ignored_header(asked.ignored))

    return router
