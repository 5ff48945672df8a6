"""From a checked body to a response, streamed or whole: the same for both kinds of route.

Nothing is promised to a client before the frontend is open: until then every error has its status. Afterwards an error
is the last event of a stream, and there is no [DONE].
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.generation.generate import CompletionEvent, Event
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.transcript import SpeculationFigures
from gateway.rest.errors import UnknownModel, error_json, unexpected
from gateway.rest.middleware import RestSettings
from gateway.rest.responses import (
    ChoiceBuffer,
    Envelope,
    Facts,
    Metrics,
    PromptTokensDetails,
    SpeculativeDecoding,
    Usage,
)
from gateway.rest.schemas import GenerationFields, SpeculationFields, StreamOptions
from gateway.rest.sse import DONE, EventStream, data, line, while_there
from gateway.sessions.link import ModelInfo
from outrider.errors import InvalidRequest, OutriderError, PromptTooLong
from outrider.parameters import SETTINGS, Acceptance, Rule, SamplingParameters

# Chunks with padding have lengths that are multiples of this, so that a length tells little of the text.
PADDING = 32
SAMPLING = set(SamplingParameters.model_fields)
SETTING_NAMES = {name for names in SETTINGS.values() for name in names}
# What the gateway calls otherwise than the body of a route; every other field has one name.
COMMON_NAMES = {"sample_count": "n"}
TEXT_NAMES = {**COMMON_NAMES, "logprob_count": "logprobs", "token_ids": "prompt"}
CHAT_NAMES = {**COMMON_NAMES, "logprob_count": "top_logprobs", "prompt": "messages"}


def generation_request(fields: GenerationFields, served_model: str) -> GenerationRequest:
    """What a body asks the gateway for, all but the prompt and the log-probabilities.

    Raises UnknownModel about another model than the served one, and InvalidRequest about fields that do not go
    together.
    """
    if fields.model is not None and fields.model != served_model:
        raise UnknownModel(fields.model, served_model)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options", "given", "absent unless stream is true")
    sampling: dict[str, Any] = fields.model_dump(include=SAMPLING, exclude_none=True)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    speculation = fields.speculation or SpeculationFields()
    return GenerationRequest(
        max_tokens=fields.max_tokens,
        sampling=SamplingParameters.checked(sampling),
        seed=fields.seed,
        stops=tuple([fields.stop] if isinstance(fields.stop, str) else fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        speculation_enabled=speculation.enabled is not False,
        draft_count=speculation.draft_count if isinstance(speculation.draft_count, int) else None,
        acceptance=_acceptance(speculation),
        drafter=speculation.drafter or "",
        sample_count=fields.n,
        banned_words=tuple(fields.banned_words or ()),
        return_rounds=bool(speculation.return_rounds),
        cache_salt=fields.cache_salt or "",
    )


def _acceptance(speculation: SpeculationFields) -> Acceptance:
    rule = Rule(speculation.rule or Rule.MATCH)
    given = speculation.model_dump(include=SETTING_NAMES, exclude_none=True)
    for name, value in given.items():
        if name not in SETTINGS.get(rule, ()):
            raise InvalidRequest(f"speculation.{name}", value, f"absent under the rule {rule}")
    return Acceptance.checked({"rule": rule, **given}, "speculation.")


def check_prompt_len(field: str, text: str, most: int) -> None:
    """Raises InvalidRequest about a text that is too long to be encoded."""
    if len(text) > most:
        raise InvalidRequest.too_many(field, len(text), most, "characters")


def in_names_of(route: Mapping[str, str], error: OutriderError) -> OutriderError:
    """Gives an error the route's names of fields; returns it. Of several prompts, the one at fault is numbered."""
    number = error.metadata.get("request")
    names = {**route, **(dict.fromkeys(("prompt", "token_ids"), f"prompt.{number}") if number else {})}

    def name(field: str) -> str:
        first, dot, rest = field.removeprefix("sampling.").partition(".")
        return names.get(first, first) + dot + rest

    if isinstance(error, PromptTooLong):
        error.metadata.setdefault("field", "prompt")
    return error.rename_fields(name)


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """What is the same in every chunk of an answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class ResponseFormatter(Protocol):
    """How an answer looks on one route. Choices are numbered through over all prompts."""

    def chunks(self, index: int, event: Event) -> Sequence[Envelope]:
        """What a stream tells of an event."""

    def bare_chunk(self) -> Envelope:
        """A chunk without choices."""

    def body(self, choices: Sequence[ChoiceBuffer]) -> Envelope:
        """The whole answer."""


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """What a body asks for, and how its answer is to look."""

    requests: Sequence[GenerationRequest]
    names: Mapping[str, str]
    id_prefix: str
    stream: StreamOptions | None
    """None for a whole answer."""
    make_formatter: Callable[[ResponseHeader, Sequence[CheckedRequest]], Awaitable[ResponseFormatter]]


@dataclass(slots=True)
class ResponseFigures:
    """Counts what happened to a request: one entry of `plans` a prompt, each with as many choices as it has samples,
    numbered through.
    """

    plans: Sequence[CheckedRequest]
    max_draft_count: int
    return_rounds: bool = False
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Drafted and accepted tokens of every verdict on a proposal."""
    ends: dict[int, CompletionEvent] = field(default_factory=dict)

    @property
    def first_choices(self) -> list[int]:
        """The number of every prompt's first choice, and at last how many choices there are."""
        return list(accumulate((plan.sample_count for plan in self.plans), initial=0))

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self.ends) == self.first_choices[-1]

    def add(self, index: int, event: Event) -> None:
        """Counts an event of a choice."""
        if isinstance(event, CompletionEvent):
            self.ends[index] = event
        elif not event.committed.is_first:
            self.figures.add(event.committed)
            if event.committed.draft_count:
                self.steps.append((event.committed.draft_count, event.committed.accepted_count))

    def usage(self) -> Usage:
        """Tokens in and out."""
        firsts = [self.ends[index] for index in self.first_choices[:-1]]
        prompt_tokens = sum(end.prompt_tokens for end in firsts)
        completion_tokens = sum(end.completion_tokens for end in self.ends.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(end.cached_prompt_tokens for end in firsts)),
        )

    def metrics(self) -> Metrics:
        """Times, and what speculation did if there is one choice, for which alone vLLM tells it."""
        ends = list(self.ends.values())
        gaps_ms = [_span_ms(end) / (end.completion_tokens - 1) for end in ends if end.completion_tokens > 1]
        spent_s = (max(end.total_us for end in ends) - min(end.queue_us for end in ends)) / 1e6
        may_speculate = self.first_choices[-1] == 1 and self.plans[0].draft_count != 0
        return Metrics(
            time_to_first_token_ms=min(end.first_token_us for end in ends) / 1e3,
            generation_time_ms=max(map(_span_ms, ends)),
            queue_time_ms=max(end.queue_us for end in ends) / 1e3,
            mean_itl_ms=fmean(gaps_ms) if gaps_ms else None,
            tokens_per_second=sum(end.completion_tokens for end in ends) / spent_s if spent_s > 0 else None,
            speculative_decoding=self._speculation() if may_speculate else None,
        )

    def facts(self) -> Facts:
        """What it takes to repeat and to judge the answer."""
        ends = [end for _, end in sorted(self.ends.items())]
        return Facts(
            seed=ends[0].seed,
            seeds=[end.seed for end in ends],
            rule=ends[0].acceptance.rule.value,
            rule_settings=ends[0].acceptance.settings,
            model_hash=ends[0].model_hash,
            numerics_id=ends[-1].numerics_ids[-1],
            numerics_ids=list(dict.fromkeys(each for end in ends for each in end.numerics_ids)),
            finish_reasons=[end.finish_reason.value for end in ends],
            target_reopens=sum(end.target_reopens for end in ends),
            drift_repairs=sum(end.drift_repairs for end in ends),
            **self.figures.facts(),
        )

    def _speculation(self) -> SpeculativeDecoding:
        most = self.max_draft_count if self.plans[0].draft_count is None else self.plans[0].draft_count
        lengths = sorted({length for length, _ in self.steps})
        told = SpeculativeDecoding(
            mean_acceptance_length=self.figures.mean_acceptance_length,
            draft_acceptance_rate=self.figures.draft_acceptance_rate,
            acceptance_histogram=_histogram((kept for _, kept in self.steps), max([most, *lengths])),
            acceptance_histogram_by_draft_length={
                str(length): _histogram((kept for each, kept in self.steps if each == length), length)
                for length in lengths
            },
            num_spec_steps=self.figures.drafts,
            num_accepted_draft_tokens=self.figures.accepted_tokens,
            num_draft_tokens=self.figures.draft_tokens,
            num_spec_tokens=most,
        )
        if self.return_rounds:
            told.per_step_drafted = [each for each, _ in self.steps]
            told.per_step_accepted = [kept for _, kept in self.steps]
        return told


