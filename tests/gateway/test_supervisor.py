"""`python -m gateway --workers N` with real processes: what its clients see, and what is left of it when it ends."""

import asyncio
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from support.basics import eventually
from support.certificates import issue, server_of
from support.keys import bearer, write_keys
from support.observability import findings
from support.processes import children_of
from support.stack import TARGET, RunningStack, request_of, running_stack

from outrider.errors import PeerLost, RateLimited
from outrider.process.children import Launch, ServiceProcess
from outrider.process.metrics import scraped
from outrider.rpc.channels import AddressTaken, hold, open_channel
from outrider.rpc.errors import error_from
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.slow

NUM_WORKERS = 2
ANY = "127.0.0.1:0"
# The chance that so many connections all go to one of two workers is that of a broken kernel.
MAX_CONNECTIONS = 60
START_S = 60.0
RUNNING, SAID = "outrider_num_requests_running", "outrider_generation_tokens_total"
UP, RESTARTS = "outrider_worker_up", "outrider_worker_restarts_total"
REQUEST: dict[str, Any] = {"text": "Once upon a time", "temperature": 0.8, "seed": 11, "ignore_eos": True}
SHORT, LONG = 8, 320


@dataclass
class Stream:
    """A request on a connection of its own, which is what the kernel gives to a worker."""

    channel: grpc.aio.Channel
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    ending: "asyncio.Task[None]" = field(init=False)

    @classmethod
    def begin(cls, address: str, max_tokens: int) -> Self:
        stream = cls(open_channel(address), max_tokens)
        stream.ending = asyncio.create_task(stream._read())
        return stream

    async def said(self) -> list[int]:
        """What it said in the end; raises the OutriderError that ended it."""
        await asyncio.wait_for(asyncio.shield(self.ending), START_S)
        return self.token_ids

    async def _read(self) -> None:
        call = GenerationServiceStub(self.channel).Generate(request_of(max_tokens=self.max_tokens, **REQUEST))
        try:
            async for message in call:
                assert isinstance(message, pb.GenerateResponse)
                self.token_ids += [token.token_id for token in message.round.tokens]
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None


@dataclass
class Gateway:
    """A gateway of workers as a process of its own."""

    process: ServiceProcess
    lines: list[str]
    streams: list[Stream] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.process.address

    @property
    def rest(self) -> str:
        return self.process.launch.further["rest"]

    async def figures(self, name: str) -> dict[int, float]:
        """A figure of each worker, from one scrape."""
        text = (await asyncio.to_thread(scraped, self.process.launch.further["metrics"], [name]))[0].decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {int(sample.labels["worker"]): sample.value for sample in samples}

    def begin(self, max_tokens: int = LONG) -> Stream:
        """A stream, which ends with the test."""
        self.streams.append(Stream.begin(self.address, max_tokens))
        return self.streams[-1]

    async def both_run(self) -> None:
        """Opens streams until each worker has one in the middle of its output."""
        while not (len(running := await self.figures(RUNNING)) == NUM_WORKERS and all(running.values())):
            assert len(self.streams) < MAX_CONNECTIONS
            stream = self.begin()
            await eventually(lambda stream=stream: bool(stream.token_ids) or stream.ending.done())  # type: ignore[misc]

    def workers(self) -> dict[int, int]:
        """Process ids by the numbers of workers."""
        return {
            int(words[words.index("--number") + 1]): pid
            for pid, words in children_of(self.process.pid).items()
            if "--number" in words
        }


def launch(stack: RunningStack, *flags: str, tokenizer: str = TARGET) -> Launch:
    """How the gateway is started in front of a stack's services."""
    services = ("--target", stack.target.address, "--draft", stack.draft.address, "--tokenizer", tokenizer)
    command = (sys.executable, "-P", "-m", "gateway", *services, "--workers", str(NUM_WORKERS), *flags)
    return Launch("gateway", command, ready_timeout_s=START_S, further={"rest": ANY, "metrics": ANY})


