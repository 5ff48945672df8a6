"""A client's deadline is everybody's: its end ends the request, and frees both services at once."""

from typing import Any

import grpc
import pytest
from faults.load import REQUESTS
from support.stack import HaltedTarget, request_of, running_stack

from draft_service.sessions import DraftSessions
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from target_service.sessions import TargetSessions

DEADLINE_S = 2.0
LONG = 900  # tokens, of which a halted target makes a few


def watch_opens(monkeypatch: pytest.MonkeyPatch, sessions: type) -> list[bytes]:
    """The sessions that a service opens, in order."""
    seen: list[bytes] = []
    open_session: Any = sessions.open  # type: ignore[attr-defined]

    def watched(self: object, fence: Any, *rest: object, **named: object) -> None:
        seen.append(fence.session_id)
        open_session(self, fence, *rest, **named)

    monkeypatch.setattr(sessions, "open", watched)
    return seen


@pytest.mark.slow
async def test_a_deadline_ends_the_request_and_frees_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end with DEADLINE_EXCEEDED, and their sessions are closed: no lease has anything to do with it."""
    opened = [watch_opens(monkeypatch, sessions) for sessions in (TargetSessions, DraftSessions)]
    async with running_stack() as stack:
        before = await stack.generate(text="Once upon a time", seed=1, max_tokens=8, draft_count=4)
        for seen in opened:
            assert len(seen) == 1
        assert stack.gateway is not None
        halted = HaltedTarget(stack, 20)
        stub = GenerationServiceStub(stack.channel(stack.gateway.address))
        requests = [request_of(**fields, max_tokens=LONG, ignore_eos=True) for fields in REQUESTS]
        calls = [stub.Generate(request, timeout=DEADLINE_S) for request in requests]
        assert [await call.code() for call in calls] == [grpc.StatusCode.DEADLINE_EXCEEDED] * len(calls)
        halted.let_go()
        await stack.quiet()
        for seen in opened:
            assert len(seen) > 1
        for service in (stack.target, stack.draft):
            info = await stack.info(service)
            assert (info.evicted_session_count, info.expired_lease_count) == (0, 0)
        after = await stack.generate(text="Once upon a time", seed=1, max_tokens=8, draft_count=4)
        assert after.token_ids == before.token_ids
