"""Answers of /v1/responses: a response, or the events that build one up, as OpenAI's newer clients read them.

Every item has one id, in the events and in the response at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, Field

from gateway.generation.events import Event
from gateway.rest.answering import AnswerWriter, ChoiceBuffer, ResponseHeader
from gateway.rest.errors import status_of
from gateway.rest.figures import Facts, Metrics, ResponseFigures
from gateway.rest.openai.chunks import padding
from gateway.rest.parts import Part, Parts
from gateway.rest.sse import typed
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta
from outrider.errors import OutriderError
from outrider.parameters import FinishReason

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
ID_PREFIX = "resp_"
ITEM_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class OutputTextPart(BaseModel):
    """A part of the answer that the user reads."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class ReasoningPart(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


OutputPart = Annotated[OutputTextPart | ReasoningPart, Field(discriminator="type")]


class OutputMessage(BaseModel):
    """What the assistant says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ResponseStatus
    content: list[OutputTextPart]


class OutputReasoning(BaseModel):
    """What the model thought, in full; there is no summary."""

    id: str
    type: Literal["reasoning"]
    status: ResponseStatus
    summary: list[Any]
    content: list[ReasoningPart]


class OutputCall(BaseModel):
    """A call; its arguments are a JSON object as text."""

    id: str
    type: Literal["function_call"]
    status: ResponseStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class InputTokensDetails(BaseModel):
    """Numbers of the prompt's tokens that the target found in its prefix cache, and that were paid to be there."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Number of the answer's tokens that are reasoning."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseEcho(BaseModel):
    """What the request said, as the response repeats it."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float


class ResponseBody(ResponseEcho):
    """An answer of the Responses API. Nothing of it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    background: Literal[False]
    previous_response_id: None
    store: Literal[False]
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    metrics: Metrics | None = None
    outrider: Facts | None = None


class LifecycleEvent(BaseModel):
    """The response begins or ends; at its end it is whole."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    sequence_number: int
    response: ResponseBody


class ItemEvent(BaseModel):
    """An item begins, without content, or is over and whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(BaseModel):
    """The one part of an item begins, without text, or is over and whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputPart


class DeltaEvent(BaseModel):
    """More of an item's text or arguments. Arguments have no content_index, and only output_text has logprobs."""

    type: Literal[
        "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"
    ]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | None = None
    delta: str
    logprobs: list[Any] | None = None
    obfuscation: str | None = None


