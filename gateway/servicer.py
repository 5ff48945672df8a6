"""GenerationService: carries requests in and events out. Decides nothing; no client is waited for without end."""

from collections.abc import Callable
from contextlib import aclosing

import grpc

from gateway.chat_messages import chat_ask
from gateway.client_writer import ClientWriter
from gateway.front_door import FrontDoor
from gateway.generation_messages import ask_from, event_message
from gateway.requests import GenerationAsk
from outrider.process import tracing
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
ChatContext = grpc.aio.ServicerContext[pb.ChatRequest, pb.GenerateResponse]


class GenerationServicer(GenerationServiceServicer):
    """Serves Generate and Chat to clients that take each message in time."""

    def __init__(self, door: FrontDoor, client_stall_s: float) -> None:
        self._door = door
        self._client_stall_s = client_stall_s

    async def Generate(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Writes a message for every round and every completion.

        It writes instead of yielding, so that a client that leaves interrupts this very frame, and everything below it
        is closed before the call is over. A generator would be left to the garbage collector.
        """
        with tracing.span("Generate", parent=_carrier(context)):
            await self._answer(ask_from(request), context)

    async def Chat(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self, request: pb.ChatRequest, context: ChatContext
    ) -> None:
        """The same for a conversation."""
        with tracing.span("Chat", parent=_carrier(context)):
            await self._answer(await chat_ask(request, self._door.chat_template), context)

    async def _answer(self, ask: GenerationAsk, context: Context | ChatContext) -> None:
        async with (
            self._door.open([ask], context.time_remaining()) as generation,
            aclosing(generation.events) as events,
            ClientWriter(context, self._client_stall_s) as writer,
        ):
            async for _, event in events:
                await writer.write(event_message(event))
            await writer.flush()


def _carrier(context: Context | ChatContext) -> dict[str, str]:
    """What the client sent beside its message, as far as it is text."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def generation_service(door: FrontDoor, client_stall_s: float) -> dict[str, Callable[[grpc.aio.Server], None]]:
    """The service for `outrider.rpc.serve`: its full name, and what adds it to a server."""
    servicer = GenerationServicer(door, client_stall_s)
    name = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
    return {name: lambda server: add_GenerationServiceServicer_to_server(servicer, server)}
