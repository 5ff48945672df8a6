"""A real draft with a server that changes what it says: any field of any message, and what messages come at all."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from outrider.rpc import channels
from outrider.rpc.channels import open_channel
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

ANSWERS: Sequence[Descriptor] = [
    draft_pb.DraftServiceLinkResponse.DESCRIPTOR,
    model_pb.GetModelInfoResponse.DESCRIPTOR,
    model_pb.RollbackResponse.DESCRIPTOR,
]
"""All that a draft service sends."""

NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 99),
    FieldDescriptor.CPPTYPE_FLOAT: (math.nan, math.inf, -math.inf, -1.0, 0.0, 0.5, 2.0),
    FieldDescriptor.CPPTYPE_DOUBLE: (math.nan, math.inf, -math.inf, -1.0, 0.0, 0.5, 2.0),
}
# Among them reasons of errors that are the client's, and one whose class wants more than a sentence.
TEXTS = ("", "\n", "x" * 5000, "INVALID_REQUEST", "MODEL_NOT_FOUND", "PEER_LOST", "KV_CACHE_FULL", "NO_TOKEN_LEFT")
DATA = (b"", bytes(16), b"x" * 5000)
# Of a sentence's parts, which are JSON: none, nested deeply, half a character, no pairs.
MAPS = (
    {"field": "max_tokens", "value": "1", "limit": "2", "retry_after_s": "soon"},
    *({"parts": text} for text in ("[", "[" * 100_000, '[[true,"\\ud800"]]', "[1]", "{}")),
    {str(number): "x" for number in range(500)},
)
MANY = 2000


@dataclass(frozen=True)
class Lie:
    """A field of an answer by its path, what becomes of it, and how: given the message that has it."""

    path: tuple[FieldDescriptor, ...]
    what: str
    change: Callable[[Any, str], None]

    def __str__(self) -> str:
        return f"{self.path[0].containing_type.name} {'.'.join(step.name for step in self.path)}: {self.what}"

    def tell(self, answer: Message) -> None:
        """Changes an answer in place; of a list of messages all of them, and one where there is none."""
        holders: list[Any] = [answer]
        for step in self.path[:-1]:
            found = [getattr(holder, step.name) for holder in holders]
            if step.is_repeated:
                found = [each for several in found for each in (several or [several.add()])]
            holders = found
        for holder in holders:
            self.change(holder, self.path[-1].name)


def lies(descriptor: Descriptor) -> Iterator[Lie]:
    """Every lie about every field of a message and of those inside it, whatever fields it will have."""
    for path in _paths(descriptor):
        for what, change in _changes(path[-1]):
            yield Lie(path, what, change)


def _paths(descriptor: Descriptor, before: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    for each in descriptor.fields:
        yield (*before, each)
        if each.message_type is not None and not each.message_type.GetOptions().map_entry:
            yield from _paths(each.message_type, (*before, each))


def _changes(of: FieldDescriptor) -> Iterator[tuple[str, Callable[[Any, str], None]]]:
    def put(value: Any) -> Callable[[Any, str], None]:
        return lambda holder, name: setattr(holder, name, value)

    def put_list(make: Callable[[list[Any]], list[Any]]) -> Callable[[Any, str], None]:
        def change(holder: Any, name: str) -> None:
            copies = make(list(getattr(holder, name)))
            holder.ClearField(name)
            getattr(holder, name).extend(copies)

        return change

    yield "left out", lambda holder, name: holder.ClearField(name)
    values = NUMBERS.get(of.cpp_type, ())
    if of.message_type is not None and of.message_type.GetOptions().map_entry:
        for text in MAPS:
            yield f"{text!r:.60}", lambda holder, name, text=text: getattr(holder, name).update(text)  # type: ignore[misc]
    elif of.is_repeated:
        yield "twice", put_list(lambda items: items * 2)
        yield "reversed", put_list(lambda items: items[::-1])
        yield "one less", put_list(lambda items: items[:-1])
        yield f"{MANY} times", put_list(lambda items: items[:1] * MANY)
        for value in values:
            yield f"{value} each", put_list(lambda items, value=value: [value for _ in items or [0]])  # type: ignore[misc]
    elif of.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        yield "empty", lambda holder, name: getattr(holder, name).CopyFrom(type(getattr(holder, name))())
        yield "set", lambda holder, name: getattr(holder, name).SetInParent()
    elif of.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        yield "the other", lambda holder, name: setattr(holder, name, not getattr(holder, name))
    elif of.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        for value in DATA if of.type == FieldDescriptor.TYPE_BYTES else TEXTS:
            yield f"{value!r:.40}", put(value)
    else:
        for value in values:
            yield str(value), put(value)
        if of.cpp_type in {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64}:
            yield "one more", lambda holder, name: setattr(holder, name, min(getattr(holder, name) + 1, 2**31 - 1))
            yield "one less", lambda holder, name: setattr(holder, name, getattr(holder, name) - 1)


Frame = draft_pb.DraftServiceLinkResponse
Context = grpc.aio.ServicerContext[Any, Any]
Manner = Callable[[Frame, Context], AsyncIterator[Frame | bytes]]
"""What comes in the place of a right frame: an asynchronous generator of messages, or of bytes that are none."""


async def silent(_frame: Frame, _context: Context) -> AsyncIterator[bytes]:
    """Sends no answer."""
    return
    yield b""


async def garbage(_frame: Frame, _context: Context) -> AsyncIterator[bytes]:
    """No message at all."""
    yield b"\xff" * 10


async def large(frame: Frame, _context: Context) -> AsyncIterator[Frame]:
    """More than any draft has to say, though a channel would carry it."""
    frame.numerics_id = "x" * (3 << 20)
    yield frame


async def flood(frame: Frame, _context: Context) -> AsyncIterator[Frame]:
    """Sends one answer again and again."""
    while True:
        yield frame


async def to_others(frame: Frame, _context: Context) -> AsyncIterator[Frame]:
    """Answers for sessions that do not exist, without end."""
    while True:
        for response in frame.responses:
            response.fence.session_id = bytes(16)
        yield frame


async def twice(frame: Frame, _context: Context) -> AsyncIterator[Frame]:
    """Every answer comes again."""
    yield frame
    yield frame


async def ended(_frame: Frame, context: Context) -> AsyncIterator[Frame]:
    """The call ends with details that are none."""
    context.set_trailing_metadata((("grpc-status-details-bin", b"\xff" * 10),))
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens is 1")
    yield Frame()


FAULTY: Sequence[Manner] = (garbage, large, flood, to_others)
"""Manners in which no draft may answer."""
MANNERS: Sequence[Manner] = (*FAULTY, twice, ended, silent)


@dataclass
class LyingDraft:
    """Passes everything on, and what comes back as `lie` and `manner` want.

    `told` counts the answers with the lie, or what came in that manner where there is none, `greeted` the handshakes.
    """

    behind: grpc.aio.Channel
    lie: Lie | None = None
    manner: Manner | None = None
    told: int = 0
    greeted: int = 0
    _life: int = 0
    _calls: set[Any] = field(default_factory=set)

    def become(self, lie: Lie | None, manner: Manner | None) -> None:
        """Begins anew, as another incarnation against which no gateway holds anything."""
        self.lie, self.manner, self.told, self.greeted = lie, manner, 0, 0
        self._life += 1
        for call in self._calls:
            call.cancel()

    async def link(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Frame | bytes]:
        """DraftService's."""
        call = DraftServiceStub(self.behind).Link(requests)
        self._calls.add(call)
        try:
            async for frame in call:
                self.changed(frame)
                if self.manner is None:
                    yield frame
                    continue
                self.told += self.lie is None
                async for each in self.manner(frame, context):
                    yield each
        except asyncio.CancelledError:
            # Where it began anew. grpc.aio says nothing to the other end of a handler that was cancelled.
            if call.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "The draft begins anew")
            raise
        finally:
            self._calls.discard(call)
            call.cancel()

    async def info(self, request: model_pb.GetModelInfoRequest, _context: object) -> model_pb.GetModelInfoResponse:
        """ModelService's."""
        answer = self.changed(await ModelServiceStub(self.behind).GetModelInfo(request))
        self.greeted += 1
        return answer

    async def rollback(self, request: model_pb.RollbackRequest, _context: object) -> model_pb.RollbackResponse:
        """ModelService's."""
        return self.changed(await ModelServiceStub(self.behind).Rollback(request))

    def changed(self, answer: Any) -> Any:
        """The answer, with the lie where it is about such a message."""
        if not isinstance(answer, model_pb.RollbackResponse):
            answer.instance_id = (answer.instance_id + self._life) % 2**64
        if self.lie is not None and self.lie.path[0].containing_type is answer.DESCRIPTOR:
            self.lie.tell(answer)
            self.told += 1
        return answer


