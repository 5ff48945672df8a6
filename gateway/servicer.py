"""GenerationService: carries requests in and events out, and bounds how much runs at once.

Nothing is decided here but that a gateway with enough to do says so at once, and that a client which does not read is
not waited for without end.
"""

from collections.abc import Callable
from contextlib import aclosing

import grpc

from gateway.backend import Backend
from gateway.client_writer import ClientWriter
from gateway.generation import generate
from gateway.generation_messages import ask_from, event_message
from outrider.errors import InvalidRequest, Overloaded
from outrider.parameters import MAX_SAMPLES
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server


class GenerationServicer(GenerationServiceServicer):
    """Serves Generate over a backend, at most max_requests samples at a time, to clients that take each message in
    time.
    """

    def __init__(self, backend: Backend, max_requests: int, client_stall_s: float) -> None:
        self._backend = backend
        self._max_requests = max_requests
        self._client_stall_s = client_stall_s
        self._active = 0

    async def Generate(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        """Writes a message for every round and every completion.

        It writes instead of yielding, so that a client that leaves interrupts this very frame, and everything below it
        is closed before the call is over. A generator would be left to the garbage collector.
        """
        ask = ask_from(request)
        num_samples = self._admit(ask.sample_count or 1)
        self._active += num_samples
        try:
            async with (
                aclosing(generate(ask, self._backend, context.time_remaining())) as events,
                ClientWriter(context, self._client_stall_s) as writer,
            ):
                async for event in events:
                    await writer.write(event_message(event))
                await writer.flush()
        finally:
            self._active -= num_samples

    def _admit(self, sample_count: int) -> int:
        """The places that a request takes. Raises Overloaded, and InvalidRequest when it would never get them."""
        # What is out of range is refused later, with the range.
        num_samples = min(max(1, sample_count), MAX_SAMPLES)
        if num_samples > self._max_requests:
            limit = f"at most {self._max_requests}, the requests that this gateway takes at a time"
            raise InvalidRequest("sample_count", sample_count, limit)
        if self._active + num_samples > self._max_requests:
            wanted = f", but this one asks for {num_samples} samples" if num_samples > 1 else ""
            raise Overloaded(
                f"{self._active} requests are running, and this gateway takes {self._max_requests} at a time{wanted}"
            )
        return num_samples


def generation_service(
    backend: Backend, max_requests: int, client_stall_s: float
) -> dict[str, Callable[[grpc.aio.Server], None]]:
    """The service for `outrider.rpc.serve`: its full name, and what adds it to a server."""
    servicer = GenerationServicer(backend, max_requests, client_stall_s)
    name = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
    return {name: lambda server: add_GenerationServiceServicer_to_server(servicer, server)}
