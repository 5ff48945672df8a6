"""Requests of a caller, checked and turned into the protocol's messages: prompts, options and metadata."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Protobuf

from outrider.beams import BeamSearch
from outrider.errors import Field, InvalidRequest, PromptTooLong
from outrider.parameters import Rule
from outrider.rpc.messages.rules import RULES
from outrider.rpc.wire import MAX_MESSAGE_BYTES
from outrider.token_tree import TreeShape
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""
Metadata = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]
"""Metadata that travel beside the message, such as a `traceparent`: text of printable ASCII, and bytes under names that
end in -bin."""


class CallMessage(TypedDict):
    """A call of an earlier turn; the arguments are a JSON object as text."""

    id: str
    name: str
    arguments: str


class ChatMessage(TypedDict):
    """One turn of a conversation; the role is system, developer, user, assistant or tool.

    An assistant's turn may have what it thought and called, and a tool's turn says which call it answers.
    """

    role: str
    content: str
    name: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[Sequence[CallMessage]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call; `parameters` is the JSON schema of its arguments, which are an object.

    Calls of a strict one have arguments that fit the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Whether the draft guesses, how, and which guesses are kept; under the rule `match` nothing changes a token.

    draft_count None lets the gateway choose. drafter is `lookup`, one that a service offers, a sequence of several
    whose guesses are merged, or empty for whatever is fastest; such a sequence may be in drafters as well. shape is
    that of a draft service's guesses. lenience belongs to the rule `lenient`, the other two numbers to `typical`. With
    return_rounds each round also has the guesses that were not kept, and the draft's log-probabilities.
    """

    enabled: bool = True
    draft_count: int | None = None
    rule: Rule | str | None = None
    drafter: str | Sequence[str] = ""
    shape: TreeShape | None = None
    lenience: float | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    return_rounds: bool = False
    drafters: Sequence[str] = ()


Message = Mapping[str, object]
"""A ChatMessage, or any other mapping with its keys."""


class GenerationOptions(TypedDict, total=False):
    """Everything but the prompt. None is the same as absent: then the gateway's default holds, which of temperature,
    cuts and repetition penalty is the model's own.
    """

    max_tokens: int | None
    """Most tokens to generate. Default: the model's, else 128, or what the context leaves."""
    min_tokens: int | None
    """No end before so many tokens. Default: 0."""
    ignore_eos: bool | None
    """Take the end of sequence for an ordinary token."""
    temperature: float | None
    """Divisor of the logits, 0 to 100; 0 takes the most probable token. Default: the model's."""
    top_k: int | None
    """Number of most probable tokens kept; 0 keeps all. Default: the model's."""
    top_p: float | None
    """Probability mass kept, above 0 and up to 1. Default: the model's."""
    min_p: float | None
    """Least probability kept, as a share of the largest one, 0 to 1. Default: the model's."""
    repetition_penalty: float | None
    """Divides the logits of tokens that occurred, above 0 and up to 100. Default: the model's."""
    presence_penalty: float | None
    """Lowers the logits of tokens in the output, -2 to 2. Default: 0."""
    frequency_penalty: float | None
    """Lowers the logits of tokens once for each time that they occurred in the output, -2 to 2. Default: 0."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of single tokens, -100 to 100. At most 300 entries."""
    seed: int | None
    """Seed of the noise. Default: a random one, which the result names."""
    sample_count: int | None
    """Answers, 1 to 8, each with a seed of its own. Default: 1."""
    beam_search: BeamSearch | None
    """Search with so many beams in the place of sampling: as many samples, best first. Default: none."""
    stop: str | Sequence[str] | None
    """Texts that end the output without being part of it. At most 64."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the output and are its last. At most 64."""
    banned_words: Sequence[str] | None
    """Words that must not occur, with or without a space before them. At most 64."""
    logprob_count: int | None
    """Alternatives whose log-probabilities come with every token, 0 to 20. Default: no log-probabilities."""
    echo: bool | None
    """Whether the prompt's tokens and log-probabilities come too; needs logprob_count."""
    cache_salt: str | None
    """Only requests with the same salt share what is cached of equal beginnings of prompts."""
    unrecorded: bool | None
    """Whether a target that records what it answered leaves this request out."""
    speculation: Speculation | None
    """Whether and how to speculate."""
    json_schema: str | Mapping[str, object] | None
    """A JSON schema, as text or as what json.loads makes of it, that the answer follows. At most one of these five."""
    regex: str | None
    """A regular expression that matches the whole answer."""
    choices: Sequence[str] | None
    """Texts of which the answer must be one."""
    lark: str | None
    """A grammar in llguidance's variant of Lark."""
    gbnf: str | None
    """A grammar as llama.cpp writes them."""
    prediction: str | Sequence[int] | None
    """Expected answer, as text or token ids, as far as it is known; it changes no token."""
    timeout_s: float | None
    """Seconds until the call ends with TimedOut. Default: the client's, which is none."""
    metadata: Metadata | None
    """Sent beside the request, after the client's own."""


