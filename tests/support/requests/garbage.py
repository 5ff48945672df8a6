"""Messages that are almost right: valid ones in which some fields hold what no peer should send.

A service must answer or refuse each of them with a documented status and a sentence of its own, keep nothing, and
serve everybody else as before.
"""

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.errors import OutriderError
from outrider.rpc.errors import UNEXPECTED_TEXT
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb

MAX_GARBLED = 3
DOCUMENTED = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
UNDRAWABLE = "no token can be drawn"
PYTHON_TEXT = re.compile(r"Traceback|Error\b|Exception|0x[0-9a-f]{6}|object at|<class|\.py\b|pydantic|NoneType")

EDGES = (0, 1, -1, 4, 5, 6, 7, 33, 256, 257, 640, 641, 4096, 4097, 2**31 - 1, -(2**31))
LONG_EDGES = (*EDGES, 2**63 - 1, -(2**63))
UNSIGNED = (0, 1, 2**31 - 1)
FLOATS = (0.0, 1.0, -1.0, 1e-310, 1e-30, 1.5, 100.0, 100.1, 1e300, float("inf"), float("-inf"), float("nan"))
MAX_LONG = 5
LENGTHS = (0, 1, 2, 5, 33, 65, 301, 5000)
TEXTS = ("", "model", "no such", "é\n" * 3000)
SCALARS: dict[int, Callable[[Random], Any]] = {
    FieldDescriptor.TYPE_INT32: lambda chance: chance.choice((*EDGES, chance.randint(-(2**31), 2**31 - 1))),
    FieldDescriptor.TYPE_ENUM: lambda chance: chance.choice(EDGES),
    FieldDescriptor.TYPE_INT64: lambda chance: chance.choice(LONG_EDGES),
    FieldDescriptor.TYPE_UINT32: lambda chance: chance.choice((*UNSIGNED, 2**32 - 1)),
    FieldDescriptor.TYPE_UINT64: lambda chance: chance.choice((*UNSIGNED, 2**64 - 1)),
    FieldDescriptor.TYPE_FIXED32: lambda chance: chance.choice((*UNSIGNED, 2**32 - 1)),
    FieldDescriptor.TYPE_FIXED64: lambda chance: chance.choice((*UNSIGNED, 2**64 - 1)),
    FieldDescriptor.TYPE_DOUBLE: lambda chance: chance.choice(FLOATS),
    FieldDescriptor.TYPE_FLOAT: lambda chance: chance.choice(FLOATS),
    FieldDescriptor.TYPE_BOOL: lambda chance: chance.choice((False, True)),
    FieldDescriptor.TYPE_BYTES: lambda chance: bytes(chance.choices(range(256), k=chance.randint(0, 40))),
    FieldDescriptor.TYPE_STRING: lambda chance: chance.choice(TEXTS),
}


def garbled(chance: Random, message: Message) -> Message:
    """A copy in which one field, at any depth, holds something else, or nothing."""
    copy = type(message)()
    copy.CopyFrom(message)
    # Whatever is wrong with a fence hides everything else that is wrong with its message.
    others = [place for place in fields(copy) if "Fence" not in (place[1].containing_type.name, _kind(place[1]))]
    places = fields(copy) if not others or not chance.randint(0, 9) else others
    if places:
        spoil(chance, *chance.choice(places))
    return copy


def fields(message: Message) -> list[tuple[Message, FieldDescriptor]]:
    """All fields of a message and of the messages that are set in it, each with the message that it belongs to."""
    places = []
    for field in message.DESCRIPTOR.fields:
        places.append((message, field))
        if field.message_type is not None and not field.is_repeated and message.HasField(field.name):
            places += fields(getattr(message, field.name))
    return places


def _kind(field: FieldDescriptor) -> str:
    return field.message_type.name if field.message_type is not None else ""


