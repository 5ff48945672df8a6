"""POST /v1/chat/completions: a conversation becomes a prompt by the target's template, and goes on."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.events import CompletionEvent, Event, RoundEvent
from gateway.generation.frontend import Frontend
from gateway.rest.answering import ChoiceBuffer, Responder, ResponseHeader
from gateway.rest.asking.chat_body import ChatRequest, StreamOptions
from gateway.rest.asking.conversation import conversation
from gateway.rest.asking.request import CHAT_NAMES
from gateway.rest.figures import ResponseFigures
from gateway.rest.openai.chunks import ChunkWriter, ResponseFormatter, logprob_of
from gateway.rest.openai.models import (
    AssistantMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    Envelope,
    Finish,
    FunctionDelta,
    MessageCall,
    Tokens,
    TopLogprob,
    finish_of,
)
from gateway.rest.openapi import documented_answer
from gateway.rest.settings import RestSettings
from gateway.rest.validation import route_class
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    router = APIRouter(route_class=route_class(settings))
    documented = documented_answer(ChatChunk)

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=documented)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Says what the assistant says next."""
        asked = await conversation(body, frontend, settings)

        async def make_writer(header: ResponseHeader, figures: ResponseFigures) -> ChunkWriter:
            has_token_ids, has_reasoning = bool(body.return_token_ids), body.include_reasoning is not False
            tokenizer = frontend.backend.tokenizer
            formatter = ChatFormatter(header, tokenizer, bool(body.logprobs), has_token_ids, has_reasoning)
            return ChunkWriter(formatter, figures, body.stream_options or StreamOptions())

        requests, ignored = [asked.request], asked.ignored
        responder = Responder(
            frontend, settings, bool(body.stream), requests, CHAT_NAMES, "chatcmpl-", make_writer, ignored
        )
        return await responder.respond(request)

    return router


@dataclass
class ChatFormatter(ResponseFormatter):
    """Answers to a conversation, with what the model thought before if has_reasoning."""

    has_reasoning: bool = True

    def chunks(self, index: int, event: Event) -> list[Envelope]:
        """Chunks of an event, as of any formatter: one for each delta, the first with what is said of the tokens."""
        chunks = [] if index in self.begun else self.opening(index)
        self.begun.add(index)
        tokens: Tokens = event.tokens if isinstance(event, RoundEvent) else ()
        deltas = [each for each in event.deltas if self.has_reasoning or not isinstance(each, ReasoningDelta)]
        for delta in deltas:
            chunks.append(self._chunk(index, _chat_delta(delta), tokens))
            tokens = ()
        if tokens and (self.has_logprobs or self.has_token_ids):
            chunks.append(self._chunk(index, ChatDelta(content=""), tokens))
        if isinstance(event, CompletionEvent):
            chunks.append(self.chunk(index, "", finish=finish_of(event)))
        return chunks

    def opening(self, index: int) -> list[Envelope]:
        chunk = self.chunk(index, "")
        chunk.choices[0].delta.role = "assistant"
        return [chunk]

    def chunk(self, index: int, text: str, tokens: Tokens = (), finish: Finish | None = None) -> ChatChunk:
        delta = ChatDelta() if finish else ChatDelta(content=text)
        return self._chunk(index, delta, tokens, finish)

    def _chunk(self, index: int, delta: ChatDelta, tokens: Tokens = (), finish: Finish | None = None) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(tokens) if tokens else None,
            finish_reason=finish,
            **self.token_ids(tokens),
        )
        chunk = self.bare_chunk()
        chunk.choices.append(choice)
        return chunk

    def bare_chunk(self) -> ChatChunk:
        return ChatChunk(**asdict(self.header), object="chat.completion.chunk", choices=[])

    def body(self, choices: Sequence[ChoiceBuffer]) -> ChatCompletion:
        answers = [
            ChatChoice(
                index=index,
                message=self._message(each.deltas),
                logprobs=self._logprobs(each.tokens),
                finish_reason=finish_of(each.completion),
                **self.token_ids(each.tokens),
            )
            for index, each in enumerate(choices)
        ]
        return ChatCompletion(**asdict(self.header), object="chat.completion", choices=answers)

    def _message(self, deltas: Sequence[Delta]) -> AssistantMessage:
        content = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
        reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
        calls = [MessageCall.begun(each) for each in deltas if isinstance(each, CallBegun)]
        for each in deltas:
            if isinstance(each, CallArguments):
                calls[each.index].function.arguments += each.text
        optional: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if reasoning and self.has_reasoning:
            optional["reasoning_content"] = reasoning
        text = None if calls and not content else content
        return AssistantMessage(role="assistant", content=text, refusal=None, **optional)

    def _logprobs(self, tokens: Tokens) -> ChatLogprobs | None:
        """An entry a token, each with its bytes, because a token may be half a character."""
        if not self.has_logprobs:
            return None

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            piece = self.tokenizer.piece(token_id)
            return {"token": piece.text, "logprob": logprob, "bytes": list(piece.raw)}

        content = []
        for token in tokens:
            own = logprob_of(token)
            top = zip(own.top_token_ids, own.top_logprobs, strict=True)
            alternatives = [TopLogprob(**entry(*each)) for each in top]
            fields = entry(token.token_id, own.logprob)
            content.append(ChatTokenLogprob(**fields, top_logprobs=alternatives))
        return ChatLogprobs(content=content, refusal=None)


def _chat_delta(delta: Delta) -> ChatDelta:
    match delta:
        case ContentDelta(text):
            return ChatDelta(content=text)
        case ReasoningDelta(text):
            return ChatDelta(reasoning_content=text)
        case CallBegun():
            call = MessageCall.begun(delta)
            return ChatDelta(tool_calls=[CallDelta(index=delta.index, **dict(call))])
        case CallArguments(index, text):
            function = FunctionDelta(arguments=text)
            return ChatDelta(tool_calls=[CallDelta(index=index, function=function)])
