"""The body of POST /v1/chat/completions, and what other bodies of prompts and conversations have of it.

What a range depends on, the target's vocabulary for one, is checked with the request itself.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag
from pydantic.config import JsonDict

from gateway.generation.conversation import MAX_TEMPLATE_VARIABLES, MAX_TOOLS, MAX_VARIABLE_LEN, TOOL_NAME
from gateway.rest.asking.fields import (
    AS_USUAL,
    MAX_CALLS,
    MAX_COUNT,
    MAX_IDS,
    MAX_MESSAGES,
    MAX_PARTS,
    NO_EFFECT,
    Count,
    Ignored,
    Seed,
    SpeculationFields,
    Unserved,
    Unusual,
    Word,
    by_any_type,
    by_type,
    text_or_list,
)
from gateway.rest.asking.structured import ResponseFormat, StructuredOutputs
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
    TokenId,
)

MAX_BIASES = 300
PART_TYPES = ("text", "refusal")
NO_OTHERS: JsonDict = {"additionalProperties": False}

BiasKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
TopK = Annotated[
    int, Field(ge=-1, le=MAX_COUNT, description="-1 is 0: off."), AfterValidator(lambda count: max(count, 0))
]
Stop = Annotated[
    Annotated[Word, Tag("<text>")] | Annotated[list[Word], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
    text_or_list("a string or a list of strings"),
]


class StreamOptions(Parameters):
    """What a stream holds beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="Every chunk tells the usage until then.")] = None
    include_obfuscation: bool | None = None


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


# What a call gave, or another server's answer has, beside text is left out and named where there is text: the client
# cannot change what came. Others' parts of what a user says are refused, by what makes the prompt.
MessagePart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[dict[str, Any], Tag("<other>")],
    by_any_type(PART_TYPES),
]
MessageContent = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    text_or_list("a string or a list of text parts"),
]


class Prediction(Parameters):
    """What the answer is expected to be, as far as it is known; it changes no token."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
        text_or_list("a string or a list of text parts"),
    ]

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


ToolName = Annotated[str, Field(pattern=TOOL_NAME)]


class FunctionCall(Parameters):
    """What an assistant called in an earlier turn."""

    name: str
    arguments: Annotated[Any, Field(description="A JSON object, as text or as it is; else it is shown as text.")] = None
    parsed_arguments: Ignored = None


class CustomCall(Parameters):
    """What an assistant of another server called with any text."""

    name: str
    input: str


class PastCall(Parameters):
    """A call of an earlier turn."""

    id: str | None = None
    index: Ignored = None
    provider_specific_fields: Ignored = None
    cache_control: Ignored = None


class FunctionToolCall(PastCall):
    """A call of a function in an earlier answer, as clients send it back."""

    type: Literal["function"] | None = None
    function: FunctionCall


class CustomToolCall(PastCall):
    """A call of a custom tool; the template reads it as one of a function with the argument `input`."""

    type: Literal["custom"]
    custom: CustomCall


ToolCall = Annotated[
    Annotated[FunctionToolCall, Tag("<function>")] | Annotated[CustomToolCall, Tag("<custom>")],
    by_type(["function", "custom"], default="function"),
]


class Message(Parameters):
    """One turn of the conversation. Which roles there may be, and what else a turn may carry, is the template's say."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: MessageContent | None = None
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
    function_call: Annotated[FunctionCall | None, Field(description="A call as it was before tools; named.")] = None


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
