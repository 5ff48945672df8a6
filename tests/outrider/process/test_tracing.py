"""Traces without a collector: what a client sent goes through, and nothing else happens."""

import asyncio
import importlib
import sys

import pytest
from structlog.contextvars import get_contextvars

from outrider.errors import InvalidRequest
from outrider.process import telemetry

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}


def test_a_client_s_trace_goes_through() -> None:
    """Its trace_id is on the log's lines and in what the services are sent, and afterwards on none."""
    with telemetry.span("one", PARENT):
        assert get_contextvars()["trace_id"] == TRACE_ID
        assert dict(telemetry.carrier())["traceparent"].split("-")[1] == TRACE_ID
        with telemetry.span("two", session="ab"):
            telemetry.event("slow", compute_us=7)
            assert dict(telemetry.carrier())["traceparent"].split("-")[1] == TRACE_ID
    assert "trace_id" not in get_contextvars()
    assert telemetry.carrier() == ()


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "ff-" + TRACE_ID])
def test_a_malformed_parent_is_none(traceparent: str) -> None:
    """It costs its sender the trace and no one the request."""
    with telemetry.span("one", {"traceparent": traceparent}):
        assert telemetry.carrier() == ()
        assert "trace_id" not in get_contextvars()


def test_a_long_state_of_a_trace_stays_behind() -> None:
    """With it the metadata of a call would be more than gRPC takes, and the client's request would fail for it."""
    for count, goes_on in ((3, True), (20, False)):
        state = ",".join(f"k{number:02}={'v' * 250}" for number in range(count))
        with telemetry.span("one", {**PARENT, "tracestate": state}):
            told = dict(telemetry.carrier())
        assert told["traceparent"].split("-")[1] == TRACE_ID
        assert told.get("tracestate") == (state if goes_on else None)


async def test_errors_and_cancellations_pass() -> None:
    """A span changes nothing about what is raised inside."""
    for error in (InvalidRequest("a", 1, "2"), RuntimeError("b"), asyncio.CancelledError()):
        with pytest.raises(type(error)), telemetry.span("one", PARENT):
            raise error
    assert "trace_id" not in get_contextvars()


async def test_a_span_may_be_left_by_another_task() -> None:
    """Then its own task keeps the context, and neither of them hears of it."""
    opened = telemetry.span("one", PARENT)
    opened.__enter__()

    async def leave() -> None:
        opened.__exit__(None, None, None)

    await asyncio.create_task(leave())


def test_only_text_of_metadata_is_a_parent() -> None:
    """Values of binary headers are bytes."""
    assert telemetry.parent_of((("traceparent", "a"), ("x-bin", b"b"))) == {"traceparent": "a"}
    assert telemetry.parent_of(None) == {}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4317", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_exported_unasked(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an endpoint, or switched off, the exporter is not even imported."""
    monkeypatch.delitem(sys.modules, telemetry.EXPORTER, raising=False)
    telemetry.configure_tracing("test", environment)()
    assert telemetry.EXPORTER not in sys.modules


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the endpoint and what to install; a fault of our own module is not taken for it."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", lambda _: missing("opentelemetry.sdk"))
    with pytest.raises(telemetry.ExporterMissing, match=r"localhost:4317.*pip install 'outrider\[otlp\]'\.") as raised:
        telemetry.configure_tracing("test", environment)
    assert raised.value.exit_code == 78
    monkeypatch.setattr(importlib, "import_module", lambda _: missing("nothing_of_theirs"))
    with pytest.raises(ModuleNotFoundError):
        telemetry.configure_tracing("test", environment)
