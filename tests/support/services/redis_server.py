"""A Redis server of a test's own, where one is installed: on a free port, with nothing on disk."""

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.basics import eventually, freeze

from outrider.process.children import HOST, free_port


@dataclass
class RedisServer:
    """A server that can be killed, started again with nothing in it, and frozen."""

    words: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_port(HOST))
    process: asyncio.subprocess.Process = field(init=False)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    async def start(self) -> None:
        """Returns when it answers."""
        command = ("redis-server", "--bind", HOST, "--port", str(self.port), "--save", "", *self.words)
        self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)

        def answers() -> bool:
            with socket.socket() as client:
                return client.connect_ex((HOST, self.port)) == 0

        await eventually(answers)

    def freeze(self) -> None:
        """It answers nothing from here on, and keeps its connections."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """It is gone with all that it had."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def redis_server(*words: str) -> AsyncIterator[RedisServer]:
    """A running server with these further options; skips the test where none is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("There is no redis-server here: apt-get install redis-server.")
    server = RedisServer(words)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