@pytest.fixture
async def stack() -> AsyncIterator[RunningStack]:
    """Services, and a gateway of one process in front of them, which says what is right."""
    # What a killed worker leaves is leased.
    options = {"lease_seconds": 0.5}
    async with running_stack(draft_options=options, target_options=options) as running:
        yield running


@pytest.fixture
async def gateway(stack: RunningStack) -> AsyncIterator[Gateway]:
    """Two workers in front of the services."""
    lines: list[str] = []
    started = Gateway(await ServiceProcess.start(launch(stack), lines.append), lines)
    async with AsyncExitStack() as life:
        life.push_async_callback(started.process.wait)
        life.callback(started.process.kill)
        yield started
        for stream in started.streams:
            await stream.channel.close()
            await asyncio.wait({stream.ending})


async def right(stack: RunningStack, max_tokens: int = LONG) -> list[int]:
    """What one plain gateway says without a draft."""
    return list((await stack.generate(max_tokens=max_tokens, draft_count=0, **REQUEST)).token_ids)


@contextmanager
def watched(pids: dict[int, int]) -> Iterator["select.poll"]:
    """Returns which processes have ended, by file descriptors that hold even if no parent waits for them."""
    files = [os.pidfd_open(pid) for pid in pids.values()]
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    yield poll
    for file in files:
        os.close(file)


async def test_every_worker_says_the_same_and_one_scrape_has_all(stack: RunningStack, gateway: Gateway) -> None:
    """As many connections as it takes until both have answered; figures have their worker, and are well formed."""
    expected = await right(stack, SHORT)
    while not all((await gateway.figures(SAID)).values()):
        assert len(gateway.streams) < MAX_CONNECTIONS
        assert await gateway.begin(SHORT).said() == expected
    assert set(await gateway.figures(UP)) == set(range(NUM_WORKERS))
    tokens = await gateway.figures(SAID)
    assert sum(tokens.values()) == len(gateway.streams) * SHORT
    text = (await asyncio.to_thread(scraped, gateway.rest))[0].decode()
    assert findings(text) == []
    assert {RUNNING, SAID, UP, RESTARTS} < {line.partition("{")[0] for line in text.splitlines()}
    memory = [line for line in text.splitlines() if line.startswith("process_resident_memory_bytes{")]
    assert [line.split('"')[1] for line in memory] == [*map(str, range(NUM_WORKERS)), "supervisor"]
    # Whichever worker answers.
    shown = {(await asyncio.to_thread(scraped, gateway.rest, [SAID]))[0].decode() for _ in range(12)}
    assert len(shown) == 1
    assert [line for line in shown.pop().splitlines() if not line.startswith("#")] == [
        f'{SAID}{{worker="{each}"}} {number}' for each, number in tokens.items()
    ]


