"""A collector of traces: takes spans by OTLP over gRPC, as any process sends them, and keeps them for a look."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans by the service that sent them, in the order in which they came."""

    address: str = ""
    spans: list[tuple[str, Span]] = field(default_factory=list)
    received: bytes = b""
    """Everything that was sent, for a look for what must not be in it."""

    async def Export(  # noqa: N802, the protocol's name
        self, request: pb.ExportTraceServiceRequest, context: object
    ) -> pb.ExportTraceServiceResponse:
        """Takes spans."""
        self.received += request.SerializeToString()
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, service: str, name: str) -> list[Span]:
        """A service's spans of a name."""
        return [span for sender, span in self.spans if (sender, span.name) == (service, name)]


@asynccontextmanager
async def collecting() -> AsyncIterator[TraceCollector]:
    """A collector on a free port."""
    server, collector = grpc.aio.server(), TraceCollector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
