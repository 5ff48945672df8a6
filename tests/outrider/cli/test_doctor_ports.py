"""Who has a port, asked of real listeners, and what doctor makes of it."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from support.markov import MarkovModel
from support.markov_services import DraftServicer, serving

from outrider.cli.doctor import ports
from outrider.cli.doctor.answering import Answerer, is_open, rest_text, who_answers
from outrider.cli.doctor.findings import Status
from outrider.cli.doctor.ports import Port
from outrider.v1 import model_service_pb2 as model_pb

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nobody else gets while it is held, and on which nobody listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


async def test_services_of_ours_are_known_by_their_role() -> None:
    """The draft says that it is one; on its own port that is well, on another's it keeps `up` from starting."""
    async with serving(DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(), (1,))) as address:
        answerer = await who_answers(address)
        number = int(address.rpartition(":")[2])
        right, wrong = await ports.gather({"--draft-port": number, "--port": number})
    assert answerer is not None
    assert answerer.role == "draft"
    [well], [in_the_way] = ports.judge([right]), ports.judge([wrong])
    assert (well.status, in_the_way.status, in_the_way.exit_code) == (Status.OK, Status.FAILED, 69)
    assert "--port 0" in in_the_way.fix


async def test_strangers_are_told_as_such() -> None:
    """A web server that knows nothing of Outrider fails the check, as it would `up`; its answer can be read."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(HELLO)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        number = server.sockets[0].getsockname()[1]
        assert await asyncio.to_thread(rest_text, f"127.0.0.1:{number}", "/") == "hi"
        [port] = await ports.gather({"--port": number})
    assert port.answerer == Answerer("other")
    [finding] = ports.judge([port])
    assert (finding.status, finding.exit_code) == (Status.FAILED, 69)
    assert "--port 0" in finding.fix


async def test_a_free_port(free_port: int) -> None:
    """Nobody answers, it can be bound, and 0 needs no look."""
    assert not await is_open(f"127.0.0.1:{free_port}")
    found = await ports.gather({"--port": free_port, "--target-port": 0})
    assert [(port.number, port.answerer) for port in found] == [(free_port, None)]


def test_ports_that_are_free_share_a_line() -> None:
    """One that cannot be had at all fails, because `up` would."""
    found = ports.judge([Port("--port", 1), Port("--draft-port", 2), Port("--target-port", 3, problem="no permission")])
    assert [each.status for each in found] == [Status.OK, Status.FAILED]
    assert found[0].sentence == "1, 2 are free."
    assert (found[1].exit_code, "no permission" in found[1].sentence) == (69, True)
