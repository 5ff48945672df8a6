"""Messages to a gateway that become far more than they are, of each kind that there is, with the methods for them."""

from functools import cache

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

MANY = 1_900_000
GENERATE, CHAT = "/outrider.v1.GenerationService/Generate", "/outrider.v1.GenerationService/Chat"


def empty(kind: type[pb.ChatRequest | pb.GenerateRequest], name: str) -> bytes:
    """A message with as many empty entries of a field as there is room for."""
    return bytes([kind.DESCRIPTOR.fields_by_name[name].number << 3 | 2, 0]) * MANY


@cache
def heavy_messages() -> dict[str, tuple[str, bytes]]:
    """Methods and messages by what they have much of. Made when they are asked for: they take seconds."""
    numbers = Value(list_value=ListValue(values=[Value(bool_value=True)] * 400_000))
    return {
        "messages": (CHAT, empty(pb.ChatRequest, "messages")),
        "tools": (CHAT, empty(pb.ChatRequest, "tools")),
        "calls": (
            CHAT,
            pb.ChatRequest(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * MANY)]).SerializeToString(),
        ),
        "variables": (CHAT, pb.ChatRequest(template_variables=Struct(fields={"a": numbers})).SerializeToString()),
        "many variables": (
            CHAT,
            pb.ChatRequest(
                template_variables=Struct(fields={str(number): Value() for number in range(200_000)})
            ).SerializeToString(),
        ),
        "arguments": (
            CHAT,
            pb.ChatRequest(
                messages=[
                    pb.ChatMessage(
                        role="assistant", tool_calls=[pb.ToolCall(name="f", arguments='{"a":[' + "[]," * 1_300_000)]
                    )
                ]
            ).SerializeToString(),
        ),
        "parameters": (
            CHAT,
            pb.ChatRequest(
                messages=[pb.ChatMessage(role="user", content="fox")],
                tools=[pb.Tool(name="f", parameters='{"a":[' + "[]," * 1_300_000 + "[]]}")],
            ).SerializeToString(),
        ),
        "stops": (GENERATE, empty(pb.GenerateRequest, "stop")),
        "choices": (
            GENERATE,
            pb.GenerateRequest(constraint=pb.Constraint(choices=pb.Choices(texts=[""] * MANY))).SerializeToString(),
        ),
        "biases": (
            GENERATE,
            pb.GenerateRequest(
                sampling=types_pb2.SamplingParameters(logit_bias=dict.fromkeys(range(200_000), 1.0))
            ).SerializeToString(),
        ),
        "token ids": (
            GENERATE,
            pb.GenerateRequest(token_ids=types_pb2.TokenIds(token_ids=[1] * 4_000_000)).SerializeToString(),
        ),
        "text": (GENERATE, pb.GenerateRequest(text="fox " * 1_000_000).SerializeToString()),
        "no message": (GENERATE, b"\xff" * 4_000_000),
    }
