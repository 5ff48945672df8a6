"""Sends spans to a collector, by OTLP over gRPC, as the standard variables OTEL_* say.

Needs the extra `otlp`, so `configure_tracing` imports it by its name. A collector that is away costs spans and no
request: they wait in a bounded queue, from which a thread of its own sends them.
"""

import os
import threading
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

# The exporter's own is ten, which a service that has to stop does not have: see STOP_GRACE_S of process.children.
FINISH_S = 1.0


def start(service_name: str) -> Callable[[], None]:
    """Exports all spans of this process from now on; what is returned sends the rest, in FINISH_S at most."""
    # What the operator has named is not named again.
    own = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: f"outrider-{service_name}"}
    provider, exporter = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False), OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    def finish() -> None:
        giving_up = threading.Timer(FINISH_S, exporter.shutdown)
        giving_up.daemon = True
        giving_up.start()
        provider.shutdown()
        giving_up.cancel()

    return finish
