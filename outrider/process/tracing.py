"""Traces as W3C has them: the spans of a process, and what travels to the next one.

Without a collector nothing is recorded, and yet a client's trace goes through: what it sent is what the services get,
and its trace_id is on the lines of the log. No span has text or token ids: of an error only its reason is told, because
its sentence may repeat what the client wrote.
"""

import asyncio
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from outrider.errors import OutriderError
from outrider.process.logs import bound

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTER = "outrider.process.trace_export"
# Of 8 KiB that gRPC takes beside a message; calls with more fail at random. W3C asks for 512 to be passed on.
MAX_STATE_LEN = 4096

PROPAGATOR = TraceContextTextMapPropagator()
TRACER = trace.get_tracer("outrider")


class ExporterMissing(OutriderError):
    """The operator must install the extra, or take the endpoint out of the environment."""

    status = "FAILED_PRECONDITION"
    reason = "EXPORTER_MISSING"
    exit_code = 78


def configure(service_name: str, environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Exports this process's spans if the standard variables OTEL_* name a collector; raises ExporterMissing.

    What is returned is to be called once, at the end of the process.
    """
    endpoint = next(filter(None, map(environment.get, ENDPOINTS)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None or is_off or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return _nothing_left
    try:
        exporter = importlib.import_module(EXPORTER)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        message = f"Traces are to go to {endpoint}, but nothing can send them: pip install 'outrider[otlp]'."
        raise ExporterMissing(message, endpoint=endpoint) from None
    finish: Callable[[], None] = exporter.start(service_name)
    return finish


@contextmanager
def span(name: str, parent: Mapping[str, str] | None = None, **attributes: AttributeValue) -> Iterator[None]:
    """A span around what is inside; `parent` is what a caller sent, None for the span that is open here.

    Enter and leave it in the same task. Its trace_id is on every line of the log in between.
    """
    kind = SpanKind.INTERNAL if parent is None else SpanKind.SERVER
    context = PROPAGATOR.extract(parent or {}, contexts.get_current())
    opened = TRACER.start_span(name, context, kind, attributes)
    token = contexts.attach(trace.set_span_in_context(opened, context))
    try:
        with _trace_id_bound(opened):
            yield
    except asyncio.CancelledError:
        opened.set_attribute("cancelled", True)
        raise
    except Exception as error:
        opened.set_status(StatusCode.ERROR, error.reason if isinstance(error, OutriderError) else type(error).__name__)
        raise
    finally:
        opened.end()
        # A task that closes what another one has opened has another context, and nothing to take back.
        if trace.get_current_span() is opened:
            contexts.detach(token)


def carrier() -> tuple[tuple[str, str], ...]:
    """What tells the next process of the span that is open here, as metadata of a call; empty without one.

    A client's own `tracestate` of more than MAX_STATE_LEN characters stays behind.
    """
    told: dict[str, str] = {}
    PROPAGATOR.inject(told)
    return tuple((name, value) for name, value in told.items() if len(value) <= MAX_STATE_LEN)


def parent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """What a caller sent beside its message, as far as it is text; for `span`."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def event(name: str, **attributes: AttributeValue) -> None:
    """Notes on the open span that something happened now, which is worth it only for what is rare or slow."""
    trace.get_current_span().add_event(name, attributes)


def note(**attributes: AttributeValue) -> None:
    """Sets attributes of the open span."""
    trace.get_current_span().set_attributes(attributes)


@contextmanager
def _trace_id_bound(opened: trace.Span) -> Iterator[None]:
    context = opened.get_span_context()
    if not context.is_valid:
        yield
        return
    with bound(trace_id=trace.format_trace_id(context.trace_id)):
        yield


def _nothing_left() -> None:
    """Nothing was recorded."""
