"""What one choice has said so far, for answers that are sent whole. Pure; knows no shape of an answer."""

from dataclasses import dataclass, field
from typing import Literal

from gateway.generation.generate import CompletionEvent, Event, RoundEvent
from gateway.generation.transcript import GeneratedToken, PromptToken
from outrider.errors import ProtocolViolation
from outrider.parameters import FinishReason


def finish_of(event: CompletionEvent) -> Literal["stop", "length"]:
    """OpenAI's word for why a choice ended: a token or a string that stops it, or its limit."""
    return "length" if event.finish_reason is FinishReason.LENGTH else "stop"


@dataclass(slots=True)
class Spoken:
    """A choice."""

    texts: list[str] = field(default_factory=list)
    tokens: list[GeneratedToken] = field(default_factory=list)
    prompt_tokens: tuple[PromptToken, ...] = ()
    end: CompletionEvent | None = None

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Why it ended; raises ProtocolViolation when it did not."""
        if self.end is None:
            raise ProtocolViolation("an answer was asked for before it was complete")
        return finish_of(self.end)

    def take(self, event: Event) -> None:
        """Adds an event."""
        if isinstance(event, RoundEvent):
            self.texts += [token.text for token in event.tokens]
            self.tokens += event.tokens
            self.prompt_tokens = self.prompt_tokens or event.prompt_tokens
        else:
            self.texts.append(event.text_delta)
            self.end = event
