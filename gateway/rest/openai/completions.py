"""POST /v1/completions: one prompt or several, as text or as token ids, and how they go on."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.checks import check_room
from gateway.generation.events import Event, OutputToken, RoundEvent
from gateway.generation.frontend import Frontend
from gateway.generation.request import GenerationRequest
from gateway.rest.answering import ChoiceBuffer, Responder, ResponseHeader
from gateway.rest.asking.chat_body import GenerationFields, StreamOptions
from gateway.rest.asking.fields import MAX_COUNT, MAX_IDS, Text, ignored_in
from gateway.rest.asking.request import TEXT_NAMES, check_prompt_len, generation_request, in_names_of
from gateway.rest.figures import ResponseFigures
from gateway.rest.openai.chunks import ChunkWriter, ResponseFormatter, logprob_of
from gateway.rest.openai.models import Envelope, Finish, TextChoice, TextCompletion, TextLogprobs, Tokens, finish_of
from gateway.rest.openapi import documented_answer
from gateway.rest.settings import RestSettings
from gateway.rest.validation import route_class
from gateway.text.tokenizer import GAPS, Tokenizer
from outrider.answer import PromptToken
from outrider.errors import InvalidRequest, PromptTooLong, Unsupported
from outrider.parameters import MAX_LOGPROB_COUNT, MAX_SAMPLES, TokenId

MAX_PROMPTS = 64
PROMPT_KINDS = (
    "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids, and not empty"
)

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]


def _prompt_kind(value: object) -> str | None:
    """A list is of the kind of its first entry, so that only one kind is tried on all of them."""
    if isinstance(value, list):
        return {str: "<texts>", int: "<ids>", list: "<id lists>"}.get(type(value[0])) if value else None
    return "<text>" if isinstance(value, str) else None


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<id lists>")],
    Discriminator(_prompt_kind, custom_error_type="prompt_kind", custom_error_message=PROMPT_KINDS),
]


class CompletionRequest(GenerationFields):
    """A prompt, or several, and how to go on."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT, description="0 with echo: no more.")] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROB_COUNT)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES, description="Must equal n.")] | None = None
    suffix: Annotated[str | None, Field(description="What stands behind the gap that the answer fills.")] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        many = [each for each in prompt if not isinstance(each, int)]
        return many or [[each for each in prompt if isinstance(each, int)]]


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    router = APIRouter(route_class=route_class(settings))

    async def check_lengths(request: Request) -> None:
        """Refuses prompts of too many ids before each of a million ids is looked at, which others would feel."""
        body, target = getattr(request.state, "json", None), frontend.backend.target.info
        if target is None:
            return
        match body:
            case {"prompt": [int(), *_] as ids}:
                prompts = [ids]
            case {"prompt": [list(), *_] as lists}:
                prompts = [each for each in lists[:MAX_PROMPTS] if isinstance(each, list)]
            case _:
                prompts = []
        for ids in prompts:
            try:
                check_room(len(ids), target)
            except PromptTooLong as error:
                raise in_names_of(TEXT_NAMES, error) from None

    documented, checks = documented_answer(TextCompletion), [Depends(check_lengths)]

    @router.post("/v1/completions", response_model=TextCompletion, responses=documented, dependencies=checks)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Goes on with each prompt; prompts have choices of their own, numbered through in order."""
        shared = generation_request(body, frontend.names)
        if body.max_tokens == 0:
            for field, value, limit in (("echo", body.echo, True), ("use_beam_search", body.use_beam_search, False)):
                if bool(value) is not limit:
                    raise InvalidRequest("max_tokens", 0, f"at least 1 unless {field} is {str(limit).lower()}")
            # One is drawn, and not shown: a prompt is read only to go on.
            shared = replace(shared, max_tokens=1, scores=True)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequest("best_of", body.best_of, f"equal to n, which is {body.n or 1}")
        # The gateway echoes with log-probabilities only; without them nothing of the prompt is computed for it.
        shared = replace(shared, logprob_count=body.logprobs, echo=bool(body.echo) and body.logprobs is not None)
        prompts, tokenizer = body.prompts, frontend.backend.tokenizer
        generations = _generations(body, shared, tokenizer, settings)

        async def make_writer(header: ResponseHeader, figures: ResponseFigures) -> ChunkWriter:
            echo = [
                prompt if isinstance(prompt, str) else "".join(await tokenizer.spell(prompt))
                for prompt in (prompts if body.echo else ())
            ]
            has_logprobs, has_token_ids = body.logprobs is not None, bool(body.return_token_ids)
            samples = figures.requests[0].sample_count
            formatter = CompletionFormatter(header, tokenizer, has_logprobs, has_token_ids, echo, samples)
            return ChunkWriter(formatter, figures, body.stream_options or StreamOptions())

        streams, ignored = bool(body.stream), tuple(dict.fromkeys(ignored_in(body)))
        responder = Responder(frontend, settings, streams, generations, TEXT_NAMES, "cmpl-", make_writer, ignored)
        return await responder.respond(request)

    return router


def _generations(
    body: CompletionRequest, shared: GenerationRequest, tokenizer: Tokenizer, settings: RestSettings
) -> list[GenerationRequest]:
    """The requests of a body's prompts, which share everything else; raises InvalidRequest and Unsupported."""
    generations, prompts = [], body.prompts
    if body.suffix and body.echo:
        raise InvalidRequest("echo", True, "false or absent with suffix")
    for number, prompt in enumerate(prompts):
        name = f"prompt.{number}" if len(prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            text = tokenizer.around_gap(prompt, body.suffix) if body.suffix else prompt
            if text is None:
                lacking = f"the model's vocabulary has no tokens for {' or '.join(GAPS)}"
                raise Unsupported(f"suffix is not served: {lacking}", field="suffix")
            check_prompt_len(name, text, settings.max_prompt_chars)
            generations.append(replace(shared, text=text))
        elif body.suffix:
            raise InvalidRequest(name, "token ids", "text with suffix")
        else:
            generations.append(replace(shared, token_ids=prompt))
    return generations


@dataclass
class CompletionFormatter(ResponseFormatter):
    """Formatter of prompts that go on. `prompts` are texts to echo, none for no echo; each has sample_count choices."""

    prompts: Sequence[str]
    sample_count: int
    prompt_tokens: dict[int, tuple[PromptToken, ...]] = field(default_factory=dict, init=False)
    """Tokens of every prompt whose log-probabilities have come."""
    offsets: Counter[int] = field(default_factory=Counter, init=False)
    """Length of the text of a choice that is out."""
    held: defaultdict[int, list[tuple[int, Event]]] = field(default_factory=lambda: defaultdict(list), init=False)

    def chunks(self, index: int, event: Event) -> list[Envelope]:
        """Chunks of an event; a prompt's first choice brings its log-probabilities, and the others wait for them."""
        number = index // self.sample_count
        if isinstance(event, RoundEvent) and event.prompt_tokens:
            self.prompt_tokens[number] = event.prompt_tokens
        if self.prompts and self.has_logprobs and number not in self.prompt_tokens:
            self.held[number].append((index, event))
            return []
        chunks_of = super().chunks
        return [chunk for each in ((index, event), *self.held.pop(number, ())) for chunk in chunks_of(*each)]

    def opening(self, index: int) -> list[Envelope]:
        number = index // self.sample_count
        return self.delta(index, self.prompts[number], self.prompt_tokens.get(number, ())) if self.prompts else []

    def chunk(self, index: int, text: str, tokens: Tokens = (), finish: Finish | None = None) -> TextCompletion:
        start = self.offsets[index]
        self.offsets[index] += len(text)
        logprobs = self._logprobs(tokens, start) if tokens and self.has_logprobs else None
        return self._envelope([self._choice(index, text, logprobs, finish, tokens)])

    def bare_chunk(self) -> TextCompletion:
        return self._envelope([])

    def body(self, choices: Sequence[ChoiceBuffer]) -> TextCompletion:
        answers = []
        for index, each in enumerate(choices):
            echo = self.prompts[index // self.sample_count] if self.prompts else ""
            logprobs = None
            if self.has_logprobs:
                logprobs = self._logprobs(choices[index - index % self.sample_count].prompt_tokens, 0)
                for name, values in self._logprobs(each.tokens, len(echo)):
                    getattr(logprobs, name).extend(values)
            text = echo + "".join(each.texts)
            answers.append(self._choice(index, text, logprobs, finish_of(each.completion), each.tokens))
        return self._envelope(answers)

    def _choice(
        self, index: int, text: str, logprobs: TextLogprobs | None, finish: Finish | None, tokens: Tokens
    ) -> TextChoice:
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish, **self.token_ids(tokens))

    def _envelope(self, choices: list[TextChoice]) -> TextCompletion:
        return TextCompletion(**asdict(self.header), object="text_completion", choices=choices)

    def _logprobs(self, tokens: Tokens, start: int) -> TextLogprobs:
        """A list for each fact. `start` is where in the text the first token's own text begins."""

        def alternatives(token: OutputToken | PromptToken) -> dict[str, float]:
            """The most probable tokens and the token itself. Of tokens that look alike the most probable stands."""
            own, found = logprob_of(token), dict[str, float]()
            top = zip(own.top_token_ids, own.top_logprobs, strict=True)
            for token_id, logprob in (*top, (token.token_id, own.logprob)):
                found.setdefault(self.tokenizer.piece(token_id).text, logprob)
            return found

        offsets = accumulate((len(token.text) for token in tokens), initial=start)
        return TextLogprobs(
            tokens=[self.tokenizer.piece(token.token_id).text for token in tokens],
            token_logprobs=[None if token.logprob is None else token.logprob.logprob for token in tokens],
            top_logprobs=[None if token.logprob is None else alternatives(token) for token in tokens],
            text_offset=[offset for offset, _ in zip(offsets, tokens, strict=False)],
        )
