"""POST /v1/chat/completions: a conversation becomes a prompt by the target's template, and goes on."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.generation.generate import Event, RoundEvent
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.transcript import GeneratedToken
from gateway.rest.errors import MissingParameter
from gateway.rest.generate import (
    CHAT_NAMES,
    Responder,
    ResponseHeader,
    ResponseSpec,
    check_prompt_len,
    generation_request,
)
from gateway.rest.middleware import ParsedBodyRoute, RestSettings
from gateway.rest.openapi import documented_answer
from gateway.rest.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChoiceBuffer,
    Finish,
    chat_logprobs,
    finish_of,
)
from gateway.rest.schemas import ChatRequest, Message, StreamOptions
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from outrider.errors import InvalidRequest


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    """The route."""
    router, responder = APIRouter(route_class=ParsedBodyRoute), Responder(frontend, settings)

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=documented_answer(ChatChunk))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Says what the assistant says next."""
        shared = generation_request(body, frontend.model_name)
        asked = await _with_prompt(shared, body, frontend.chat_template, settings.max_prompt_chars)

        async def make_formatter(header: ResponseHeader, _: Sequence[CheckedRequest]) -> ChatFormatter:
            return ChatFormatter(header, frontend.backend.tokenizer, bool(body.logprobs), bool(body.return_token_ids))

        stream = (body.stream_options or StreamOptions()) if body.stream else None
        return await responder.respond(request, ResponseSpec([asked], CHAT_NAMES, "chatcmpl", stream, make_formatter))

    return router


async def _with_prompt(
    shared: GenerationRequest, body: ChatRequest, template: ChatTemplate, max_prompt_chars: int
) -> GenerationRequest:
    """Raises InvalidRequest about fields that do not go together and about what the template does not take."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "absent unless logprobs is true")
    if body.tool_choice is not None and not body.tools:
        raise InvalidRequest("tool_choice", body.tool_choice, "absent without tools")
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens", older, f"absent, or equal to max_completion_tokens, which is {newer}")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    messages = [_plain(number, message) for number, message in enumerate(body.messages)]
    rendered = await template.prompt(messages, tools or None)
    check_prompt_len("messages", rendered.text, max_prompt_chars)
    return replace(
        shared,
        text=rendered.text,
        add_special_tokens=rendered.add_special_tokens,
        max_tokens=older if newer is None else newer,
        logprob_count=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _plain(number: int, message: Message) -> dict[str, Any]:
    """A message for the template: its text in one piece, its calls with arguments to look into, nothing unsaid.

    Raises MissingParameter about one that says nothing.
    """
    if message.content is None and not message.tool_calls:
        raise MissingParameter(f"messages.{number}.content")
    plain = message.model_dump(exclude_none=True)
    if message.content is not None:
        plain["content"] = message.text
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


@dataclass(slots=True)
class ChatFormatter:
    """Answers to a conversation, whole and in chunks."""

    header: ResponseHeader
    tokenizer: Tokenizer
    tells_logprobs: bool
    tells_token_ids: bool
    begun: set[int] = field(default_factory=set)
    """Choices that have said who speaks."""

    def chunks(self, index: int, event: Event) -> Sequence[ChatChunk]:
        """A choice begins with its role and ends with its finish reason. What is empty is not sent."""
        chunks = []
        if index not in self.begun:
            self.begun.add(index)
            chunks.append(self._chunk(index, ChatDelta(role="assistant", content="")))
        if isinstance(event, RoundEvent):
            text, logprobs = "".join(token.text for token in event.tokens), self._logprobs(event.tokens)
            if text or (logprobs and logprobs.content) or self.tells_token_ids:
                chunks.append(self._chunk(index, ChatDelta(content=text), logprobs, tokens=event.tokens))
        else:
            if event.text_delta:
                chunks.append(self._chunk(index, ChatDelta(content=event.text_delta)))
            chunks.append(self._chunk(index, ChatDelta(), finish=finish_of(event)))
        return chunks

    def bare_chunk(self) -> ChatChunk:
        """A chunk without choices."""
        return ChatChunk(**asdict(self.header), object="chat.completion.chunk", choices=[])

    def body(self, choices: Sequence[ChoiceBuffer]) -> ChatCompletion:
        """The whole answer."""
        told = []
        for index, buffer in enumerate(choices):
            choice = ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content=buffer.text, refusal=None),
                logprobs=self._logprobs(buffer.tokens),
                finish_reason=buffer.finish_reason,
            )
            if self.tells_token_ids:
                choice.token_ids = [token.token_id for token in buffer.tokens]
            told.append(choice)
        return ChatCompletion(**asdict(self.header), object="chat.completion", choices=told)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish: Finish | None = None,
        tokens: Sequence[GeneratedToken] = (),
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        if self.tells_token_ids:
            choice.token_ids = [token.token_id for token in tokens]
        return ChatChunk(**asdict(self.header), object="chat.completion.chunk", choices=[choice])

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self.tokenizer) if self.tells_logprobs else None
