"""The way from a checked body to a response, streamed or whole: the same for both kinds of route.

Until its request is accepted, nothing is promised to a client, and every error has a status. Afterwards an error is the
last event of a stream, and there is no [DONE]. What an answer looks like is the say of the route's AnswerWriter.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend, ModelNames
from gateway.generation.generate import CompletionEvent, Event
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.transcript import SpeculationFigures
from gateway.keys.door import Entrance
from gateway.rest import responses
from gateway.rest.errors import UnknownModel, error_json, unexpected
from gateway.rest.keys import entrance_of
from gateway.rest.middleware import RestSettings, ignored_header
from gateway.rest.responses import AnswerWriter, ChoiceBuffer, ResponseFormatter, ResponseHeader
from gateway.rest.schemas import GenerationFields, ShapeFields, SpeculationFields, StreamOptions
from gateway.rest.sse import DONE, KEEP_ALIVE, EventStream, data, line, while_there
from gateway.rest.structured import constraint_of
from outrider.beams import MAX_WIDTH, MIN_WIDTH, BeamSearch, EarlyStopping
from outrider.errors import InvalidRequest, OutriderError, PromptTooLong
from outrider.parameters import SETTINGS, Acceptance, Rule, SamplingParameters
from outrider.token_tree import TreeShape

# Chunks with padding have lengths that are multiples of this, so that a length says little about the text.
PADDING = 32
SAMPLING = set(SamplingParameters.model_fields)
SETTING_NAMES = {name for names in SETTINGS.values() for name in names}
# What the gateway calls otherwise than the body of a route; every other field has one name.
COMMON_NAMES = {"sample_count": "n", "beam_search": "use_beam_search"}
TEXT_NAMES = {**COMMON_NAMES, "logprob_count": "logprobs", "token_ids": "prompt"}
CHAT_NAMES = {**COMMON_NAMES, "logprob_count": "top_logprobs", "prompt": "messages"}


def generation_request(fields: GenerationFields, names: ModelNames) -> GenerationRequest:
    """Request that a body makes of the gateway, all but the prompt and the log-probabilities.

    Raises UnknownModel about another model than the served one, and InvalidRequest about fields that do not go
    together.
    """
    check_model(fields.model, names)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options", "given", "absent unless stream is true")
    sampling: dict[str, Any] = fields.model_dump(include=SAMPLING, exclude_none=True)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    sampling_parameters = SamplingParameters.checked(sampling)
    speculation = fields.speculation or SpeculationFields()
    rule = Rule(speculation.rule or Rule.MATCH)
    settings = speculation.model_dump(include=SETTING_NAMES, exclude_none=True)
    for name, value in settings.items():
        if name not in SETTINGS.get(rule, ()):
            raise InvalidRequest(f"speculation.{name}", value, f"absent under the rule {rule}")
    return GenerationRequest(
        max_tokens=fields.max_tokens,
        sampling=sampling_parameters,
        seed=fields.seed,
        stops=tuple([fields.stop] if isinstance(fields.stop, str) else fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        speculation_enabled=speculation.enabled is not False,
        draft_count=speculation.draft_count if isinstance(speculation.draft_count, int) else None,
        acceptance=Acceptance.checked({"rule": rule, **settings}, "speculation."),
        drafters=_drafters(speculation),
        shape=None if speculation.shape is None else _shape(speculation.shape),
        prediction=None if fields.prediction is None else fields.prediction.text,
        sample_count=None if fields.use_beam_search else fields.n,
        beam_search=_beam_search(fields),
        banned_words=tuple(fields.banned_words or ()),
        return_rounds=bool(speculation.return_rounds),
        cache_salt=fields.cache_salt or "",
        constraint=constraint_of(fields.structured_outputs, fields.response_format),
    )


def _shape(fields: ShapeFields) -> TreeShape:
    shape = TreeShape(
        fields.max_depth, fields.max_children, tuple(fields.expansions), fields.max_width, fields.is_static
    )
    return shape.checked("speculation.shape")


def _drafters(speculation: SpeculationFields) -> tuple[str, ...]:
    """The names in either field; raises InvalidRequest about both."""
    named = speculation.drafter
    if speculation.drafters is not None:
        if named:
            raise InvalidRequest("speculation.drafters", speculation.drafters, "absent beside speculation.drafter")
        named = speculation.drafters
    if isinstance(named, list):
        return tuple(named)
    return (named,) if named else ()


def _beam_search(fields: GenerationFields) -> BeamSearch | None:
    """The search that a body asks for, with n beams; raises InvalidRequest about fields that do not go together."""
    if not fields.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if (value := getattr(fields, name)) is not None:
                raise InvalidRequest(name, value, "absent unless use_beam_search is true")
        return None
    if (fields.n or 1) < MIN_WIDTH:
        raise InvalidRequest("n", fields.n or 1, f"between {MIN_WIDTH} and {MAX_WIDTH} with use_beam_search")
    length_penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    early_stopping: EarlyStopping = "first" if fields.early_stopping is True else "heuristic"
    return BeamSearch(fields.n or 1, length_penalty, "never" if fields.early_stopping == "never" else early_stopping)


def check_model(name: str | None, names: ModelNames) -> None:
    """Raises UnknownModel about another model than the served one."""
    if name is not None and name not in names:
        raise UnknownModel(name, names.main)


def check_prompt_len(field: str, text: str, max_chars: int) -> None:
    """Raises InvalidRequest about a text that is too long to be encoded."""
    if len(text) > max_chars:
        raise InvalidRequest.too_many(field, len(text), max_chars, "characters")


def in_names_of(route: Mapping[str, str], error: OutriderError) -> OutriderError:
    """The error with the route's names of fields, the longest known beginning of each being replaced; of several
    prompts, the one at fault is numbered.
    """
    number = error.metadata.get("request")
    names = {**route, **(dict.fromkeys(("prompt", "token_ids"), f"prompt.{number}") if number else {})}

    if isinstance(error, PromptTooLong):
        error.metadata.setdefault("field", "prompt")
    return error.rename_fields(partial(renamed, names))


def renamed(names: Mapping[str, str], field: str) -> str:
    """A field's name with its longest known beginning replaced."""
    parts = field.removeprefix("sampling.").split(".")
    for count in range(len(parts), 0, -1):
        known = names.get(".".join(parts[:count]))
        if known is not None:
            return ".".join([known, *parts[count:]])
    return ".".join(parts)


