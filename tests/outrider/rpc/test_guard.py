"""Refusals and questions about health have a pace; whatever else a process is asked is answered at once."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.network import turns_taken

from outrider.errors import InvalidRequest
from outrider.rpc import channels
from outrider.rpc.guard import MAX_PACED_WAIT_S, PACED_BURST, PACED_PER_S, Pace
from outrider.v1 import model_service_pb2 as pb
from outrider.v1.model_service_pb2_grpc import (
    ModelServiceServicer,
    ModelServiceStub,
    add_ModelServiceServicer_to_server,
)

INTERVAL_S = 1 / PACED_PER_S
MAX_WAITING = round(MAX_PACED_WAIT_S * PACED_PER_S)


class TellsAndRefuses(ModelServiceServicer):
    """Answers one method and refuses another."""

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:  # noqa: N802
        """Nothing to tell."""
        return pb.GetModelInfoResponse()

    async def Rollback(self, request: object, context: object) -> pb.RollbackResponse:  # noqa: N802
        """Always fails."""
        raise InvalidRequest("session_id", "", "a session of this service")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    add = {"outrider.v1.ModelService": lambda s: add_ModelServiceServicer_to_server(TellsAndRefuses(), s)}
    running = await channels.serve("127.0.0.1:0", add)
    async with channels.open_channel(running.address) as channel:
        yield channel
    await running.stop(0)


def test_a_burst_does_not_wait_and_what_follows_comes_one_by_one() -> None:
    pace = Pace()
    waits_s = [pace.wait_s(100.0) for _ in range(PACED_BURST + MAX_WAITING)]
    assert waits_s[:PACED_BURST] == [0.0] * PACED_BURST
    assert waits_s[PACED_BURST:] == pytest.approx([INTERVAL_S * (number + 1) for number in range(MAX_WAITING)])


def test_whoever_comes_while_too_many_wait_does_not_and_costs_nobody_a_turn() -> None:
    pace = Pace()
    for _ in range(PACED_BURST + MAX_WAITING):
        pace.wait_s(100.0)
    assert [pace.wait_s(100.0) for _ in range(3)] == [0.0] * 3
    assert pace.wait_s(100.0 + INTERVAL_S) == pytest.approx(MAX_PACED_WAIT_S)


def test_a_process_that_was_left_alone_has_its_burst_again_and_no_more() -> None:
    pace = Pace()
    for _ in range(PACED_BURST + 1):
        pace.wait_s(100.0)
    waits_s = [pace.wait_s(1000.0) for _ in range(PACED_BURST + 1)]
    assert waits_s == [0.0] * PACED_BURST + [pytest.approx(INTERVAL_S)]


async def test_refusals_and_health_take_turns_and_answers_do_not(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a refusal says does not change."""
    turns = turns_taken(monkeypatch)
    models = ModelServiceStub(channel)
    await models.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert turns == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await models.Rollback(pb.RollbackRequest(), timeout=10)
    assert (caught.value.code(), len(turns)) == (grpc.StatusCode.INVALID_ARGUMENT, 1)
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert len(turns) == 2
