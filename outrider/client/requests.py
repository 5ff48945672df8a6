"""From plain values to request messages. Opens no connection and checks no range; defaults belong to the gateway.

Only those fields are set that the caller named.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Protobuf

from outrider.client.settings import GenerationOptions, Message, Prompt, Speculation
from outrider.errors import InvalidRequest, PromptTooLong
from outrider.parameters import Rule
from outrider.rpc import MAX_MESSAGE_BYTES
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire_acceptance import RULES

SAMPLING = frozenset(types_pb2.SamplingParameters.DESCRIPTOR.fields_by_name)
ACCEPTANCE = frozenset(types_pb2.AcceptanceSettings.DESCRIPTOR.fields_by_name)
MessageT = TypeVar("MessageT", bound=Protobuf)
# Those that are about the call and not about the answer.
CALL_OPTIONS = frozenset({"timeout_s", "metadata"})
NAMES = GenerationOptions.__optional_keys__
STRING_LISTS = frozenset({"stop", "banned_words"})
# What can be iterated, but is no list: nobody means the numbers of bytes, or the keys of a mapping.
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


def chat_request(messages: Iterable[Message], options: GenerationOptions) -> pb.ChatRequest:
    """The message for Chat. Raises the same, and InvalidRequest about a turn without role or content."""
    request = pb.ChatRequest(generation=_request(options))
    if isinstance(messages, (str, *NO_LISTS)) or not isinstance(messages, Iterable):
        raise InvalidRequest("messages", messages, "a list, each a mapping with role and content")
    for index, turn in enumerate(messages):
        message, prefix = request.messages.add(), f"messages.{index}"
        if not isinstance(turn, Mapping) or turn.keys() != {"role", "content"}:
            raise InvalidRequest(prefix, turn, "a mapping with role and content, and nothing else")
        for name, value in turn.items():
            _put(message, name, value, f"{prefix}.")
    return _sized(request)


def _request(options: GenerationOptions) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    for name, value in options.items():
        if name not in NAMES:
            raise TypeError(f"there is no option {name!r}")
        if value is None or name in CALL_OPTIONS:
            continue
        if name == "speculation":
            message.speculation.CopyFrom(_speculation(value))
        else:
            _put(message.sampling if name in SAMPLING else message, name, value)
    return message


def _speculation(settings: object) -> pb.SpeculationSettings:
    message, prefix = pb.SpeculationSettings(), "speculation."
    if not isinstance(settings, Speculation):
        raise InvalidRequest("speculation", settings, "an instance of Speculation")
    if settings.rule is not None:
        message.rule = RULES[_rule(settings.rule)]
    for name in ("enabled", "draft_count", "drafter", "return_rounds"):
        if (value := getattr(settings, name)) is not None:
            _put(message, name, value, prefix)
    for name in sorted(ACCEPTANCE):
        if (value := getattr(settings, name)) is not None:
            _put(message.acceptance, name, value, prefix)
    return message


def _rule(name: str) -> Rule:
    try:
        return Rule(name)
    except ValueError:
        raise InvalidRequest("speculation.rule", name, f"one of {', '.join(Rule)}") from None


def _put(message: Protobuf, name: str, value: object, prefix: str = "") -> None:
    """Sets one field. Raises InvalidRequest about a value that is not of its kind, under the name behind the prefix."""
    field = message.DESCRIPTOR.fields_by_name[name]
    # A text is a sequence of texts as well, but nobody means its letters.
    value = [value] if name in STRING_LISTS and isinstance(value, str) else value
    try:
        if field.message_type is not None:
            getattr(message, name).update(value)
        elif field.is_repeated:
            getattr(message, name).extend(_entries(value))
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, OverflowError):
        kind = KINDS[field.cpp_type]
        is_list = field.is_repeated and field.message_type is None
        raise InvalidRequest(prefix + name, value, f"a list, each {kind}" if is_list else kind) from None


def _entries(value: object) -> Iterable[object]:
    """What a list holds; raises TypeError about what is none."""
    if isinstance(value, NO_LISTS) or not isinstance(value, Iterable):
        raise TypeError(f"{type(value).__name__} is no list")
    return value


def _sized(message: MessageT) -> MessageT:
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise PromptTooLong(
            f"prompt and options take {size} bytes, but a request has at most {MAX_MESSAGE_BYTES} bytes",
            bytes=size,
            limit=MAX_MESSAGE_BYTES,
        )
    return message