class DoneEvent(BaseModel):
    """All of an item's text, or its arguments with the name of what is called."""

    type: Literal["response.output_text.done", "response.reasoning_text.done", "response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | None = None
    text: str | None = None
    logprobs: list[Any] | None = None
    name: str | None = None
    arguments: str | None = None


ResponsesEvent: TypeAlias = LifecycleEvent | ItemEvent | PartEvent | DeltaEvent | DoneEvent
EVENTS: tuple[type[BaseModel], ...] = get_args(ResponsesEvent)


@dataclass(slots=True)
class ResponseWriter(AnswerWriter):
    """Writer of a response with one choice."""

    header: ResponseHeader
    figures: ResponseFigures
    echo: ResponseEcho
    obfuscates: bool
    parts: Parts = field(default_factory=Parts)
    num_events: int = 0

    def begin(self) -> list[bytes]:
        response = self._response("in_progress", self.parts)
        return [
            self._frame(LifecycleEvent(type=kind, sequence_number=0, response=response))
            for kind in ("response.created", "response.in_progress")
        ]

    def frames(self, index: int, event: Event) -> list[bytes]:
        return [self._frame(each) for delta in event.deltas for each in self._events(delta)]

    def end(self) -> list[bytes]:
        status = self._status()
        response = self._finished(self.parts)
        kind: Literal["response.incomplete", "response.completed"] = (
            "response.incomplete" if status == "incomplete" else "response.completed"
        )
        last = LifecycleEvent(type=kind, sequence_number=0, response=response)
        return [self._frame(event) for event in (*self._closing(self.parts.parts[-1:], status), last)]

    def failure(self, error: OutriderError) -> list[bytes]:
        response = self._response("failed", self.parts)
        http_status = status_of(error)
        code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if http_status < 500:
            code = "rate_limit_exceeded" if http_status == 429 else "invalid_prompt"
        response.error = ResponseError(code=code, message=error.message)
        return [self._frame(LifecycleEvent(type="response.failed", sequence_number=0, response=response))]

    def whole(self, choices: Sequence[ChoiceBuffer]) -> str:
        return self._finished(Parts.of(choices[0].deltas)).model_dump_json(exclude_unset=True)

    def _frame(self, event: ResponsesEvent) -> bytes:
        event.sequence_number = self.num_events
        self.num_events += 1
        if self.obfuscates and isinstance(event, DeltaEvent):
            event.obfuscation = padding(event.model_dump_json(exclude_unset=True))
        return typed(event.type, event.model_dump_json(exclude_unset=True))

    def _events(self, delta: Delta) -> list[ResponsesEvent]:
        """The end of the item before and the beginning of a new one, where the delta begins one, and more of it."""
        before = self.parts.parts[-1:]
        begins = self.parts.add(delta)
        part = self.parts.parts[-1]
        events: list[ResponsesEvent] = []
        if begins:
            events += self._closing(before, "completed")
            item = self._item(part.empty, "in_progress")
            events.append(
                ItemEvent(type="response.output_item.added", sequence_number=0, output_index=part.index, item=item)
            )
            if not isinstance(item, OutputCall):
                [content], item.content = item.content, []
                events.append(self._part_event("response.content_part.added", part, content))
        place = {"sequence_number": 0, "item_id": self._id(part), "output_index": part.index}
        match delta:
            case ContentDelta(text):
                more = {"type": "response.output_text.delta", "content_index": 0, "logprobs": [], "delta": text}
            case ReasoningDelta(text):
                more = {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}
            case CallArguments(_, text):
                more = {"type": "response.function_call_arguments.delta", "delta": text}
            case CallBegun():
                return events
        return [*events, DeltaEvent.model_validate({**place, **more})]

    def _closing(self, parts: Sequence[Part], status: ResponseStatus) -> list[ResponsesEvent]:
        events: list[ResponsesEvent] = []
        for part in parts:
            item = self._item(part, status)
            done = {"sequence_number": 0, "item_id": item.id, "output_index": part.index}
            match item:
                case OutputMessage():
                    done |= {"type": "response.output_text.done", "content_index": 0, "text": part.text, "logprobs": []}
                case OutputReasoning():
                    done |= {"type": "response.reasoning_text.done", "content_index": 0, "text": part.text}
                case OutputCall():
                    done |= {"type": "response.function_call_arguments.done", "name": part.name, "arguments": part.text}
            events.append(DoneEvent.model_validate(done))
            if not isinstance(item, OutputCall):
                events.append(self._part_event("response.content_part.done", part, item.content[0]))
            events.append(
                ItemEvent(type="response.output_item.done", sequence_number=0, output_index=part.index, item=item)
            )
        return events

    def _part_event(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        part: Part,
        content: OutputTextPart | ReasoningPart,
    ) -> PartEvent:
        return PartEvent(
            type=kind,
            sequence_number=0,
            item_id=self._id(part),
            output_index=part.index,
            content_index=0,
            part=content,
        )

    def _id(self, part: Part) -> str:
        return f"{ITEM_PREFIXES[part.kind]}_{self.header.id.removeprefix(ID_PREFIX)}{part.index:02x}"

    def _item(self, part: Part, status: ResponseStatus) -> OutputMessage | OutputReasoning | OutputCall:
        item_id = self._id(part)
        match part.kind:
            case "text":
                text = OutputTextPart(type="output_text", text=part.text, annotations=[])
                return OutputMessage(id=item_id, type="message", role="assistant", status=status, content=[text])
            case "reasoning":
                thought = ReasoningPart(type="reasoning_text", text=part.text)
                return OutputReasoning(id=item_id, type="reasoning", status=status, summary=[], content=[thought])
            case "call":
                return OutputCall(
                    id=item_id,
                    type="function_call",
                    status=status,
                    call_id=part.call_id,
                    name=part.name,
                    arguments=part.text,
                )

    def _status(self) -> ResponseStatus:
        return "incomplete" if self.figures.ends[0].finish_reason is FinishReason.LENGTH else "completed"

    def _finished(self, parts: Parts) -> ResponseBody:
        """Body of the response at its end."""
        status, usage = self._status(), self.figures.usage()
        response = self._response(status, parts)
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        response.usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self.figures.ends[0].reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        response.metrics, response.outrider = self.figures.metrics(), self.figures.facts()
        return response

    def _response(self, status: ResponseStatus, parts: Parts) -> ResponseBody:
        """Body in which all parts but the last are complete, and that one is as far as the response is."""
        last: ResponseStatus = "completed" if status == "completed" else "incomplete"
        return ResponseBody(
            **dict(self.echo),
            id=self.header.id,
            object="response",
            created_at=self.header.created,
            model=self.header.model,
            status=status,
            error=None,
            incomplete_details=None,
            output=[self._item(part, last if part is parts.parts[-1] else "completed") for part in parts.parts],
            background=False,
            previous_response_id=None,
            store=False,
            truncation="disabled",
            usage=None,
        )