def _histogram(counts: Iterable[int], most: int) -> list[int]:
    """How often each count from 0 to `most` occurred."""
    found = Counter(counts)
    return [found[count] for count in range(most + 1)]


def _span_ms(end: CompletionEvent) -> float:
    """Time from the first token to the end."""
    return (end.total_us - end.first_token_us) / 1e3


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A response whose requests have their places; events come with the numbers of their choices."""

    spec: ResponseSpec
    formatter: ResponseFormatter
    figures: ResponseFigures
    events: AsyncGenerator[tuple[int, Event], None]

    def body_json(self, choices: Sequence[ChoiceBuffer]) -> str:
        """The whole answer, when all events have been counted."""
        body, figures = self.formatter.body(choices), self.figures
        body.usage, body.metrics, body.outrider = figures.usage(), figures.metrics(), figures.facts()
        return body.model_dump_json(exclude_unset=True)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The answer piece by piece, as JSON."""
        options, figures = self.spec.stream or StreamOptions(), self.figures
        async for index, event in self.events:
            figures.add(index, event)
            chunks = self.formatter.chunks(index, event)
            if figures.is_complete and not options.include_usage:
                # Otherwise nothing would tell the seed.
                chunks[-1].metrics, chunks[-1].outrider = figures.metrics(), figures.facts()
            for chunk in chunks:
                yield _chunk_json(chunk, options)
        if options.include_usage:
            last = self.formatter.bare_chunk()
            last.metrics, last.outrider, last.usage = figures.metrics(), figures.facts(), figures.usage()
            yield last.model_dump_json(exclude_unset=True)


