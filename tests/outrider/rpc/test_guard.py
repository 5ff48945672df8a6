"""Refusals and questions about the process itself have a pace; whatever else it is asked is answered at once."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.network import turns_taken

from outrider.errors import InvalidRequest
from outrider.rpc import channels
from outrider.rpc.guard import MAX_THROTTLED_WAIT_S, THROTTLED_BURST, THROTTLED_PER_S, Throttle
from outrider.v1 import model_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.model_service_pb2_grpc import (
    ModelServiceServicer,
    ModelServiceStub,
    add_ModelServiceServicer_to_server,
)

INTERVAL_S = 1 / THROTTLED_PER_S
MAX_WAITING = round(MAX_THROTTLED_WAIT_S * THROTTLED_PER_S)


class RefusesTheUnknown(ModelServiceServicer):
    """Knows sessions of a name, and nothing of a model."""

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:  # noqa: N802
        """A handler without an answer."""
        return pb.GetModelInfoResponse()

    async def Rollback(self, request: pb.RollbackRequest, context: object) -> pb.RollbackResponse:  # noqa: N802
        """Raises InvalidRequest."""
        if not request.fence.session_id:
            raise InvalidRequest("session_id", "", "a session of this service")
        return pb.RollbackResponse()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    add = {"outrider.v1.ModelService": lambda s: add_ModelServiceServicer_to_server(RefusesTheUnknown(), s)}
    running = await channels.serve("127.0.0.1:0", add)
    async with channels.open_channel(running.address) as channel:
        yield channel
    await running.stop(0)


def test_a_burst_does_not_wait_and_what_follows_comes_one_by_one() -> None:
    throttle = Throttle()
    waits_s = [throttle.wait_s(100.0) for _ in range(THROTTLED_BURST + MAX_WAITING - 1)]
    expected_s = [max(0, number - THROTTLED_BURST + 1) * INTERVAL_S for number in range(len(waits_s))]
    assert waits_s == pytest.approx(expected_s, abs=1e-9)


def test_whoever_comes_while_too_many_wait_does_not_and_costs_nobody_a_turn() -> None:
    throttle = Throttle()
    waits_s = [throttle.wait_s(100.0) for _ in range(THROTTLED_BURST + 10 * MAX_WAITING)]
    assert max(waits_s) == pytest.approx(MAX_THROTTLED_WAIT_S, abs=INTERVAL_S)
    assert waits_s[THROTTLED_BURST + MAX_WAITING + 1 :] == [0.0] * (9 * MAX_WAITING - 1)
    assert throttle.wait_s(100.0 + 2 * INTERVAL_S) == pytest.approx(MAX_THROTTLED_WAIT_S, abs=3 * INTERVAL_S)


def test_a_process_that_was_left_alone_has_its_burst_again_and_no_more() -> None:
    throttle = Throttle()
    for _ in range(THROTTLED_BURST + 1):
        throttle.wait_s(100.0)
    waits_s = [throttle.wait_s(1000.0) for _ in range(THROTTLED_BURST + 1)]
    assert waits_s == pytest.approx([0.0] * THROTTLED_BURST + [INTERVAL_S], abs=1e-9)


async def test_refusals_and_facts_take_turns_and_answers_do_not(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a refusal says does not change."""
    turns = turns_taken(monkeypatch)
    models = ModelServiceStub(channel)
    await models.Rollback(pb.RollbackRequest(fence=types_pb2.Fence(session_id=b"a")), timeout=10)
    assert turns == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await models.Rollback(pb.RollbackRequest(), timeout=10)
    assert (caught.value.code(), len(turns)) == (grpc.StatusCode.INVALID_ARGUMENT, 1)
    await models.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert len(turns) == 3
    # A question that is refused takes one turn, as any other.
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary("/outrider.v1.ModelService/GetModelInfo")(b"\xff", timeout=10)
    assert len(turns) == 4
