"""A client's deadline is everybody's: what is left of it travels to both services, and its end frees everything."""

from typing import Any

import grpc
import pytest
from faults.load import REQUESTS
from support.stack import request_of, running_stack

from draft_service.servicer import DraftServicer
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from target_service.servicer import TargetServicer

DEADLINE_S = 0.3
ROUNDING_S = 0.01  # gRPC sends a timeout in whole units, rounded up
LONG = 900  # tokens, which take several times as long


def watch_streams(monkeypatch: pytest.MonkeyPatch, servicer: type, method: str) -> list[float | None]:
    """What clients leave the streams of a service, in seconds, in the order in which they begin."""
    seen: list[float | None] = []
    carry = getattr(servicer, method)

    async def watched(self: object, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        seen.append(context.time_remaining())
        await carry(self, requests, context)

    monkeypatch.setattr(servicer, method, watched)
    return seen


async def test_a_deadline_reaches_the_services_and_frees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end with DEADLINE_EXCEEDED, and both services are free long before a lease would end."""
    seen = {
        "target": watch_streams(monkeypatch, TargetServicer, "Verify"),
        "draft": watch_streams(monkeypatch, DraftServicer, "Propose"),
    }
    async with running_stack() as stack:
        await stack.generate(text="Once upon a time", max_tokens=8, draft_count=4)
        for left in seen.values():
            assert left == [None]
            left.clear()
        assert stack.gateway is not None
        stub = GenerationServiceStub(stack.channel(stack.gateway.address))
        requests = [request_of(**fields, max_tokens=LONG, ignore_eos=True) for fields in REQUESTS]
        calls = [stub.Generate(request, timeout=DEADLINE_S) for request in requests]
        assert [await call.code() for call in calls] == [grpc.StatusCode.DEADLINE_EXCEEDED] * len(calls)
        await stack.quiet()
        for left in seen.values():
            assert left
            assert [left_s for left_s in left if left_s is None or left_s > DEADLINE_S + ROUNDING_S] == []
