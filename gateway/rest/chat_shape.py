"""Answers to a conversation, whole and in chunks. Knows no request and no HTTP."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from gateway.generation.generate import Event, RoundEvent
from gateway.generation.transcript import GeneratedToken
from gateway.rest.answering import Head
from gateway.rest.logprobs import chat_logprobs
from gateway.rest.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Finish,
)
from gateway.rest.spoken import Spoken, finish_of
from gateway.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ChatShape:
    """The shape of /v1/chat/completions."""

    head: Head
    tokenizer: Tokenizer
    tells_logprobs: bool
    tells_token_ids: bool
    begun: set[int] = field(default_factory=set)
    """Choices that have said who speaks."""
    choices: defaultdict[int, Spoken] = field(default_factory=lambda: defaultdict(Spoken))

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
        return ChatChunk(**asdict(self.head), object="chat.completion.chunk", choices=[])

    def take(self, index: int, event: Event) -> None:
        """Keeps an event for `body`."""
        self.choices[index].take(event)

    def body(self) -> ChatCompletion:
        """The whole answer."""
        choices = [self._choice(index, spoken) for index, spoken in sorted(self.choices.items())]
        return ChatCompletion(**asdict(self.head), object="chat.completion", choices=choices)

    def _choice(self, index: int, spoken: Spoken) -> ChatChoice:
        choice = ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content=spoken.text, refusal=None),
            logprobs=self._logprobs(spoken.tokens),
            finish_reason=spoken.finish_reason,
        )
        if self.tells_token_ids:
            choice.token_ids = [token.token_id for token in spoken.tokens]
        return choice

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
        return ChatChunk(**asdict(self.head), object="chat.completion.chunk", choices=[choice])

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self.tokenizer) if self.tells_logprobs else None
