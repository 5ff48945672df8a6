"""What each method of gRPC is sent: messages of its type, most of them almost right, and bytes that are no message."""

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.requests.bad_requests import good_request
from support.requests.garbage import conversation, draft_messages, fence, garbled, target_messages
from support.rest.random_bodies import changed

from outrider import v1
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb

# Of one call that takes many, and sessions in a frame of a link.
MAX_MESSAGES, MAX_SESSIONS = 12, 8
# Of an answer: long ones would take the time of many messages.
MAX_TOKENS = (1, 1, 1, 3)
SESSION_ID = fence(0).session_id
# Numbers without an end, a field that is longer than all that comes, nothing.
PIECES = (b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", b"\0")
# For messages that no example is of, an empty one is garbled.
EXAMPLES: dict[str, Sequence[Message]] = {
    "outrider.v1.GenerateRequest": [
        good_request(),
        pb.GenerateRequest(text="Once", beam_search=pb.BeamSearch(width=2)),
        pb.GenerateRequest(text="Once", sample_count=2, logprob_count=3, constraint=pb.Constraint(regex="[a-z ]+")),
    ],
    "outrider.v1.ChatRequest": [
        pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Once")], generation=pb.GenerateRequest(seed=1)),
        pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="Once")],
            tools=[pb.Tool(name="look", description="Looks.", parameters='{"type": "object"}')],
            tool_choice=pb.ToolChoice(names=["look"]),
        ),
    ],
    "outrider.v1.RollbackRequest": [model_pb.RollbackRequest(fence=fence(5))],
    "grpc.health.v1.HealthCheckRequest": [health_pb2.HealthCheckRequest(service="outrider.v1.TargetService")],
    "grpc.reflection.v1alpha.ServerReflectionRequest": [
        reflection_pb2.ServerReflectionRequest(list_services="*"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
    ],
}
LINKS = {
    "outrider.v1.DraftServiceLinkRequest": draft_messages(),
    "outrider.v1.TargetServiceLinkRequest": target_messages(),
}


@dataclass(frozen=True, slots=True)
class Method:
    """A method by the path of its calls, with the name of the messages that it takes."""

    path: str
    request: str
    takes_many: bool
    gives_many: bool


def methods() -> list[Method]:
    """Methods of all services in the protocol, and of the two that every server can have beside them."""
    names = [module.name for module in pkgutil.iter_modules(v1.__path__) if module.name.endswith("_pb2")]
    files: list[FileDescriptor] = [import_module(f"outrider.v1.{name}").DESCRIPTOR for name in names]
    services = [
        service
        for file in (*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
    ]
    return [
        Method(
            f"/{service.full_name}/{method.name}",
            method.input_type.full_name,
            method.client_streaming,
            method.server_streaming,
        )
        for service in services
        for method in service.methods
    ]


class Garbage:
    """The calls of a method, the same for the same seed."""

    def __init__(self, method: Method, seed: int) -> None:
        self._method = method
        self._chance = Random(seed)
        self._kind = GetMessageClass(Default().FindMessageTypeByName(method.request))

    def __iter__(self) -> Iterator[tuple[list[bytes], int]]:
        """The messages of a call, and how many that are, without end; a frame of a link is as many as it carries."""
        while True:
            if not self._method.takes_many:
                yield [self._bytes()], 1
                continue
            sent = [self._message() for _ in range(self._chance.randint(1, MAX_MESSAGES))]
            count = sum(max(1, len(getattr(message, "requests", ()))) for message in sent)
            # One that is no message ends the call.
            yield [*(message.SerializeToString() for message in sent), self._bytes()], count + 1

    def _bytes(self) -> bytes:
        chance = self._chance
        if chance.random() < 0.1:
            return chance.randbytes(chance.randint(0, 64))
        data = self._message().SerializeToString()
        return changed(chance, data, PIECES) if chance.random() < 0.4 else data

    def _message(self) -> Message:
        chance = self._chance
        if self._method.request in LINKS:
            return self._frame(LINKS[self._method.request])
        examples = EXAMPLES.get(self._method.request, ())
        message = chance.choice(examples) if examples and chance.random() < 0.9 else self._kind()
        for _ in range(chance.choice((1, 2, 3, 8))):
            message = garbled(chance, message)
        return self._shortened(message)

    def _frame(self, messages: Sequence[Message]) -> Message:
        frame: Any = self._kind()
        for _ in range(self._chance.randint(1, MAX_SESSIONS)):
            session_id = self._chance.randbytes(len(SESSION_ID))
            for message in conversation(self._chance, messages):
                added = frame.requests.add()
                added.CopyFrom(message)
                if added.fence.session_id == SESSION_ID:
                    added.fence.session_id = session_id
        return frame  # type: ignore[no-any-return]

    def _shortened(self, message: Message) -> Message:
        generation = getattr(message, "generation", message)
        if isinstance(generation, pb.GenerateRequest) and self._chance.random() < 0.99:
            copy = type(message)()
            copy.CopyFrom(message)
            shortened = getattr(copy, "generation", copy)
            if shortened.max_tokens >= 0:
                shortened.max_tokens = self._chance.choice(MAX_TOKENS)
            return copy
        return message