@dataclass(slots=True)
class ResponseFigures:
    """Counts what happened to a request: one entry of `requests` a prompt, each with as many choices as it has samples,
    numbered through.
    """

    requests: Sequence[CheckedRequest]
    max_draft_count: int
    return_rounds: bool = False
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Drafted and accepted tokens of every verdict on a proposal."""
    ends: dict[int, CompletionEvent] = field(default_factory=dict)
    token_counts: Counter[int] = field(default_factory=Counter)
    """Number of tokens of every choice until now."""

    @property
    def first_choices(self) -> list[int]:
        """The number of every prompt's first choice, and at last how many choices there are."""
        return list(accumulate((plan.sample_count for plan in self.requests), initial=0))

    @property
    def is_complete(self) -> bool:
        return len(self.ends) == self.first_choices[-1]

    def add(self, index: int, event: Event) -> None:
        """Counts an event of a choice for the figures."""
        if isinstance(event, CompletionEvent):
            self.ends[index], self.token_counts[index] = event, event.completion_tokens
            return
        self.token_counts[index] += len(event.tokens)
        if event.committed is not None and not event.committed.is_first:
            self.figures.add(event.committed)
            if event.committed.draft_count:
                self.steps.append((event.committed.draft_count, event.committed.accepted_count))

    def usage(self) -> responses.Usage:
        """Tokens in and out, of what has come until now."""
        firsts = [self.ends[index] for index in self.first_choices[:-1] if index in self.ends]
        completion_tokens = self.token_counts.total()
        prompt_tokens = sum(request.spec.prompt_len for request in self.requests)
        cached_tokens = sum(end.cached_prompt_tokens for end in firsts)
        accepted_count, rejected_count = self.figures.prediction_counts
        return responses.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=responses.PromptTokensDetails(cached_tokens=cached_tokens),
            completion_tokens_details=responses.CompletionTokensDetails(
                reasoning_tokens=sum(end.reasoning_tokens for end in self.ends.values()),
                accepted_prediction_tokens=accepted_count,
                rejected_prediction_tokens=rejected_count,
            ),
        )

    def metrics(self) -> responses.Metrics:
        """Times, and what speculation did if there is one choice, the only case in which vLLM says it."""
        ends = list(self.ends.values())
        spans_ms = [(end.total_us - end.first_token_us) / 1e3 for end in ends]
        counts = [end.completion_tokens for end in ends]
        gaps_ms = [span_ms / (count - 1) for span_ms, count in zip(spans_ms, counts, strict=True) if count > 1]
        spent_s = (max(end.total_us for end in ends) - min(end.queue_us for end in ends)) / 1e6
        may_speculate = self.first_choices[-1] == 1 and self.requests[0].draft_count != 0
        return responses.Metrics(
            time_to_first_token_ms=min(end.first_token_us for end in ends) / 1e3,
            generation_time_ms=max(spans_ms),
            queue_time_ms=min(end.queue_us for end in ends) / 1e3,
            mean_itl_ms=fmean(gaps_ms) if gaps_ms else None,
            tokens_per_second=sum(counts) / spent_s if spent_s > 0 else None,
            speculative_decoding=self._speculation() if may_speculate else None,
        )

    def _speculation(self) -> responses.SpeculativeDecoding:
        by_length: dict[int, Counter[int]] = {}
        for drafted, accepted in self.steps:
            by_length.setdefault(drafted, Counter())[accepted] += 1
        max_count = self.max_draft_count if self.requests[0].draft_count is None else self.requests[0].draft_count
        accepted_counts = Counter(accepted for _, accepted in self.steps)
        drafted_and_accepted = {
            "per_step_drafted": [drafted for drafted, _ in self.steps],
            "per_step_accepted": [accepted for _, accepted in self.steps],
        }
        return responses.SpeculativeDecoding(
            mean_acceptance_length=self.figures.mean_acceptance_length,
            draft_acceptance_rate=self.figures.draft_acceptance_rate,
            acceptance_histogram=[accepted_counts[count] for count in range(max([max_count, *by_length]) + 1)],
            acceptance_histogram_by_draft_length={
                str(length): [counts[count] for count in range(length + 1)]
                for length, counts in sorted(by_length.items())
            },
            num_spec_steps=self.figures.drafts,
            num_accepted_draft_tokens=self.figures.accepted_tokens,
            num_draft_tokens=self.figures.draft_tokens,
            num_spec_tokens=max_count,
            **(drafted_and_accepted if self.return_rounds else {}),
        )

    def facts(self) -> responses.Facts:
        """Facts that are needed to repeat and to judge the answer."""
        ends = [end for _, end in sorted(self.ends.items())]
        logprobs = [end.cumulative_logprob for end in ends if end.cumulative_logprob is not None]
        facts = responses.Facts(
            seed=ends[0].seed,
            seeds=[end.seed for end in ends],
            sampling=responses.Sampling.model_validate(self.requests[0].spec.sampling, from_attributes=True),
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
        if logprobs:
            facts.cumulative_logprobs = logprobs
        if ends[0].ignored_keywords:
            facts.ignored_keywords = [*ends[0].ignored_keywords]
        return facts


@dataclass(slots=True)
class ChunkWriter(AnswerWriter):
    """Answers of OpenAI's older routes: chunks as a formatter makes them, with usage and figures, and [DONE]."""

    formatter: ResponseFormatter
    figures: ResponseFigures
    options: StreamOptions

    @property
    def takes_long(self) -> bool:
        # Up to 21 objects a token: seconds for a long answer.
        return self.formatter.has_logprobs

    def frames(self, index: int, event: Event) -> list[bytes]:
        figures, options, chunks = self.figures, self.options, self.formatter.chunks(index, event)
        if figures.is_complete and not options.include_usage:
            # Otherwise nothing would say the seed.
            chunks[-1].metrics, chunks[-1].outrider = figures.metrics(), figures.facts()
        for chunk in chunks:
            if options.continuous_usage_stats:
                chunk.usage = figures.usage()
            elif options.include_usage:
                chunk.usage = None
            if options.include_obfuscation:
                chunk.obfuscation = padding(chunk.model_dump_json(exclude_unset=True))
        return [data(chunk.model_dump_json(exclude_unset=True)) for chunk in chunks]

    def end(self) -> list[bytes]:
        if not self.options.include_usage:
            return [DONE]
        last, figures = self.formatter.bare_chunk(), self.figures
        last.metrics, last.outrider, last.usage = figures.metrics(), figures.facts(), figures.usage()
        return [data(last.model_dump_json(exclude_unset=True)), DONE]

    def failure(self, error: OutriderError) -> list[bytes]:
        return [data(error_json(error))]

    def whole(self, choices: Sequence[ChoiceBuffer]) -> str:
        body, figures = self.formatter.body(choices), self.figures
        body.usage, body.metrics, body.outrider = figures.usage(), figures.metrics(), figures.facts()
        return body.model_dump_json(exclude_unset=True)


def padding(bare: str) -> str:
    """Value of `obfuscation` in an event that is otherwise this JSON."""
    # In bytes: that is what can be seen of a chunk from outside.
    return secrets.token_hex(PADDING)[: -len(line(bare + ',"obfuscation":""')) % PADDING]


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A response whose requests have begun; events come with the numbers of their choices."""

    writer: AnswerWriter
    figures: ResponseFigures
    events: AsyncGenerator[tuple[int, Event], None]


@dataclass(frozen=True, slots=True)
class Responder:
    """Answers a body of a route over HTTP; `requests` is what it asks the gateway for, one entry a prompt."""

    frontend: Frontend
    settings: RestSettings
    is_streamed: bool
    requests: Sequence[GenerationRequest]
    names: Mapping[str, str]
    id_prefix: str
    make_writer: Callable[[ResponseHeader, ResponseFigures], Awaitable[AnswerWriter]]
    ignored: Sequence[str] = ()
    """Fields that were accepted without effect, which a header names."""
    keep_alive: bytes = KEEP_ALIVE

    async def respond(self, request: Request) -> Response:
        """The response; raises whatever is wrong before there is one, and ClientGone."""
        headers, enter = ignored_header(self.ignored), entrance_of(request)
        if not self.is_streamed:
            async with while_there(request.receive):
                return Response(await self._body_json(enter), headers=headers, media_type="application/json")
        keep_alive_s, stall_s = self.settings.keep_alive_s, self.settings.client_stall_s
        stream = EventStream(self._frames(enter), keep_alive_s, stall_s, headers, self.keep_alive)
        await stream.begin(request.receive)
        return stream

    async def _body_json(self, enter: Entrance | None) -> str:
        async with self._opened(enter) as opened:
            choices = [ChoiceBuffer() for _ in range(opened.figures.first_choices[-1])]
            async for index, event in opened.events:
                opened.figures.add(index, event)
                choices[index].add(event)
        whole = partial(opened.writer.whole, choices)
        return await asyncio.to_thread(whole) if opened.writer.takes_long else whole()

    async def _frames(self, enter: Entrance | None) -> AsyncGenerator[bytes, None]:
        """The events of a stream. The first frame is empty, and says that the headers may go out."""
        writer: AnswerWriter | None = None
        try:
            async with self._opened(enter) as opened:
                writer = opened.writer
                yield b""
                for frame in writer.begin():
                    yield frame
                async for index, event in opened.events:
                    opened.figures.add(index, event)
                    for frame in writer.frames(index, event):
                        yield frame
                last = writer.end()
        except Exception as error:
            if writer is None:
                raise
            last = writer.failure(error if isinstance(error, OutriderError) else unexpected(error))
        for frame in last:
            yield frame

    @asynccontextmanager
    async def _opened(self, enter: Entrance | None) -> AsyncIterator[OpenResponse]:
        async with AsyncExitStack() as stack:
            try:
                generation = await stack.enter_async_context(self.frontend.open(self.requests, enter))
            except OutriderError as error:
                raise in_names_of(self.names, error) from None
            target, fingerprint = self.frontend.backend.target.info, None
            if target is not None:
                # What the tokens of a seed depend on beside the request: weights and numerics.
                numerics = hashlib.blake2b(target.numerics_id.encode(), digest_size=4).hexdigest()
                fingerprint = f"fp_{target.model_hash[:8]}{numerics}"
            returns_rounds = any(request.return_rounds for request in self.requests)
            figures = ResponseFigures(generation.requests, target.max_draft_count if target else 0, returns_rounds)
            firsts = figures.first_choices
            events = ((firsts[number] + event.sample_index, event) async for number, event in generation.events)
            answer_id = f"{self.id_prefix}{secrets.token_hex(12)}"
            header = ResponseHeader(answer_id, int(time.time()), self.frontend.model_name, fingerprint)
            writer = await self.make_writer(header, figures)
            yield OpenResponse(writer, figures, await stack.enter_async_context(aclosing(events)))
