"""API keys over gRPC: every method of every service asks for one, but those of the health service."""

from collections import defaultdict
from collections.abc import Awaitable, Callable

import grpc

from gateway.keys.door import GRPC, Door, Entrance
from outrider.rpc.guard import OPEN, Accounts, Handler, Metadata
from outrider.rpc.memory import RequestMemory


def entrance_of(door: Door, metadata: Metadata) -> Entrance:
    """Entrance of a call, by the metadata that came beside its message."""
    values: defaultdict[str, list[bytes]] = defaultdict(list)
    for name, value in metadata or ():
        values[name].append(value.encode() if isinstance(value, str) else value)
    return Entrance(door, GRPC, values["authorization"], values["x-api-key"])


def accounts_of(memory: RequestMemory, door: Door | None) -> Accounts:
    """Names callers by their keys, where keys are asked for, and counts what cannot be read for them."""
    if door is None:
        return Accounts(memory)
    return Accounts(
        memory,
        lambda metadata: entrance_of(door, metadata).tenant().name,
        lambda metadata, num_bytes: entrance_of(door, metadata).refused(num_bytes),
    )


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a known key before their first message is read, whether there is such a method or not."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of a method, or one that refuses."""
        if not handler_call_details.method.startswith(OPEN):
            try:
                entrance_of(self._door, handler_call_details.invocation_metadata).tenant()
            except Exception as error:  # noqa: BLE001 - raised again inside the wall, which no interceptor is
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: Exception) -> Handler:
    async def refuse(_messages: object, _context: object) -> None:
        raise error

    # A stream of messages is not waited for, whatever the method takes.
    refusal: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return refusal