def _chunk_json(chunk: Envelope, options: StreamOptions) -> str:
    if options.include_usage:
        chunk.usage = None
    if options.include_obfuscation:
        # In bytes: that is what can be seen of a chunk from outside.
        bare_len = len(line(chunk.model_dump_json(exclude_unset=True))) + len(',"obfuscation":""')
        chunk.obfuscation = secrets.token_hex(PADDING)[: -bare_len % PADDING]
    return chunk.model_dump_json(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class Responder:
    """Answers requests over HTTP."""

    frontend: Frontend
    settings: RestSettings

    async def respond(self, request: Request, spec: ResponseSpec) -> Response:
        """The response; raises whatever is wrong before there is one, and ClientGone."""
        if spec.stream is None:
            async with while_there(request.receive):
                return Response(await self._body_json(spec), media_type="application/json")
        stream = EventStream(self._frames(spec), self.settings.keep_alive_s, self.settings.client_stall_s)
        await stream.begin(request.receive)
        return stream

    async def _body_json(self, spec: ResponseSpec) -> str:
        async with self._opened(spec) as opened:
            choices = [ChoiceBuffer() for _ in range(opened.figures.first_choices[-1])]
            async for index, event in opened.events:
                opened.figures.add(index, event)
                choices[index].add(event)
        if any(request.logprob_count is not None for request in spec.requests):
            # Up to 21 objects a token: seconds for a long answer, which other requests would feel.
            return await asyncio.to_thread(opened.body_json, choices)
        return opened.body_json(choices)

    async def _frames(self, spec: ResponseSpec) -> AsyncGenerator[bytes, None]:
        """The first frame is empty, and says that the headers may go out."""
        is_open = False
        try:
            async with self._opened(spec) as opened:
                is_open = True
                yield b""
                async with aclosing(opened.chunks()) as chunks:
                    async for chunk in chunks:
                        yield data(chunk)
        except Exception as error:
            if not is_open:
                raise
            yield data(error_json(error if isinstance(error, OutriderError) else unexpected(error)))
        else:
            yield DONE

    @asynccontextmanager
    async def _opened(self, spec: ResponseSpec) -> AsyncIterator[OpenResponse]:
        num_choices = sum(request.sample_count or 1 for request in spec.requests)
        if len(spec.requests) > 1 and num_choices > self.frontend.admission.places:
            places = self.frontend.admission.places
            raise InvalidRequest.too_many("prompt", num_choices, places, "choices (prompts times n)")
        async with AsyncExitStack() as stack:
            try:
                generation = await stack.enter_async_context(self.frontend.open(spec.requests))
            except OutriderError as error:
                raise in_names_of(spec.names, error) from None
            target = self.frontend.backend.target.info
            returns_rounds = any(request.return_rounds for request in spec.requests)
            figures = ResponseFigures(generation.requests, target.max_draft_count if target else 0, returns_rounds)
            firsts = figures.first_choices
            events = ((firsts[number] + event.sample_index, event) async for number, event in generation.events)
            answer_id = f"{spec.id_prefix}-{secrets.token_hex(12)}"
            fingerprint = _fingerprint(target) if target else None
            header = ResponseHeader(answer_id, int(time.time()), self.frontend.model_name, fingerprint)
            formatter = await spec.make_formatter(header, generation.requests)
            yield OpenResponse(spec, formatter, figures, await stack.enter_async_context(aclosing(events)))


def _fingerprint(target: ModelInfo) -> str:
    """What the tokens of a seed depend on beside the request: weights and numerics."""
    numerics = hashlib.blake2b(target.numerics_id.encode(), digest_size=4).hexdigest()
    return f"fp_{target.model_hash[:8]}{numerics}"
