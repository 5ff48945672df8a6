"""Streams that do no harm: what they should say, whether they say it, and how long they wait for each piece of it."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx
from support.basics import eventually

from outrider.cli.bench.common import OPENINGS
from outrider.cli.local_stack import Addresses
from outrider.client import AsyncClient, Round, Speculation

NUM_MESSAGES = int(os.environ.get("OUTRIDER_FUZZ_MESSAGES", "150"))
# Whether waits are compared: shorter runs have too few gaps for it, and fewer streams.
IS_LONG = NUM_MESSAGES >= 10_000
NUM_STREAMS = 16 if IS_LONG else 4
ASKED: dict[str, Any] = {"max_tokens": 64, "temperature": 0.8, "ignore_eos": True}
# Fixed where waits are compared: a policy that thinks better of it changes them by half, and no attack has.
FIXED: dict[str, Any] = {"draft_count": 2, "drafter": "model"} if IS_LONG else {}
PATIENCE_S = 600.0


class Streams:
    """One half of them over gRPC, the other one over REST; each asks the same again and again while it is `running`."""

    def __init__(self, addresses: Addresses) -> None:
        self.num_answers = 0
        self._gaps_s: list[float] = []
        self._said: dict[int, str] = {}
        self._client = AsyncClient(addresses.gateway)
        self._http = httpx.AsyncClient(base_url=f"http://{addresses.rest}", timeout=PATIENCE_S, trust_env=False)
        self._is_over = False

    async def __aenter__(self) -> Self:
        """Learns what each says while no other stream is there."""
        for number in range(NUM_STREAMS):
            self._said[number] = await self._answer(number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
        await self._client.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Lets all of them run, and waits for the ends of their last answers."""
        self._is_over = False
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(self._run(number))
            await self.listened(1)
            yield
            self._is_over = True

    async def listened(self, num_answers: int) -> None:
        """Waits until they have had so many more answers, counted for each."""
        wanted = self.num_answers + num_answers * NUM_STREAMS
        await eventually(lambda: self.num_answers >= wanted, PATIENCE_S)

    def take_gaps(self) -> list[float]:
        """Seconds between two pieces of an answer, since they were last taken."""
        gaps, self._gaps_s = self._gaps_s, []
        return gaps

    async def _run(self, number: int) -> None:
        while not self._is_over:
            said = await self._answer(number)
            assert said == self._said[number], f"stream {number} says {said!r} beside others"
            self.num_answers += 1

    async def _answer(self, number: int) -> str:
        said, last_s = "", None
        async for piece in (self._by_grpc if number % 2 else self._by_rest)(number):
            now_s = time.perf_counter()
            if last_s is not None:
                self._gaps_s.append(now_s - last_s)
            said, last_s = said + piece, now_s
        return said

    async def _by_grpc(self, number: int) -> AsyncIterator[str]:
        speculation = Speculation(**FIXED)
        async with self._client.generate(OPENINGS[number], seed=number, speculation=speculation, **ASKED) as stream:
            async for event in stream:
                if isinstance(event, Round):
                    yield ",".join(str(token.token_id) for token in event.tokens) + ","

    async def _by_rest(self, number: int) -> AsyncIterator[str]:
        body = {"prompt": OPENINGS[number], "seed": number, "stream": True, "speculation": FIXED, **ASKED}
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]
