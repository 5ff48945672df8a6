"""What the services learn of a client's trace, with every session and every Rollback; nothing has to record it."""

from typing import Any

import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from support.services.markov_services import Mischief, Service, markov_stack, request

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = (("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01"),)


def trace_of(carrier: Any) -> str | None:
    """The trace that headers name."""
    parent = dict(carrier).get("traceparent")
    return parent.split("-")[1] if parent else None


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Trace that each Rollback carried."""
    seen: list[str | None] = []
    rollback = Service.Rollback

    async def noted_rollback(self: Any, rolled: Any, context: Any) -> Any:
        seen.append(trace_of(context.invocation_metadata()))
        return await rollback(self, rolled, context)

    monkeypatch.setattr(Service, "Rollback", noted_rollback)
    return seen


async def test_every_session_carries_the_client_s_trace(tokenizer: str, told: list[str | None]) -> None:
    """Also the Rollback of a draft that was late, whose line in the log names trace, request and session."""
    async with markov_stack(tokenizer) as stack:
        stack.draft.mischief = {9: Mischief.LATE}
        with capture_logs([merge_contextvars]) as lines:
            assert [each async for each in stack.generate(request(), metadata=METADATA)][-1].HasField("completion")
        for service in (stack.draft, stack.target):
            assert [trace_of(each.trace_context) for each in service.opens] == [TRACE_ID]
        assert told == [TRACE_ID]
        [late] = [line for line in lines if line["event"] == "draft late"]
        assert late["trace_id"] == TRACE_ID
        assert len(late["session"]) == 8
        assert late["request_id"]
        await stack.run(request())
        for service in (stack.draft, stack.target):
            assert [trace_of(each.trace_context) for each in service.opens] == [TRACE_ID, None]
