"""The bodies of POST /v1/completions and /v1/chat/completions: every field with its range.

What a range depends on, the target's vocabulary for one, is checked with the request itself.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag
from pydantic.config import JsonDict

from gateway.generation.conversation import MAX_TEMPLATE_VARIABLES, MAX_TOOLS, MAX_VARIABLE_LEN, TOOL_NAME
from gateway.generation.request import MAX_DRAFTERS, MAX_STRING_LEN
from gateway.rest.openai.structured import ResponseFormat, StructuredOutputs
from outrider.beams import MAX_LENGTH_PENALTY
from outrider.parameters import (
    MAX_BANNED_WORDS,
    MAX_LOGPROB_COUNT,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Bias,
    Finite,
    Parameters,
    Share,
    TokenId,
)
from outrider.token_tree import MAX_CHILDREN, MAX_DEPTH, MAX_LEVEL_ROWS

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_BIASES = 300
MAX_PROMPTS, MAX_IDS = 64, 1_000_000
MAX_MESSAGES = 4096
# Of one message. Lists end at their first fault: a finding for each of a million entries takes minutes and gigabytes.
MAX_PARTS, MAX_CALLS = 4096, 128
# The mark of what is named in the header x-outrider-ignored.
NO_EFFECT = "Accepted without effect, and named in the header x-outrider-ignored."
# The mark of what says that all is as usual; a gateway that tolerates unknown fields leaves out what says otherwise.
AS_USUAL = "Only this is served, and is so without it."
NO_OTHERS: JsonDict = {"additionalProperties": False}

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STRING_LEN)]
BiasKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Seed = Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]
TopK = Annotated[
    int, Field(ge=-1, le=MAX_COUNT, description="-1 is 0: off."), AfterValidator(lambda count: max(count, 0))
]
Unserved = Annotated[None, Field(description="Known, but not served: null or absent.")]
Unusual = Annotated[None, Field(description=AS_USUAL)]
# What clients repeat of answers, of others too, and what they say to others' servers.
Ignored = Annotated[Any, Field(description=NO_EFFECT)]


def _text_or_list(value: object) -> str | None:
    """The tag of the kind that a value is of; None for any other."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


Stop = Annotated[
    Annotated[Word, Tag("<text>")] | Annotated[list[Word], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_kind",
        custom_error_message="Input should be a string or a list of strings",
    ),
]


class StreamOptions(Parameters):
    """What a stream holds beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="Every chunk tells the usage until then.")] = None
    include_obfuscation: bool | None = None


DrafterName = Annotated[str, Field(min_length=1, max_length=MAX_STRING_LEN)]
Several = Annotated[list[DrafterName], Field(min_length=1, max_length=MAX_DRAFTERS, fail_fast=True)]
Drafters = Annotated[
    Annotated[str, Field(max_length=MAX_STRING_LEN), Tag("<text>")] | Annotated[Several, Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="drafter_kind",
        custom_error_message="Input should be a name or a list of names",
    ),
]
Children = Annotated[int, Field(ge=1, le=MAX_CHILDREN)]


class ShapeFields(Parameters):
    """The shape of a tree of guesses; what is absent is the drafter's own choice."""

    max_depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] = 0
    max_children: Annotated[int, Field(ge=0, le=MAX_CHILDREN)] = 0
    expansions: Annotated[list[Children], Field(default_factory=list, max_length=MAX_DEPTH, fail_fast=True)]
    max_width: Annotated[int, Field(ge=0, le=MAX_LEVEL_ROWS)] = 0
    is_static: bool = False


class SpeculationFields(Parameters):
    """Whether and how to speculate. Under `match` nothing here changes a token."""

    enabled: bool | None = None
    draft_count: Annotated[int, Field(ge=0, le=MAX_COUNT)] | Literal["auto"] | None = None
    rule: Literal["match", "ratio", "block", "lenient", "typical"] | None = None
    lenience: Share | None = None
    typical_epsilon: Share | None = None
    typical_delta: Share | None = None
    drafter: Drafters | None = None
    drafters: Annotated[Several | None, Field(description="Another name for a list in `drafter`.")] = None
    shape: ShapeFields | None = None
    return_rounds: bool | None = None


class TextPart(Parameters):
    """A part of a message; only text is served. Clients echo parts of other servers' answers, with more keys."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str
    annotations: Ignored = None
    cache_control: Ignored = None


class RefusalPart(Parameters):
    """What an assistant of another server said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(value: object) -> str:
    return "<refusal>" if isinstance(value, dict) and value.get("type") == "refusal" else "<part>"