class ChatOptions(GenerationOptions, total=False):
    """Options of a conversation: those of a generation, and tools."""

    tools: Sequence[Tool] | None
    """Tools that the model may call, at most 128."""
    tool_choice: str | Sequence[str] | None
    """auto, none or required; or the name of the tool that must be called, or names of which one must be."""
    parallel_tool_calls: bool | None
    """Whether there may be several calls in an answer. Default: true."""
    template_variables: Mapping[str, bool | float | str] | None
    """Variables that the model's chat template takes from outside, for instance enable_thinking."""
    add_generation_prompt: bool | None
    """Whether the assistant's turn begins at the end of the prompt. Default: true, unless the next one is."""
    continue_final_message: bool | None
    """Whether the answer goes on with the text of the last message. Default: false."""


Pairs = tuple[tuple[str, str | bytes], ...]

NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+")
TEXT = re.compile(r"[ -~]*")
KEY = re.compile(r"[!-~]+")
BINARY = "-bin"
SHAPE = "a mapping, or pairs of a name and a value"


def pairs(metadata: Metadata | None) -> Pairs:
    """Metadata as gRPC wants it, with names in lower case. Raises InvalidRequest about what cannot travel."""
    if metadata is None:
        return ()
    if isinstance(metadata, str | bytes) or not isinstance(metadata, Iterable):
        raise InvalidRequest("metadata", metadata, SHAPE)
    found: list[tuple[str, str | bytes]] = []
    for pair in metadata.items() if isinstance(metadata, Mapping) else metadata:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidRequest("metadata", pair, SHAPE)
        name, value = pair
        lower = name.lower() if isinstance(name, str) else ""
        if not NAME.fullmatch(lower):
            limit = "names of letters, digits, '_', '.' and '-' that do not begin with grpc-"
            raise InvalidRequest("metadata", name, limit)
        is_binary = lower.endswith(BINARY)
        if is_binary and not isinstance(value, bytes):
            raise InvalidRequest(f"metadata.{name}", value, "bytes, because the name ends in -bin")
        if not is_binary and not (isinstance(value, str) and TEXT.fullmatch(value)):
            limit = "text of printable ASCII; bytes need a name that ends in -bin"
            raise InvalidRequest(f"metadata.{name}", value, limit)
        found.append((lower, value))
    return tuple(found)


def key_pairs(api_key: str | None) -> Pairs:
    """Metadata that carries an API key; raises InvalidRequest, which does not repeat it, about what cannot travel."""
    if api_key is None:
        return ()
    if not isinstance(api_key, str) or not KEY.fullmatch(api_key):
        limit = "text of printable ASCII without spaces"
        raise InvalidRequest("api_key", "not shown", limit, (Field("api_key"), " must be ", limit))
    return (("authorization", f"Bearer {api_key}"),)


SAMPLING = frozenset(types_pb2.SamplingParameters.DESCRIPTOR.fields_by_name)
ACCEPTANCE = frozenset(types_pb2.AcceptanceSettings.DESCRIPTOR.fields_by_name)
MessageT = TypeVar("MessageT", bound=Protobuf)
# Those that are about the call and not about the answer.
CALL_OPTIONS = frozenset({"timeout_s", "metadata"})
NAMES = GenerationOptions.__optional_keys__
CONSTRAINTS = frozenset({"json_schema", "regex", "choices", "lark", "gbnf"})
CHAT_NAMES = ChatOptions.__optional_keys__ - NAMES
TURN_KEYS = ChatMessage.__required_keys__ | ChatMessage.__optional_keys__
TOOL_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
STRING_LISTS = frozenset({"stop", "banned_words", "texts"})
# What can be iterated, but is no list: no caller means the numbers of bytes, or the keys of a mapping.
NO_LISTS = (bytes, bytearray, memoryview, Mapping)
KINDS = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "text that UTF-8 can carry",
    FieldDescriptor.CPPTYPE_MESSAGE: "a mapping of token ids to numbers",
}


