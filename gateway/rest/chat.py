"""POST /v1/chat/completions: a conversation becomes a prompt by the target's template, and goes on."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.rest.answering import Answering, Head, Order
from gateway.rest.asks import CHAT_NAMES, ask_of, check_model, check_prompt_len
from gateway.rest.chat_request import ChatRequest, Message
from gateway.rest.chat_shape import ChatShape
from gateway.rest.documents import documented_answer
from gateway.rest.fields import StreamOptions
from gateway.rest.findings import MissingParameter
from gateway.rest.responses import ChatChunk, ChatCompletion
from gateway.rest.settings import RestSettings
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from outrider.errors import InvalidRequest


def routes(door: Frontend, settings: RestSettings) -> APIRouter:
    """The route."""
    router, answering = APIRouter(), Answering(door, settings)

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=documented_answer(ChatChunk))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Says what the assistant says next."""
        check_model(body, door.model_name)
        ask = await _ask(body, door.chat_template, settings)
        return await answering.answer(request, _order(body, ask, door.backend.tokenizer))

    return router


def _order(body: ChatRequest, ask: GenerationRequest, tokenizer: Tokenizer) -> Order:
    async def shape(head: Head, _: Sequence[CheckedRequest]) -> ChatShape:
        return ChatShape(head, tokenizer, bool(body.logprobs), bool(body.return_token_ids))

    stream = (body.stream_options or StreamOptions()) if body.stream else None
    return Order([ask], CHAT_NAMES, "chatcmpl", stream, shape)


async def _ask(body: ChatRequest, template: ChatTemplate, settings: RestSettings) -> GenerationRequest:
    """Raises InvalidRequest about fields that do not go together and about what the template does not take."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "absent unless logprobs is true")
    if body.tool_choice is not None and not body.tools:
        raise InvalidRequest("tool_choice", body.tool_choice, "absent without tools")
    ask = replace(
        ask_of(body), max_tokens=_max_tokens(body), logprob_count=(body.top_logprobs or 0) if body.logprobs else None
    )
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    rendered = await template.prompt([_plain(*each) for each in enumerate(body.messages)], tools or None)
    check_prompt_len("messages", rendered.text, settings.max_prompt_chars)
    return replace(ask, text=rendered.text, add_special_tokens=rendered.add_special_tokens)


def _max_tokens(body: ChatRequest) -> int | None:
    """The limit by its newer or its older name."""
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens", older, f"absent, or equal to max_completion_tokens, which is {newer}")
    return older if newer is None else newer


def _plain(number: int, message: Message) -> dict[str, Any]:
    """A message for the template: its text in one piece, its calls with arguments to look into, nothing unsaid.

    Raises MissingParameter about one that says nothing.
    """
    if message.content is None and not message.tool_calls:
        raise MissingParameter(f"messages.{number}.content is missing", field=f"messages.{number}.content")
    plain = message.model_dump(exclude_none=True)
    if message.content is not None:
        plain["content"] = message.text
    for call_number, call in enumerate(plain.get("tool_calls", ())):
        field = f"messages.{number}.tool_calls.{call_number}.function.arguments"
        call["function"]["arguments"] = _object(field, call["function"]["arguments"])
    return plain


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(field, text, "a JSON object as text")
    return found
