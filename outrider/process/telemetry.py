"""Logs and traces of a process: what it says to operators, and what travels to the next process.

Logs are structured and go to stderr, so that stdout belongs to the program: text in a terminal, anywhere else one JSON
object a line. A line never has the text of a prompt or an answer, nor token ids; it has names to find its request by:
request_id, session and trace_id. A traceback never shows the values of local variables.

Traces are those of W3C. Without a collector nothing is recorded, and yet a client's trace goes through: what it sent is
what the services get, and its trace_id is on the lines of the log. Of an error a span has only the reason, because the
sentence may repeat what the client wrote.
"""

import asyncio
import importlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import structlog
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from structlog.contextvars import bind_contextvars, get_contextvars, unbind_contextvars
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor

from outrider.errors import OutriderError

log = structlog.get_logger()

SHOWN_ID_LEN = 4
FIRST = ("timestamp", "level", "event")


def configure_logs(level: str, worker: int | None = None) -> None:
    """Sets up structlog and the standard library's logging, which grpc uses; `level` as in LogLevel.

    The number of a worker is on every line. No line raises, whatever is in it, where sys.stderr is of
    `outrider.process.streams`.
    """
    number = getattr(logging, level.upper())
    gathering: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _logger, _method, line: line if worker is None else {**line, "worker": worker},
        in_order,
    ]
    rendering: list[Processor] = [
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(),
    ]
    if sys.stderr.isatty():
        # The default formatter is rich's, which prints local variables.
        rendering = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    foreign = LibraryLines(sys.stderr)
    # Lines of libraries look like ours, and their tracebacks have no more in them.
    foreign.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *gathering],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, shown(rendering)],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[foreign])
    # grpc.aio gives None in the place of a message that is none. Who reads it says whose fault it is, in a sentence.
    logging.getLogger("grpc._common").addFilter(lambda record: "deserializing" not in record.getMessage())
    structlog.configure(
        processors=[*gathering, shown(rendering)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def in_order(_logger: object, _method: str, line: EventDict) -> EventDict:
    """Puts what every line has first: timestamp, level, event."""
    return {name: line[name] for name in FIRST if name in line} | dict(line)


class LibraryLines(logging.StreamHandler[TextIO]):
    """Lines of the standard library's loggers; of one that cannot be made only this is said, and not what is in it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is the library's
        """Logs that a line could not be made, in its place."""
        log.warning("a line of a library cannot be shown", logger=record.name, reason=type(sys.exception()).__name__)


def shown(rendering: Sequence[Processor]) -> Processor:
    """Makes a line of values, whatever they are: where one cannot be shown, that is said in its place."""

    def rendered(values: EventDict) -> str:
        line: Any = values
        for each in rendering:
            line = each(None, "", line)
        return str(line)

    def show(_logger: object, _method: str, values: EventDict) -> str:
        try:
            # A copy, because it is the first that takes an exception out.
            return rendered(dict(values))
        except Exception:  # noqa: BLE001 - raised by what is logged, which may be anything
            return rendered({str(name): _plain(value) for name, value in values.items() if name != "exc_info"})

    return show


def _plain(value: object) -> object:
    """Value that a line can have, whatever its repr does."""
    if value is None or isinstance(value, str | int | float):
        return value
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - as above
        return f"a {type(value).__name__} that cannot be shown: {type(error).__name__}"


def loss_line(lost: int, reason: str) -> str:
    """The line of the log about lines that were lost, once logs are configured; for `streams.unfailing`."""
    line: Any = {"event": "log lines lost", "lines": lost, "reason": reason}
    for each in structlog.get_config()["processors"]:
        line = each(None, "warning", line)
    return str(line)


@contextmanager
def bound(**values: object) -> Iterator[None]:
    """Puts values on every line of this task, and of the tasks that it starts, until the context is left."""
    before = {name: value for name, value in get_contextvars().items() if name in values}
    bind_contextvars(**values)
    try:
        yield
    finally:
        # Not structlog's own way: its tokens refuse to be given back by another task, which closes a stream at times.
        unbind_contextvars(*values)
        bind_contextvars(**before)


@contextmanager
def request_scope() -> Iterator[str]:
    """Puts a request_id on every line, a new one unless a surface has bound its own; gives the id."""
    request_id = str(get_contextvars().get("request_id") or secrets.token_hex(8))
    with bound(request_id=request_id):
        yield request_id


def session_prefix(session_id: bytes) -> str:
    """Enough of a session's id to find it again in the logs of the other processes."""
    return session_id[:SHOWN_ID_LEN].hex()


ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTER = "outrider.process.trace_export"
# Of 8 KiB that gRPC takes beside a message; calls with more fail at random. By W3C 512 should be passed on.
MAX_STATE_LEN = 4096

PROPAGATOR = TraceContextTextMapPropagator()
TRACER = trace.get_tracer("outrider")


class ExporterMissing(OutriderError):
    """The operator must install the extra, or take the endpoint out of the environment."""

    status = "FAILED_PRECONDITION"
    reason = "EXPORTER_MISSING"
    exit_code = 78


def configure_tracing(service_name: str, environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Exports this process's spans if the standard variables OTEL_* name a collector; raises ExporterMissing.

    What is returned is to be called once, at the end of the process.
    """
    endpoint = next(filter(None, map(environment.get, ENDPOINTS)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None or is_off or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return lambda: None
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
    found = opened.get_span_context()
    try:
        with bound(**({"trace_id": trace.format_trace_id(found.trace_id)} if found.is_valid else {})):
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


def begin_span(name: str, parent: Mapping[str, str], **attributes: AttributeValue) -> Span:
    """A span for what no single task does, below what a caller sent; the code that begins it ends it."""
    return TRACER.start_span(name, PROPAGATOR.extract(parent, contexts.Context()), SpanKind.SERVER, attributes)


def carrier() -> tuple[tuple[str, str], ...]:
    """The span that is open here, as it travels to the next process; empty without one.

    A client's own `tracestate` of more than MAX_STATE_LEN characters is left out.
    """
    injected: dict[str, str] = {}
    PROPAGATOR.inject(injected)
    return tuple((name, value) for name, value in injected.items() if len(value) <= MAX_STATE_LEN)


def parent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Trace that a caller sent beside its message, as far as it is text; for `span`."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def event(name: str, **attributes: AttributeValue) -> None:
    """Notes on the open span that something happened now, which is worth it only for what is rare or slow."""
    trace.get_current_span().add_event(name, attributes)