def generate_request(prompt: Prompt, options: GenerationOptions) -> pb.GenerateRequest:
    """The message for Generate.

    Raises InvalidRequest about a value that its field cannot carry, PromptTooLong about more than a message may have,
    and TypeError about an option that there is not.
    """
    message = _request(options)
    if isinstance(prompt, str):
        _put(message, "text", prompt)
    elif isinstance(prompt, NO_LISTS) or not isinstance(prompt, Iterable):
        raise InvalidRequest("prompt", prompt, "text, or a list of token ids")
    else:
        message.token_ids.SetInParent()
        _put(message.token_ids, "token_ids", prompt)
    return _sized(message)


def chat_request(messages: Iterable[Message], options: ChatOptions | GenerationOptions) -> pb.ChatRequest:
    """The message for Chat. Raises the same, and InvalidRequest about a turn without role or content."""
    rest = cast("GenerationOptions", {name: value for name, value in options.items() if name not in CHAT_NAMES})
    request = pb.ChatRequest(generation=_request(rest))
    _put_chat_options(request, cast("ChatOptions", options))
    if isinstance(messages, (str, *NO_LISTS)) or not isinstance(messages, Iterable):
        raise InvalidRequest("messages", messages, "a list, each a mapping with role and content")
    for index, turn in enumerate(messages):
        message, prefix = request.messages.add(), f"messages.{index}"
        if not isinstance(turn, Mapping) or not TURN_KEYS >= turn.keys() >= {"role", "content"}:
            others = ", ".join(sorted(TURN_KEYS - {"role", "content"}))
            raise InvalidRequest(prefix, turn, f"a mapping with role and content, and nothing else but {others}")
        for name, value in turn.items():
            if name == "tool_calls":
                _put_calls(message, value, f"{prefix}.tool_calls")
            else:
                _put(message, name, value, f"{prefix}.")
    return _sized(request)


def _put_calls(message: pb.ChatMessage, calls: object, prefix: str) -> None:
    if isinstance(calls, (str, *NO_LISTS)) or not isinstance(calls, Iterable):
        raise InvalidRequest(prefix, calls, "a list, each a mapping with id, name and arguments")
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping) or call.keys() != {"id", "name", "arguments"}:
            raise InvalidRequest(f"{prefix}.{index}", call, "a mapping with id, name and arguments, and nothing else")
        added = message.tool_calls.add()
        for name, value in call.items():
            _put(added, name, value, f"{prefix}.{index}.")


def _put_chat_options(request: pb.ChatRequest, options: ChatOptions) -> None:
    for index, tool in enumerate(options.get("tools") or ()):
        if not isinstance(tool, Tool):
            raise InvalidRequest(f"tools.{index}", tool, "an instance of Tool")
        added = request.tools.add()
        for name in ("name", "description", "strict"):
            _put(added, name, getattr(tool, name), f"tools.{index}.")
        if tool.parameters is not None:
            try:
                added.parameters = json.dumps(tool.parameters)
            except (TypeError, ValueError):
                raise InvalidRequest(f"tools.{index}.parameters", tool.parameters, "a mapping for JSON") from None
    choice = options.get("tool_choice")
    if choice is not None:
        names = [choice] if isinstance(choice, str) else choice
        mode = pb.TOOL_MODE_REQUIRED
        if isinstance(choice, str) and choice in TOOL_MODES:
            names, mode = [], TOOL_MODES[choice]
        request.tool_choice.mode = mode
        _put(request.tool_choice, "names", names, "tool_choice.")
    for name in ("parallel_tool_calls", "add_generation_prompt", "continue_final_message"):
        if (value := options.get(name)) is not None:
            _put(request, name, value)
    try:
        request.template_variables.update(options.get("template_variables") or {})
    except (TypeError, ValueError):
        limit = "a mapping of names to booleans, numbers and text"
        raise InvalidRequest("template_variables", options.get("template_variables"), limit) from None


