"""What the services are told of a client's trace, with every stream and every Rollback; nothing has to record it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from support.markov_services import DraftServicer, Mischief, Service, TargetServicer, markov_stack, request

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = (("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01"),)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The trace that each method was told of last."""
    seen: dict[str, str | None] = {}

    def note(method: str, context: Any) -> None:
        parent = dict(context.invocation_metadata()).get("traceparent")
        seen[method] = parent.split("-")[1] if parent else None

    def streaming(method: str, original: Any) -> Any:
        async def noted(self: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
            note(method, context)
            async for response in original(self, requests, context):
                yield response

        return noted

    rollback = Service.Rollback

    async def noted_rollback(self: Any, rolled: Any, context: Any) -> Any:
        note("Rollback", context)
        return await rollback(self, rolled, context)

    monkeypatch.setattr(DraftServicer, "Propose", streaming("Propose", DraftServicer.Propose))
    monkeypatch.setattr(TargetServicer, "Verify", streaming("Verify", TargetServicer.Verify))
    monkeypatch.setattr(Service, "Rollback", noted_rollback)
    return seen


async def test_every_call_carries_the_client_s_trace(tokenizer: str, told: dict[str, str | None]) -> None:
    """Also the Rollback of a draft that was late, whose line in the log names trace, request and session."""
    async with markov_stack(tokenizer) as stack:
        stack.draft.mischief = {9: Mischief.LATE}
        with capture_logs([merge_contextvars]) as lines:
            assert [each async for each in stack.generate(request(), metadata=METADATA)][-1].HasField("completion")
        assert told == dict.fromkeys(("Propose", "Verify", "Rollback"), TRACE_ID)
        [late] = [line for line in lines if line["event"] == "draft late"]
        assert late["trace_id"] == TRACE_ID
        assert len(late["session"]) == 8
        assert late["request_id"]
        await stack.run(request())
        assert (told["Propose"], told["Verify"]) == (None, None)