Part = Annotated[
    Annotated[TextPart, Tag("<part>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_part_kind)
]
Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="content_kind",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class Prediction(Parameters):
    """What the answer is expected to be, as far as it is known; it changes no token."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationFields(Parameters):
    """How to generate, in OpenAI's names, else in vLLM's; `speculation` and `banned_words` are ours."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES, json_schema_extra=NO_OTHERS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    use_beam_search: Annotated[bool | None, Field(description="Search with n beams, and answer with all n.")] = None
    length_penalty: Annotated[Finite, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    banned_words: Annotated[list[Word], Field(max_length=MAX_BANNED_WORDS, fail_fast=True)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str | None, Field(description=NO_EFFECT)] = None
    skip_special_tokens: Annotated[Literal[True] | None, Field(description=AS_USUAL)] = None
    spaces_between_special_tokens: Annotated[Literal[True] | None, Field(description=AS_USUAL)] = None
    include_stop_str_in_output: Annotated[Literal[False] | None, Field(description=AS_USUAL)] = None
    priority: Annotated[int | None, Field(description=AS_USUAL, ge=0, le=0)] = None


PROMPT_KINDS = (
    "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids, and not empty"
)

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]


def _prompt_kind(value: object) -> str | None:
    """A list is of the kind of its first entry, so that only one kind is tried on all of them."""
    if isinstance(value, list):
        return {str: "<texts>", int: "<ids>", list: "<id lists>"}.get(type(value[0])) if value else None
    return _text_or_list(value)


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


ToolName = Annotated[str, Field(pattern=TOOL_NAME)]


class FunctionCall(Parameters):
    """What an assistant called in an earlier turn."""

    name: str
    arguments: Annotated[str | dict[str, Any], Field(description="A JSON object, as text or as it is.")]
    parsed_arguments: Ignored = None


class ToolCall(Parameters):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None
    provider_specific_fields: Ignored = None
    cache_control: Ignored = None


class Message(Parameters):
    """One turn of the conversation. Which roles there may be, and what else a turn may carry, is the template's say."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[str | None, Field(description="Also as reasoning.")] = None
    reasoning: str | None = None
    refusal: Annotated[str | None, Field(description="Stands for content where there is none, else ignored.")] = None
    annotations: Ignored = None
    parsed: Ignored = None
    provider_specific_fields: Ignored = None
    cache_control: Ignored = None
    thinking_blocks: Ignored = None
    reasoning_details: Ignored = None
    audio: Unserved = None
    function_call: Unserved = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Function(Parameters):
    """A function that the template may show to the model."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Parameters):
    """A tool that the template may show to the model."""

    type: Literal["function"]
    function: Function
    cache_control: Ignored = None


class FunctionName(Parameters):
    """A function by its name."""

    name: ToolName


class NamedTool(Parameters):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Parameters):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(Parameters):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str:
    if not isinstance(value, dict):
        return "<word>"
    return "<some>" if value.get("type") == "allowed_tools" else "<one>"


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<one>")]
    | Annotated[AllowedToolsChoice, Tag("<some>")],
    Discriminator(_choice_kind),
]


TemplateVariable = bool | int | Finite | Annotated[str, Field(max_length=MAX_VARIABLE_LEN)]


class TemplateFields(Parameters):
    """What the chat template gets beside the messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, TemplateVariable], Field(max_length=MAX_TEMPLATE_VARIABLES, json_schema_extra=NO_OTHERS)]
        | None
    ) = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="Whether the assistant's turn begins at the end; false to go on with a message.")
    ] = None
    continue_final_message: Annotated[bool | None, Field(description="Go on with the last message itself.")] = None


class ChatRequest(GenerationFields, TemplateFields):
    """A conversation and how to go on."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROB_COUNT)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    metadata: Annotated[dict[str, str] | None, Field(description=NO_EFFECT, max_length=16)] = None
    safety_identifier: Annotated[str | None, Field(description=NO_EFFECT)] = None
    prompt_cache_key: Annotated[str | None, Field(description=NO_EFFECT)] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Field(description=AS_USUAL)] = None
    store: Annotated[Literal[False] | None, Field(description=AS_USUAL)] = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(min_length=1, fail_fast=True)] | None, Field(description=AS_USUAL)
    ] = None
    verbosity: Annotated[Literal["medium"] | None, Field(description=AS_USUAL)] = None
    audio: Unusual = None
    moderation: Unusual = None
    prompt_cache_options: Unusual = None
    prompt_cache_retention: Unusual = None
    web_search_options: Unusual = None
    function_call: Unserved = None
    functions: Unserved = None


class TokenizeRequest(TemplateFields):
    """A text, or a conversation whose prompt it is, to cut into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Those around a whole prompt; as generating adds them if absent.")
    ] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Parameters):
    """Tokens to put together."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]


def ignored_in(model: BaseModel, path: str = "") -> Iterator[str]:
    """Places where a body has values without effect, without the numbers of entries; a place may come repeatedly."""
    for name, place, has_effect in _fields(type(model)):
        if name not in model.model_fields_set or (value := getattr(model, name)) is None:
            continue
        if not has_effect:
            yield path + place
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, BaseModel):
                yield from ignored_in(each, f"{path}{place}.")
    yield from (path + name for name, value in (model.model_extra or {}).items() if value is not None)


@cache
def _fields(kind: type[BaseModel]) -> tuple[tuple[str, str, bool], ...]:
    """Fields of a model without effect or with models in them: name, name in a body, and whether it has an effect.

    The others are not looked at: a prompt may be a million token ids.
    """
    fields = ((name, info, info.description != NO_EFFECT) for name, info in kind.model_fields.items())
    return tuple(
        (name, info.alias or name, has_effect)
        for name, info, has_effect in fields
        if not has_effect or _holds_models(info.annotation)
    )


def _holds_models(annotation: object) -> bool:
    if inner := get_args(annotation):
        return any(map(_holds_models, inner))
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