def spoil(chance: Random, part: Any, field: FieldDescriptor) -> None:
    """Puts garbage into one field of a message."""
    value = getattr(part, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys, values = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        first, count = SCALARS[keys.type](chance), chance.choice(LENGTHS)
        for number in range(count):
            if isinstance(first, str):
                # One long name is enough, or the message would be over the limit of any.
                name = f"{first}0" if number == 0 else str(number)
            else:
                name = min(first + number, 2**31 - 1)
            if values.message_type is not None:
                value[name].SetInParent()
            else:
                value[name] = SCALARS[values.type](chance) if number < 2 else values.default_value
    elif field.is_repeated and field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        value.extend([field.message_type._concrete_class()] * chance.choice((1, 40)))
    elif field.is_repeated:
        each, count = SCALARS[field.type](chance), chance.choice(LENGTHS)
        # Thousands of long ones would only ever be over the limit of a message.
        value[:] = [each] * (min(count, MAX_LONG) if isinstance(each, str) and len(each) > 100 else count)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        part.ClearField(field.name) if part.HasField(field.name) else value.SetInParent()
    else:
        setattr(part, field.name, SCALARS[field.type](chance))


def conversation(chance: Random, messages: Sequence[Message]) -> list[Message]:
    """The first message, which opens, and some others, with a few fields garbled among them; or in no order at all."""
    later = [chance.choice(messages) for _ in range(chance.randint(0, 4))]
    sent = [messages[0], *later] if chance.randint(0, 7) else later or [messages[-1]]
    for _ in range(chance.randint(0, MAX_GARBLED)):
        index = chance.randrange(len(sent))
        sent[index] = garbled(chance, sent[index])
    return sent


def check_refusal(error: OutriderError) -> None:
    """Fails unless the error is a documented one with a sentence of ours."""
    assert error.message != UNEXPECTED_TEXT
    assert not PYTHON_TEXT.search(error.message), error.message
    assert len(error.message) < 400
    assert error.status in DOCUMENTED or UNDRAWABLE in error.message, (error.status, error.message)


SESSION = pb.OpenSession(
    token_ids=[5, 17, 200, 3, 90],
    prompt_len=5,
    sampling=pb.SamplingParameters(temperature=1.0, logit_bias={3: 1.0}),
    seed=7,
    max_len=60,
    eos_token_ids=[0],
    stop_token_ids=[9],
    trace_context={"tracestate": "a=b"},
)
PART = pb.OpenPart(token_ids=SESSION.token_ids[:2])
PARTED = pb.OpenSession(token_ids=SESSION.token_ids[2:], part_len=2, prompt_len=5, max_len=60)

BRANCHES = pb.Branches(
    branches=[pb.Branch(accepted_count=count, next_token_id=4, token_ids=[5, 6]) for count in (0, 1)],
    plain_on_miss=True,
)


def fence(base_len: int, epoch: int = 1) -> pb.Fence:
    """A fence of the one session that garbage is about."""
    return pb.Fence(session_id=bytes(range(16)), epoch=epoch, base_len=base_len)


def target_messages() -> list[Message]:
    """What a gateway sends to a target."""
    step = target_pb.TargetStep(proposal=pb.TokenTree(token_ids=[4, 5, 6], parents=[0, 1, 1]), plain_budget=2)
    request = target_pb.VerifyRequest
    return [
        request(fence=fence(5), open=target_pb.TargetOpen(session=SESSION, step=step)),
        request(fence=fence(6), step=step),
        request(fence=fence(6, epoch=2), step=step),
        request(fence=fence(7), acknowledge=target_pb.Acknowledge(plain_budget=2)),
        request(fence=fence(5), branches=BRANCHES),
        request(fence=fence(6), branches=BRANCHES),
        request(fence=fence(5), ping=pb.Ping()),
        request(fence=fence(5), part=PART),
        request(fence=fence(5, epoch=3), part=PART),
        request(fence=fence(5, epoch=3), open=target_pb.TargetOpen(session=PARTED, step=step)),
        request(fence=fence(5), close=pb.CloseSession()),
    ]


def draft_messages() -> list[Message]:
    """What a gateway sends to a draft."""
    request = draft_pb.ProposeRequest
    return [
        request(fence=fence(5), open=draft_pb.DraftOpen(session=SESSION, draft_count=3, drafter="model")),
        request(fence=fence(6), advance=draft_pb.DraftAdvance(token_ids=[8], draft_count=2)),
        request(fence=fence(6, epoch=2), advance=draft_pb.DraftAdvance(token_ids=[8, 9], draft_count=2)),
        request(fence=fence(6), advance=draft_pb.DraftAdvance(token_ids=[8], draft_count=2, branch_count=4)),
        request(
            fence=fence(8),
            advance=draft_pb.DraftAdvance(token_ids=[8, 9], draft_count=2, branch_count=4, went_on=True),
        ),
        request(fence=fence(5), ping=pb.Ping()),
        request(fence=fence(5), part=PART),
        request(fence=fence(5, epoch=3), part=PART),
        request(fence=fence(5, epoch=3), open=draft_pb.DraftOpen(session=PARTED, draft_count=3)),
        request(fence=fence(5), close=pb.CloseSession()),
    ]
