"""POST /v1/chat/completions: a conversation becomes a prompt by the target's template, and goes on."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.generation.request import CheckedRequest
from gateway.rest import responses
from gateway.rest.errors import MissingParameter
from gateway.rest.generate import CHAT_NAMES, Responder, check_prompt_len, generation_request
from gateway.rest.middleware import ParsedBodyRoute, RestSettings
from gateway.rest.openapi import documented_answer
from gateway.rest.responses import ChoiceBuffer, Envelope, Finish, ResponseHeader, Tokens
from gateway.rest.schemas import ChatRequest, Message
from outrider.errors import InvalidRequest


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    router = APIRouter(route_class=ParsedBodyRoute)
    documented = documented_answer(responses.ChatChunk)

    @router.post("/v1/chat/completions", response_model=responses.ChatCompletion, responses=documented)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Says what the assistant says next."""
        shared = generation_request(body, frontend.model_name)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs", body.top_logprobs, "absent unless logprobs is true")
        if body.tool_choice is not None and not body.tools:
            raise InvalidRequest("tool_choice", body.tool_choice, "absent without tools")
        newer, older = body.max_completion_tokens, body.max_tokens
        if newer is not None and older is not None and newer != older:
            raise InvalidRequest("max_tokens", older, f"absent, or equal to max_completion_tokens, which is {newer}")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        rendered = await frontend.chat_template.prompt(template_messages(body.messages), tools or None)
        check_prompt_len("messages", rendered.text, settings.max_prompt_chars)
        generation = replace(
            shared,
            text=rendered.text,
            add_special_tokens=rendered.add_special_tokens,
            max_tokens=older if newer is None else newer,
            logprob_count=(body.top_logprobs or 0) if body.logprobs else None,
        )

        async def make_formatter(header: ResponseHeader, _: Sequence[CheckedRequest]) -> ChatFormatter:
            return ChatFormatter(header, frontend.backend.tokenizer, bool(body.logprobs), bool(body.return_token_ids))

        responder = Responder(frontend, settings, body, [generation], CHAT_NAMES, "chatcmpl", make_formatter)
        return await responder.respond(request.receive)

    return router


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as templates take it; raises MissingParameter and InvalidRequest about the message at fault."""
    return [_template_message(number, message) for number, message in enumerate(messages)]


def _template_message(number: int, message: Message) -> dict[str, Any]:
    """A message as templates take it: its text in one piece, arguments of calls as objects, and no absent field.

    Raises MissingParameter about one without content and calls.
    """
    if message.content is None and not message.tool_calls:
        raise MissingParameter(f"messages.{number}.content")
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    for call_number, call in enumerate(plain.get("tool_calls", ())):
        text = call["function"]["arguments"]
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            field_name = f"messages.{number}.tool_calls.{call_number}.function.arguments"
            raise InvalidRequest(field_name, text, "a JSON object as text")
        call["function"]["arguments"] = arguments
    return plain


@dataclass
class ChatFormatter(responses.ResponseFormatter):
    """Answers to a conversation."""

    def opening(self, index: int) -> list[Envelope]:
        chunk = self.chunk(index, "")
        chunk.choices[0].delta.role = "assistant"
        return [chunk]

    def chunk(self, index: int, text: str, tokens: Tokens = (), finish: Finish | None = None) -> responses.ChatChunk:
        choice = responses.ChatChunkChoice(
            index=index,
            delta=responses.ChatDelta() if finish else responses.ChatDelta(content=text),
            logprobs=self._logprobs(tokens) if tokens else None,
            finish_reason=finish,
            **self.token_ids(tokens),
        )
        chunk = self.bare_chunk()
        chunk.choices.append(choice)
        return chunk

    def bare_chunk(self) -> responses.ChatChunk:
        return responses.ChatChunk(**asdict(self.header), object="chat.completion.chunk", choices=[])

    def body(self, choices: Sequence[ChoiceBuffer]) -> responses.ChatCompletion:
        answers = [
            responses.ChatChoice(
                index=index,
                message=responses.AssistantMessage(role="assistant", content="".join(each.texts), refusal=None),
                logprobs=self._logprobs(each.tokens),
                finish_reason=each.finish_reason,
                **self.token_ids(each.tokens),
            )
            for index, each in enumerate(choices)
        ]
        return responses.ChatCompletion(**asdict(self.header), object="chat.completion", choices=answers)

    def _logprobs(self, tokens: Tokens) -> responses.ChatLogprobs | None:
        """An entry a token, each with its bytes, because a token may be half a character."""
        if not self.has_logprobs:
            return None

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            piece = self.tokenizer.piece(token_id)
            return {"token": piece.text, "logprob": logprob, "bytes": list(piece.raw)}

        content = []
        for token in tokens:
            own = responses.logprob_of(token)
            top = zip(own.top_token_ids, own.top_logprobs, strict=True)
            alternatives = [responses.TopLogprob(**entry(*each)) for each in top]
            fields = entry(token.token_id, own.logprob)
            content.append(responses.ChatTokenLogprob(**fields, top_logprobs=alternatives))
        return responses.ChatLogprobs(content=content, refusal=None)