async def test_a_worker_says_whom_it_refuses(stack: RunningStack, tmp_path: Path) -> None:
    """In gRPC's own words, which are the only ones about a handshake that fails."""
    shown = server_of(issue(tmp_path, "gateway"), "gateway")
    secured = replace(launch(stack, "--tls-cert", shown.cert, "--tls-key", shown.key), defaults={})
    lines: list[str] = []
    process = await ServiceProcess.start(secured, lines.append)
    try:
        async with open_channel(process.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        await eventually(lambda: any("WRONG_VERSION_NUMBER" in line for line in lines))
    finally:
        await process.stop()


async def test_a_killed_worker_takes_only_its_own_streams_along(stack: RunningStack, gateway: Gateway) -> None:
    """The other's say the same as ever, its own break, and soon another one serves in its place."""
    expected = await right(stack)
    await gateway.both_run()
    running = await gateway.figures(RUNNING)
    os.kill(gateway.workers()[0], signal.SIGKILL)

    async def is_counted() -> bool:
        return (await gateway.figures(UP))[0] == 0

    await eventually(is_counted)
    assert set(await gateway.figures(RUNNING)) == {1}
    await asyncio.wait({stream.ending for stream in gateway.streams})
    broken = [stream for stream in gateway.streams if stream.ending.exception() is not None]
    # One or another may have ended between the two figures and the signal.
    assert 0 < len(broken) <= running[0]
    assert all(isinstance(stream.ending.exception(), PeerLost) for stream in broken)
    for stream in gateway.streams:
        assert stream.token_ids == expected[: len(stream.token_ids)]
        assert len(stream.token_ids) == LONG or stream in broken

    async def is_back() -> bool:
        return (await gateway.figures(UP))[0] == 1 == (await gateway.figures(RESTARTS))[0]

    await eventually(is_back)
    assert any("The worker 0 service was ended by signal 9" in line for line in gateway.lines)
    assert any("The worker 0 service is back" in line for line in gateway.lines)
    while not (await gateway.figures(SAID))[0]:
        assert await gateway.begin(SHORT).said() == expected[:SHORT]


async def test_a_limit_of_a_key_is_that_of_all_workers(stack: RunningStack, tmp_path: Path) -> None:
    """Of 200 requests at once, each on a connection of its own, as many come in as one process would let in."""
    per_minute, keys = 50, write_keys(tmp_path / "keys.toml", alice={"requests_per_minute": 50})
    wish = request_of(max_tokens=1, **REQUEST)
    process = await ServiceProcess.start(launch(stack, "--api-keys", keys, "--max-queue", "300"), lambda line: None)
    gateway = Gateway(process, [])
    async with AsyncExitStack() as life:
        life.push_async_callback(process.stop, START_S)
        began_s = time.monotonic()

        async def is_let_in() -> bool:
            async with open_channel(process.address) as channel:
                call = GenerationServiceStub(channel).Generate(wish, metadata=tuple(bearer("alice").items()))
                try:
                    return [message async for message in call] != []
                except grpc.aio.AioRpcError as error:
                    if not isinstance(error_from(error), RateLimited):
                        raise
                    return False

        # A few at a time, so that one worker alone does not take all that are let in.
        let_in = 0
        for _ in range(20):
            let_in += sum(await asyncio.gather(*(is_let_in() for _ in range(10))))
        came_back = int((time.monotonic() - began_s) * per_minute / 60)
        assert per_minute <= let_in <= per_minute + came_back
        said = await gateway.figures(SAID)
        assert sum(said.values()) == let_in
        assert all(said.values())


@pytest.mark.grid
async def test_a_frozen_worker_is_replaced(gateway: Gateway) -> None:
    """It answers nothing although its port seems open: it is killed, and another one serves in its place."""
    frozen = gateway.workers()[0]
    os.kill(frozen, signal.SIGSTOP)
    await eventually(lambda: any("The worker 0 service is back" in line for line in gateway.lines), 2 * START_S)
    assert any("The worker 0 service did not answer 3 times" in line for line in gateway.lines)
    assert gateway.workers()[0] != frozen
    assert set((await gateway.figures(UP)).values()) == {1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_all_workers(
    stack: RunningStack, gateway: Gateway, number: signal.Signals
) -> None:
    """What runs says the same as ever, new clients are refused, then no process listens, and the exit code is 0."""
    expected = await right(stack)
    await gateway.both_run()
    os.kill(gateway.process.pid, number)
    async with httpx.AsyncClient(base_url=f"http://{gateway.rest}", timeout=START_S) as http:
        await eventually(lambda: is_leaving(http))
    assert not all(stream.ending.done() for stream in gateway.streams)
    assert [await stream.said() for stream in gateway.streams] == [expected] * len(gateway.streams)
    assert await asyncio.wait_for(gateway.process.wait(), START_S) == 0
    for address in (gateway.address, gateway.rest):
        host, _, port = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))


async def test_a_second_signal_ends_all_at_once(gateway: Gateway) -> None:
    """Whatever runs: its clients learn that it is lost."""
    await gateway.both_run()
    with watched(gateway.workers()) as poll:
        for _ in range(2):
            os.kill(gateway.process.pid, signal.SIGTERM)
            await eventually(lambda: any("draining" in line for line in gateway.lines))
        assert await asyncio.wait_for(gateway.process.wait(), START_S) == 128 + signal.SIGTERM
        await eventually(lambda: len(poll.poll(0)) == NUM_WORKERS)
    await asyncio.wait({stream.ending for stream in gateway.streams})
    ends = [stream.ending.exception() for stream in gateway.streams]
    assert any(isinstance(end, PeerLost) for end in ends)


