"""How prompts go on, whole and in chunks, with the prompts themselves where they are wanted. Knows no HTTP."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from gateway.generation.generate import Event, RoundEvent
from gateway.generation.transcript import GeneratedToken, PromptToken
from gateway.rest.answering import Head
from gateway.rest.logprobs import text_logprobs
from gateway.rest.responses import Finish, TextChoice, TextCompletion, TextLogprobs
from gateway.rest.spoken import Spoken, finish_of
from gateway.text.tokenizer import Tokenizer

Tokens = Sequence[GeneratedToken | PromptToken]


@dataclass(slots=True)
class TextShape:
    """The shape of /v1/completions. `prompts` are the texts to say first, none for no echo; every prompt has
    sample_count choices.
    """

    head: Head
    tokenizer: Tokenizer
    tells_logprobs: bool
    tells_token_ids: bool
    prompts: Sequence[str]
    sample_count: int
    prompt_tokens: dict[int, tuple[PromptToken, ...]] = field(default_factory=dict)
    """Those of every prompt whose log-probabilities have come."""
    offsets: dict[int, int] = field(default_factory=dict)
    """How much text of a choice is out; a choice that is not there has not begun."""
    held: defaultdict[int, list[tuple[int, Event]]] = field(default_factory=lambda: defaultdict(list))
    choices: defaultdict[int, Spoken] = field(default_factory=lambda: defaultdict(Spoken))

    def chunks(self, index: int, event: Event) -> Sequence[TextCompletion]:
        """A choice begins with its prompt, if that is wanted, and ends with its finish reason.

        Only the first choice of a prompt brings the prompt's log-probabilities; the others wait for them.
        """
        number = index // self.sample_count
        if not self._awaits_prompt(number, event):
            events = [(index, event), *self.held.pop(number, [])]
            return [chunk for each in events for chunk in self._chunks(*each)]
        self.held[number].append((index, event))
        return []

    def bare_chunk(self) -> TextCompletion:
        """A chunk without choices."""
        return self._envelope([])

    def take(self, index: int, event: Event) -> None:
        """Keeps an event for `body`."""
        self.choices[index].take(event)
        self._awaits_prompt(index // self.sample_count, event)

    def body(self) -> TextCompletion:
        """The whole answer."""
        return self._envelope([self._choice(index, spoken) for index, spoken in sorted(self.choices.items())])

    def _awaits_prompt(self, number: int, event: Event) -> bool:
        """Whether the log-probabilities of a prompt are wanted and have not come, with this event neither."""
        if isinstance(event, RoundEvent) and event.prompt_tokens:
            self.prompt_tokens[number] = event.prompt_tokens
        return bool(self.prompts) and self.tells_logprobs and number not in self.prompt_tokens

    def _chunks(self, index: int, event: Event) -> Sequence[TextCompletion]:
        chunks: list[TextCompletion] = []
        if index not in self.offsets:
            text, tokens = self._echo(index)
            self.offsets[index] = 0
            chunks += self._delta(index, text, tokens)
        if isinstance(event, RoundEvent):
            return [*chunks, *self._delta(index, "".join(token.text for token in event.tokens), event.tokens)]
        chunks += self._delta(index, event.text_delta, ())
        return [*chunks, self._envelope([self._text_choice(index, "", None, finish_of(event))])]

    def _delta(self, index: int, text: str, tokens: Tokens) -> Sequence[TextCompletion]:
        """A chunk, unless there is nothing to tell."""
        start = self.offsets[index]
        self.offsets[index] += len(text)
        logprobs = self._logprobs(tokens, start) if tokens else None
        choice = self._text_choice(index, text, logprobs, tokens=tokens)
        return [self._envelope([choice])] if text or logprobs or choice.token_ids else []

    def _choice(self, index: int, spoken: Spoken) -> TextChoice:
        echo, echoed = self._echo(index)
        logprobs = self._logprobs(echoed, 0)
        if logprobs is not None:
            said = text_logprobs(spoken.tokens, self.tokenizer, len(echo))
            for name in TextLogprobs.model_fields:
                getattr(logprobs, name).extend(getattr(said, name))
        return self._text_choice(index, echo + spoken.text, logprobs, spoken.finish_reason, spoken.tokens)

    def _echo(self, index: int) -> tuple[str, Tokens]:
        """The prompt that a choice begins with, and its tokens if their log-probabilities are wanted."""
        if not self.prompts:
            return "", ()
        number = index // self.sample_count
        return self.prompts[number], self.prompt_tokens.get(number, ())

    def _logprobs(self, tokens: Tokens, start: int) -> TextLogprobs | None:
        return text_logprobs(tokens, self.tokenizer, start) if self.tells_logprobs else None

    def _text_choice(
        self,
        index: int,
        text: str,
        logprobs: TextLogprobs | None,
        finish: Finish | None = None,
        tokens: Tokens = (),
    ) -> TextChoice:
        choice = TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)
        if self.tells_token_ids:
            # An echoed prompt is not part of the answer.
            choice.token_ids = [token.token_id for token in tokens if isinstance(token, GeneratedToken)]
        return choice

    def _envelope(self, choices: list[TextChoice]) -> TextCompletion:
        return TextCompletion(**asdict(self.head), object="text_completion", choices=choices)
