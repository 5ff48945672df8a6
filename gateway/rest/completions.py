"""POST /v1/completions: one prompt or several, as text or as token ids, and how they go on."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.generation.generate import Event, RoundEvent
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.transcript import GeneratedToken, PromptToken
from gateway.rest.generate import (
    TEXT_NAMES,
    Responder,
    ResponseHeader,
    ResponseSpec,
    check_prompt_len,
    generation_request,
)
from gateway.rest.middleware import ParsedBodyRoute, RestSettings
from gateway.rest.openapi import documented_answer
from gateway.rest.responses import (
    ChoiceBuffer,
    Finish,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    finish_of,
    text_logprobs,
)
from gateway.rest.schemas import CompletionRequest, StreamOptions
from gateway.text.tokenizer import Tokenizer
from outrider.errors import InvalidRequest

Tokens = Sequence[GeneratedToken | PromptToken]


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    """The route."""
    router, responder = APIRouter(route_class=ParsedBodyRoute), Responder(frontend, settings)

    @router.post("/v1/completions", response_model=TextCompletion, responses=documented_answer(TextCompletion))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Goes on with each prompt; prompts have choices of their own, numbered through in order."""
        requests = generation_requests(body, frontend.model_name, settings.max_prompt_chars)
        tokenizer = frontend.backend.tokenizer

        async def make_formatter(header: ResponseHeader, plans: Sequence[CheckedRequest]) -> CompletionFormatter:
            echo = [await _text(prompt, tokenizer) for prompt in body.prompts] if body.echo else []
            has_logprobs, has_ids = body.logprobs is not None, bool(body.return_token_ids)
            return CompletionFormatter(header, tokenizer, has_logprobs, has_ids, echo, plans[0].sample_count)

        stream = (body.stream_options or StreamOptions()) if body.stream else None
        return await responder.respond(request, ResponseSpec(requests, TEXT_NAMES, "cmpl", stream, make_formatter))

    return router


def generation_requests(
    body: CompletionRequest, served_model: str, max_prompt_chars: int
) -> Sequence[GenerationRequest]:
    """A request for each prompt. Raises InvalidRequest about fields that do not go together, and UnknownModel."""
    shared = generation_request(body, served_model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of", body.best_of, f"equal to n, which is {body.n or 1}")
    # The gateway echoes with log-probabilities only; without them nothing of the prompt is computed for it.
    shared = replace(shared, logprob_count=body.logprobs, echo=bool(body.echo) and body.logprobs is not None)
    requests, prompts = [], body.prompts
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_prompt_len(f"prompt.{number}" if len(prompts) > 1 else "prompt", prompt, max_prompt_chars)
            requests.append(replace(shared, text=prompt))
        else:
            requests.append(replace(shared, token_ids=tuple(prompt)))
    return requests


async def _text(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    """A prompt as it is echoed: as it came, or as its tokens are spelled."""
    return prompt if isinstance(prompt, str) else "".join(await tokenizer.spell(prompt))


@dataclass(slots=True)
class CompletionFormatter:
    """How prompts go on, whole and in chunks. `prompts` are the texts to say first, none for no echo; every prompt has
    sample_count choices.
    """

    header: ResponseHeader
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

    def chunks(self, index: int, event: Event) -> Sequence[TextCompletion]:
        """A choice begins with its prompt, if that is wanted, and ends with its finish reason.

        Only the first choice of a prompt brings the prompt's log-probabilities; the others wait for them.
        """
        number = index // self.sample_count
        if isinstance(event, RoundEvent) and event.prompt_tokens:
            self.prompt_tokens[number] = event.prompt_tokens
        if self.prompts and self.tells_logprobs and number not in self.prompt_tokens:
            self.held[number].append((index, event))
            return []
        events = [(index, event), *self.held.pop(number, [])]
        return [chunk for each in events for chunk in self._chunks(*each)]

    def bare_chunk(self) -> TextCompletion:
        """A chunk without choices."""
        return self._envelope([])

    def body(self, choices: Sequence[ChoiceBuffer]) -> TextCompletion:
        """The whole answer."""
        told = []
        for index, buffer in enumerate(choices):
            echoed = choices[index - index % self.sample_count].prompt_tokens
            echo = self.prompts[index // self.sample_count] if self.prompts else ""
            logprobs, said = self._logprobs(echoed, 0), self._logprobs(buffer.tokens, len(echo))
            if logprobs is not None and said is not None:
                for name in TextLogprobs.model_fields:
                    getattr(logprobs, name).extend(getattr(said, name))
            told.append(self._choice(index, echo + buffer.text, logprobs, buffer.finish_reason, buffer.tokens))
        return self._envelope(told)

    def _chunks(self, index: int, event: Event) -> Sequence[TextCompletion]:
        chunks: list[TextCompletion] = []
        if index not in self.offsets:
            self.offsets[index] = 0
            if self.prompts:
                number = index // self.sample_count
                chunks += self._delta(index, self.prompts[number], self.prompt_tokens.get(number, ()))
        if isinstance(event, RoundEvent):
            return [*chunks, *self._delta(index, "".join(token.text for token in event.tokens), event.tokens)]
        chunks += self._delta(index, event.text_delta, ())
        return [*chunks, self._envelope([self._choice(index, "", None, finish_of(event))])]

    def _delta(self, index: int, text: str, tokens: Tokens) -> Sequence[TextCompletion]:
        """A chunk, unless there is nothing to tell."""
        start = self.offsets[index]
        self.offsets[index] += len(text)
        logprobs = self._logprobs(tokens, start) if tokens else None
        choice = self._choice(index, text, logprobs, tokens=tokens)
        return [self._envelope([choice])] if text or logprobs or choice.token_ids else []

    def _logprobs(self, tokens: Tokens, start: int) -> TextLogprobs | None:
        return text_logprobs(tokens, self.tokenizer, start) if self.tells_logprobs else None

    def _choice(
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
        return TextCompletion(**asdict(self.header), object="text_completion", choices=choices)