@asynccontextmanager
async def lying_draft(behind: str, listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[LyingDraft, str]]:
    """Serves one in front of the draft service at an address; yields it and where it answers."""
    async with open_channel(behind) as channel:
        draft = LyingDraft(channel)

        def raw(answer: Any) -> bytes:
            return answer if isinstance(answer, bytes) else answer.SerializeToString()  # type: ignore[no-any-return]

        handlers = {
            "outrider.v1.DraftService": {
                "Link": grpc.stream_stream_rpc_method_handler(
                    draft.link, draft_pb.DraftServiceLinkRequest.FromString, raw
                )
            },
            "outrider.v1.ModelService": {
                "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                    draft.info, model_pb.GetModelInfoRequest.FromString, raw
                ),
                "Rollback": grpc.unary_unary_rpc_method_handler(
                    draft.rollback, model_pb.RollbackRequest.FromString, raw
                ),
            },
        }
        add: dict[str, Callable[[grpc.aio.Server], None]] = {
            name: lambda server, name=name, methods=methods: server.add_generic_rpc_handlers(  # type: ignore[misc]
                (grpc.method_handlers_generic_handler(name, methods),)
            )
            for name, methods in handlers.items()
        }
        running = await channels.serve(listen, add)
        try:
            yield draft, running.address
        finally:
            await running.stop(0)
