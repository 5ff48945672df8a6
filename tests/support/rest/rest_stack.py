"""A running stack with its REST interface, plain HTTP to it, and clients as processes. Knows nothing of requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.basics import eventually
from support.rest.event_streams import EventStream, read_events
from support.stack import RunningStack, running_stack

from gateway.generation.admission import Admission

PROGRAMS = Path(__file__).resolve().parents[2] / "surface" / "programs"
PATIENCE_S = 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Body = Mapping[str, Any]


@dataclass(frozen=True)
class RestStack:
    """A running stack and a client without any idea of the protocol."""

    stack: RunningStack
    http: httpx.AsyncClient

    @property
    def address(self) -> str:
        """Where the REST interface answers, as HOST:PORT."""
        assert self.stack.gateway is not None
        return str(self.stack.gateway.rest_address)

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's protocol are given."""
        return f"http://{self.address}/v1"

    @property
    def admission(self) -> Admission:
        """Admission of the gateway, with what runs and waits."""
        assert self.stack.gateway is not None
        return self.stack.gateway.frontend.admission

    async def model(self) -> str:
        """The name under which the model is served."""
        listed = (await self.http.get("/v1/models")).raise_for_status().json()
        return str(listed["data"][0]["id"])

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        reply = await self.http.post(path, json={"model": await self.model(), **body})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def ask_bytes(self, path: str, **body: Any) -> bytes:
        """All bytes of a stream that begins well."""
        body = {"model": await self.model(), "stream": True, **body}
        async with self.http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            assert reply.headers["content-type"].startswith("text/event-stream")
            return b"".join([part async for part in reply.aiter_raw()])

    async def stream(self, path: str, **body: Any) -> EventStream:
        """A stream, read strictly."""
        return read_events(await self.ask_bytes(path, **body))

    async def quiet(self) -> None:
        """Waits until no request runs, none waits and no service holds anything."""
        await eventually(lambda: self.admission.running == self.admission.waiting == 0)
        await self.stack.quiet()


@asynccontextmanager
async def rest_stack(*, gateway: Body | None = None, **options: Any) -> AsyncIterator[RestStack]:
    """Starts a stack with REST on a free port; other options are those of `running_stack`.

    At the end of a test that has not failed, the gateway must have come to rest as well.
    """
    async with running_stack(gateway={"rest_listen": "127.0.0.1:0", **(gateway or {})}, **options) as stack:
        assert stack.gateway is not None
        url = f"http://{stack.gateway.rest_address}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            rest = RestStack(stack, http)
            yield rest
        await rest.quiet()


def said(text: str) -> dict[str, Any]:
    """The fields of a conversation of one turn."""
    return {"messages": [{"role": "user", "content": text}]}


async def exchange(address: str, sent: bytes, *, ends: bool = False) -> bytes:
    """Sends bytes as they are and reads one response, or until the server closes.

    `ends` closes our half of the connection after them.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        with suppress(ConnectionError):
            await writer.drain()
        if ends:
            writer.write_eof()
        return await _all_of(reader)
    finally:
        writer.close()


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes or cuts us off; a response that states its length ends with it."""
    received = b""
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            while not is_whole(received) and (part := await reader.read(65_536)):
                received += part
    return received


def is_whole(received: bytes) -> bool:
    """Whether a response with a Content-Length has come to its end."""
    head, found, body = received.partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(found) and bool(lengths) and len(body) >= int(lengths[0])


async def output_of(*command: str | Path, patience_s: float) -> str:
    """What a program prints that ends well, errors and all; it is shown when it does not."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), patience_s)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def run_client(python: Path, script: str, *arguments: str) -> dict[str, Any]:
    """What a script of tests/surface/programs prints last, in JSON; its notes are shown when it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(python, PROGRAMS / script, *arguments, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, notes.decode()
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told