def _request(options: GenerationOptions) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    for name, value in options.items():
        if name not in NAMES:
            raise TypeError(f"there is no option {name!r}")
        if value is None or name in CALL_OPTIONS:
            continue
        if name == "speculation":
            message.speculation.CopyFrom(_speculation(value))
        elif name == "prediction" and isinstance(value, str):
            _put(message, "prediction_text", value)
        elif name == "prediction":
            message.prediction_token_ids.SetInParent()
            _put(message.prediction_token_ids, "token_ids", value)
        elif name == "beam_search":
            if not isinstance(value, BeamSearch):
                raise InvalidRequest("beam_search", value, "an instance of BeamSearch")
            early_stopping = f"EARLY_STOPPING_{value.early_stopping.upper()}"
            message.beam_search.early_stopping = pb.EarlyStopping.Value(early_stopping)
            for field in ("width", "length_penalty"):
                _put(message.beam_search, field, getattr(value, field), "beam_search.")
        elif name in CONSTRAINTS:
            if message.HasField("constraint"):
                raise InvalidRequest(name, value, ("absent beside ", Field(message.constraint.WhichOneof("kind"))))
            message.constraint.CopyFrom(_constraint(name, value))
        else:
            _put(message.sampling if name in SAMPLING else message, name, value)
    return message


def _speculation(settings: object) -> pb.SpeculationSettings:
    message, prefix = pb.SpeculationSettings(), "speculation."
    if not isinstance(settings, Speculation):
        raise InvalidRequest("speculation", settings, "an instance of Speculation")
    if settings.rule is not None:
        try:
            message.rule = RULES[Rule(settings.rule)]
        except ValueError:
            raise InvalidRequest("speculation.rule", settings.rule, f"one of {', '.join(Rule)}") from None
    if settings.shape is not None:
        if not isinstance(settings.shape, TreeShape):
            raise InvalidRequest("speculation.shape", settings.shape, "an instance of TreeShape")
        message.shape.SetInParent()
        for name in ("max_depth", "max_children", "expansions", "max_width", "is_static"):
            _put(message.shape, name, getattr(settings.shape, name), prefix + "shape.")
    if settings.drafter and settings.drafters:
        raise InvalidRequest("speculation.drafters", settings.drafters, "absent beside speculation.drafter")
    named = settings.drafters or settings.drafter
    _put(message, "drafter" if isinstance(named, str) else "drafters", named, prefix)
    for name in ("enabled", "draft_count", "return_rounds"):
        if (value := getattr(settings, name)) is not None:
            _put(message, name, value, prefix)
    for name in sorted(ACCEPTANCE):
        if (value := getattr(settings, name)) is not None:
            _put(message.acceptance, name, value, prefix)
    return message


def _constraint(name: str, value: object) -> pb.Constraint:
    message = pb.Constraint()
    if name == "choices":
        message.choices.SetInParent()
        _put(message.choices, "texts", value, "choices.")
    elif isinstance(value, Mapping):
        try:
            _put(message, name, json.dumps(value))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, value, f"what JSON can carry: {error}") from None
    else:
        _put(message, name, value)
    return message


def _put(message: Protobuf, name: str, value: object, prefix: str = "") -> None:
    """Sets one field. Raises InvalidRequest about a value that is not of its kind, under the name after the prefix."""
    field = message.DESCRIPTOR.fields_by_name[name]
    # A text is a sequence of texts as well, but no caller means its letters.
    value = [value] if name in STRING_LISTS and isinstance(value, str) else value
    is_list = field.is_repeated and field.message_type is None
    try:
        if is_list and (isinstance(value, NO_LISTS) or not isinstance(value, Iterable)):
            raise TypeError(name)
        if is_list:
            getattr(message, name).extend(value)
        elif field.is_repeated:
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, OverflowError):
        kind = KINDS[field.cpp_type]
        raise InvalidRequest(prefix + name, value, f"a list, each {kind}" if is_list else kind) from None


def _sized(message: MessageT) -> MessageT:
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise PromptTooLong(
            f"prompt and options take {size} bytes, but a request has at most {MAX_MESSAGE_BYTES} bytes",
            bytes=size,
            limit=MAX_MESSAGE_BYTES,
        )
    return message