async def test_no_worker_outlives_a_killed_parent(stack: RunningStack, gateway: Gateway) -> None:
    """They drain, although their log is not read any more: what runs says the same as ever, and the ports are free."""
    expected = await right(stack)
    await gateway.both_run()
    with watched(gateway.workers()) as poll:
        gateway.process.kill()
        assert [await stream.said() for stream in gateway.streams] == [expected] * len(gateway.streams)
        await eventually(lambda: len(poll.poll(0)) == NUM_WORKERS)
    assert can_be_held(gateway.address)
    assert can_be_held(gateway.rest)


async def is_leaving(http: httpx.AsyncClient) -> bool:
    """Whether a worker says that it stops."""
    return (await http.get("/ready")).status_code == 503


def can_be_held(address: str) -> bool:
    """Whether another gateway could start there."""
    try:
        hold(address)[1].close()
    except AddressTaken:
        return False
    return True


@asynccontextmanager
async def taken(address: str, *, shared: bool) -> AsyncIterator[str]:
    """Somebody who listens on an address."""
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port)), reuse_port=shared) as listener:
        yield f"{host}:{listener.getsockname()[1]}"


async def refusal(stack: RunningStack, *flags: str, tokenizer: str = TARGET) -> tuple[int | None, list[str]]:
    """Exit code and stderr of a gateway that does not start."""
    argv = (*launch(stack, tokenizer=tokenizer).argv, "--log-level", "warning", *flags)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe)
    output, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert output == b""
    return process.returncode, errors.decode().splitlines()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_port_has_one_owner(stack: RunningStack, shared: bool) -> None:
    """Also when that one would share it: the sentence and the code are those of a gateway of one process."""
    async with taken(ANY, shared=shared) as address:
        for flag in ("--listen", "--rest-listen", "--metrics-listen"):
            code, lines = await refusal(stack, flag, address)
            assert (code, lines) == (
                69,
                [f"Cannot listen on {address}: it is taken, or not an address of this machine."],
            )


async def test_a_port_of_workers_is_taken(stack: RunningStack, gateway: Gateway) -> None:
    """For other workers, for a gateway of one process, and for anything else that does not share."""
    for flag, address in (("--listen", gateway.address), ("--rest-listen", gateway.rest)):
        for workers in ("2", "1"):
            code, lines = await refusal(stack, "--workers", workers, flag, address)
            assert (code, f"Cannot listen on {address}: it is taken" in lines[-1]) == (69, True)
        with pytest.raises(OSError, match="in use"):
            async with taken(address, shared=False):
                pass


async def test_what_keeps_workers_from_starting_is_said_once(stack: RunningStack, tokenizer: str) -> None:
    """With sentence and exit code of a gateway of one process: a wrong option, and a target that does not fit."""
    code, lines = await refusal(stack, "--max-requests", "0")
    assert (code, lines) == (64, ["--max-requests is 0, but must be at least 1"])
    code, lines = await refusal(stack, tokenizer=tokenizer)
    assert code == 78
    assert "does not fit the tokenizer of" in lines[-1]
    # The others are of the log.
    assert [line for line in lines if not line.startswith("{")] == lines[-1:]
    alone, own_lines = await refusal(stack, "--workers", "1", tokenizer=tokenizer)
    assert (alone, own_lines[-1]) == (code, lines[-1])


async def test_without_the_figures_of_all_there_are_none() -> None:
    """Rather than those of the worker that was asked."""
    alone = {"figures_of_all": "127.0.0.1:1", "rest_listen": ANY}
    async with running_stack(gateway=alone) as running, httpx.AsyncClient() as client:
        assert running.gateway is not None
        reply = await client.get(f"http://{running.gateway.rest_address}/metrics")
    assert reply.status_code == 503
    assert "figures of all workers" in reply.json()["error"]["message"]
