"""Errors that gRPC makes itself, distinguished from those that a service of ours raised."""

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2

import gateway.__main__ as gateway_main
import outrider.cli.up as outrider_up
from outrider.errors import (
    CacheFull,
    Field,
    InvalidRequest,
    NotReady,
    OutriderError,
    Overloaded,
    PeerLost,
    ProtocolViolation,
    error_classes,
)
from outrider.rpc import channels, errors, wire
from outrider.v1 import model_service_pb2 as pb
from outrider.v1 import types_pb2 as pb_types
from outrider.v1.model_service_pb2_grpc import (
    ModelServiceServicer,
    ModelServiceStub,
    add_ModelServiceServicer_to_server,
)

# Packages of ours; importing the two above brings in every module that defines an error.
HOUSE = (gateway_main.__name__.partition(".")[0], outrider_up.__name__.partition(".")[0])


class LosesItsPeer(ModelServiceServicer):
    """Passes on that one of its services went away."""

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:  # noqa: N802
        """Always fails."""
        raise PeerLost("the target went away")


@pytest.fixture
async def server() -> AsyncIterator[channels.RunningServer]:
    add = {"outrider.v1.ModelService": lambda s: add_ModelServiceServicer_to_server(LosesItsPeer(), s)}
    running = await channels.serve("127.0.0.1:0", add)
    yield running
    await running.stop(0)


async def error_of(call: "grpc.aio.UnaryUnaryCall[object, object]") -> grpc.aio.AioRpcError:
    """How a call ended."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_loss_that_the_peer_tells_is_not_the_loss_of_the_peer(server: channels.RunningServer) -> None:
    """Both are PeerLost, and neither carries a mark on to the next process."""
    async with channels.open_channel(server.address) as channel:
        told = await error_of(ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10))
        await server.stop(0)
        own = await error_of(ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10))
    assert (told.code(), own.code()) == (grpc.StatusCode.UNAVAILABLE,) * 2
    assert (errors.said_by_peer(told), errors.said_by_peer(own)) == (True, False)
    for error in map(errors.error_from, (told, own)):
        assert type(error) is PeerLost
        assert error.metadata == {}


@pytest.mark.parametrize("limited", ["sender", "receiver"])
async def test_a_message_over_the_limit_is_the_senders_fault(server: channels.RunningServer, limited: str) -> None:
    """Whichever side noticed it; gRPC calls it an exhausted resource, and waiting would not help."""
    options = wire.channel_options() if limited == "sender" else (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        method = channel.unary_unary("/outrider.v1.ModelService/GetModelInfo")
        error = errors.error_from(await error_of(method(b"x" * (wire.MAX_MESSAGE_BYTES + 5), timeout=10)))
    assert type(error) is InvalidRequest
    assert error.message == f"message is '{wire.MAX_MESSAGE_BYTES + 5} bytes', but must be at most 4194304 bytes"


async def test_other_exhausted_resources_stay_what_they_are() -> None:
    """Only gRPC's own sentence about sizes is translated."""
    empty = grpc.aio.Metadata()
    error = errors.error_from(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, empty, empty, "too many pings"))
    assert type(error) is OutriderError
    assert error.message == "RESOURCE_EXHAUSTED: too many pings"


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("fence.epoch", -1, "at least 1"),
        CacheFull("no block: 0 of 4 free", free=0),
        Overloaded("zu viel", limit=3),
        NotReady("the service is stopping"),
        ProtocolViolation(["step of ", Field("prompt"), " is late"], base_len=4),
        OutriderError("the computation of a step failed"),
    ],
)
def test_what_ends_a_session_arrives_as_it_was_raised(error: OutriderError) -> None:
    """Class, text, parts and metadata survive in an answer of a link, as they do in the status of a call."""
    sent = pb_types.SessionError.FromString(errors.session_error(error).SerializeToString())
    arrived = errors.session_error_from(sent)
    assert type(arrived) is type(error)
    assert (sent.message, sent.reason) == (error.message, error.reason)
    assert (arrived.message, arrived.parts, arrived.metadata) == (error.message, error.parts, error.metadata)


@pytest.mark.parametrize(
    "parts",
    ["[", "[" * 100_000, "{}", "[1]", "null", "[[1, 2, 3]]", '[[true, "\\ud800"]]', "1" * 5000],
    ids=lambda parts: parts[:12],
)
def test_an_error_that_says_anything_is_an_error_with_its_sentence(parts: str) -> None:
    """Of every class, whatever its constructor wants; what are no parts of a sentence are none."""
    for reason in (*error_classes(), "NEW"):
        sent = pb_types.SessionError(message="why", reason=reason, metadata={"parts": parts})
        arrived = errors.session_error_from(sent)
        assert isinstance(arrived, OutriderError)
        assert arrived.message == "why"


@pytest.mark.parametrize(
    "details",
    [
        b"\xff" * 10,
        status_pb2.Status(code=3).SerializeToString(),
        status_pb2.Status(
            code=13, details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff" * 5)]
        ).SerializeToString(),
    ],
)
def test_trailers_that_are_no_status_are_the_loss_of_the_peer(details: bytes) -> None:
    """Whatever bytes a peer puts there, what gRPC says of the call remains."""
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", details))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), trailers, "x")
    assert isinstance(errors.error_from(error), PeerLost)


def test_a_reason_that_is_not_known_is_an_error_all_the_same() -> None:
    """A newer service may have more of them."""
    arrived = errors.session_error_from(pb_types.SessionError(message="why", reason="NEW", metadata={"a": "b"}))
    assert (type(arrived), arrived.message, arrived.metadata) == (OutriderError, "why", {"a": "b"})


class Borrowing(OutriderError):
    """A class without a reason of its own: it must not be taken for the class whose reason it inherits."""


def test_a_class_without_a_reason_of_its_own_stands_for_nothing() -> None:
    """An unexpected error arrives as what it is, whichever subclasses the receiving process happens to have."""
    status = errors.status_of(OutriderError("internal error"))
    call = grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )
    assert type(errors.error_from(call)) is OutriderError


def test_every_error_has_a_reason_of_its_own() -> None:
    """A reason that two classes share would turn one into the other on its way through gRPC."""
    kinds = [kind for kind in family(OutriderError) if kind is not Borrowing and kind.__module__.startswith(HOUSE)]
    assert len({kind.reason for kind in kinds}) == len(kinds) > 15


def family(kind: type[OutriderError]) -> list[type[OutriderError]]:
    """A class and all its subclasses."""
    return [kind, *(found for child in kind.__subclasses__() for found in family(child))]
