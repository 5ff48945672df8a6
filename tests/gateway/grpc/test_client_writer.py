"""When the messages of an answer leave, in turns of the loop."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import pytest

from gateway.grpc.servicer import ClientWriter, begun
from outrider.v1 import generation_service_pb2 as pb


class Call:
    """A call whose messages go into a list."""

    def __init__(self, said: list[object]) -> None:
        self._said = said

    async def send_initial_metadata(self, _head: Sequence[tuple[str, str]]) -> None:
        pass

    async def write(self, message: object) -> None:
        self._said.append(message)


async def test_a_message_leaves_in_the_turn_after_the_next_round_waits_and_behind_what_that_says() -> None:
    """So a service hears first, and the client waits no turn longer than it."""
    said: list[object] = []
    asked, answered = asyncio.Event(), asyncio.Event()

    async def service_writer() -> None:
        await asked.wait()
        said.append("to the service")

    async def next_round() -> None:
        asked.set()
        await answered.wait()

    async def answer(writer: ClientWriter) -> None:
        await begun(next_round(), writer.go)

    async with ClientWriter(cast("grpc.aio.ServicerContext[Any, Any]", Call(said)), 1.0) as writer:
        await writer.write(pb.GenerateResponse())
        await writer.flush()
        said.clear()
        writing = asyncio.create_task(service_writer())
        await asyncio.sleep(0)
        token = pb.GenerateResponse()
        await writer.write(token)
        answering = asyncio.create_task(answer(writer))
        await asyncio.sleep(0)
        assert not said
        await asyncio.sleep(0)
        assert said == ["to the service", token]
        answered.set()
        await asyncio.gather(writing, answering)


async def test_what_was_to_follow_a_step_is_called_once_whether_it_waits_returns_or_fails() -> None:
    """And the step's value and error are those of waiting for it."""
    calls: list[str] = []

    async def step(num_waits: int, error: Exception | None = None) -> int:
        for _ in range(num_waits):
            await asyncio.sleep(0)
        if error is not None:
            raise error
        return num_waits

    for num_waits in (0, 1, 3):
        calls.clear()
        assert await begun(step(num_waits), lambda: calls.append("then")) == num_waits
        assert calls == ["then"]
        calls.clear()
        with pytest.raises(StopAsyncIteration):
            await begun(step(num_waits, StopAsyncIteration()), lambda: calls.append("then"))
        assert calls == ["then"]


async def test_a_step_that_waits_hears_of_a_cancellation() -> None:
    """It closes what it holds before the task that waits for it has ended."""
    closed: list[bool] = []

    async def step() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def wait() -> None:
        await begun(step(), lambda: None)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert closed == [True]
