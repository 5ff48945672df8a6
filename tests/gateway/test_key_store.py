"""Three gateway processes with one Redis server: what a key may use is what its limits say, whatever happens to any."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from support.basics import eventually
from support.keys import bearer, write_keys
from support.processes import children_of
from support.services.gateway_process import GatewayProcess, gateway_before
from support.services.markov import MarkovModel
from support.services.markov_services import TargetServicer, serving
from support.services.redis_server import redis_server

from gateway.keys.account import AccountRecord
from gateway.keys.store import GATEWAYS, PREFIX
from outrider.model_files.vocabulary import Vocabulary
from outrider.v1 import model_service_pb2 as model_pb

pytestmark = pytest.mark.slow

NUM_GATEWAYS, NUM_CALLS = 3, 200
# A connection for each call: one that has been idle may end just as the next call begins.
EACH_ITS_OWN = httpx.Limits(max_connections=NUM_CALLS, max_keepalive_connections=0)
LIMITS = {
    "few": {"requests_per_minute": 20},
    "frugal": {"tokens_per_minute": 60},
    "narrow": {"concurrent_samples": 7},
    "halved": {"requests_per_minute": 10},
    "scraper": {"metrics": True},
}
# Longer than what a killed gateway held counts for.
HOLD_S = 40.0
NUM_TOKENS = 6


class Gateways:
    """Gateways and a client that asks them by turns."""

    def __init__(self, running: Sequence[GatewayProcess], http: httpx.AsyncClient) -> None:
        self.running, self.http = list(running), http

    async def status(self, name: str, gateway: GatewayProcess) -> int:
        """Status of a completion of six tokens, prompt included."""
        asked = {"prompt": "fox sea", "max_tokens": NUM_TOKENS - 2, "seed": 1, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post(f"http://{gateway.rest}/v1/completions", json=asked, headers=bearer(name))
        return answer.status_code

    def begin(self, name: str, times: int) -> "list[asyncio.Task[int]]":
        """So many calls at once, at all gateways by turns."""
        return [
            asyncio.create_task(self.status(name, self.running[number % len(self.running)])) for number in range(times)
        ]

    async def check_at_once(self, name: str, times: int, per_minute: float, limit: int) -> None:
        """Fails unless as many of so many are served as there are, and what came back meanwhile; and no other
        status is there but that of limits.
        """
        begun_s = time.monotonic()
        found = await asyncio.gather(*self.begin(name, times))
        came_back = (time.monotonic() - begun_s) * per_minute / 60
        assert set(found) <= {200, 429}
        assert limit <= found.count(200) <= limit + came_back

    async def hold(self, target: TargetServicer) -> "list[asyncio.Task[int]]":
        """Lets the target answer nothing that comes; of each gateway it still reads one message, so each sends one
        more call, which is returned.
        """
        target.reading.clear()
        before = len(target.frames) + target.greetings
        calls = self.begin("scraper", len(self.running))
        await eventually(lambda: len(target.frames) + target.greetings == before + len(calls), 60)
        return calls

    async def store_up(self) -> list[float]:
        """What each gateway says of the store."""
        found = []
        for gateway in self.running:
            answer = await self.http.get(f"http://{gateway.rest}/metrics", headers=bearer("scraper"))
            lines = answer.text.splitlines()
            found += [float(line.split()[1]) for line in lines if line.startswith("outrider_key_store_up")]
        return found

    async def become(self, up: float) -> None:
        """Returns when all say so."""

        async def do_all() -> bool:
            return await self.store_up() == [up] * len(self.running)

        await eventually(do_all, HOLD_S)

    async def know_each_other(self, store: Redis) -> None:
        """Returns when each has heard how many there are since those that are dead were forgotten."""
        forgotten: dict[bytes, float] = {}

        async def have_heard() -> bool:
            beats = dict(await store.zrange(GATEWAYS, 0, -1, withscores=True))
            if len(beats) == len(self.running) and not forgotten:
                forgotten.update(beats)
            return bool(forgotten) and all(beat > forgotten[name] for name, beat in beats.items())

        await eventually(have_heard, HOLD_S)


async def test_three_gateways_count_together(tokenizer: str, tmp_path: Path) -> None:
    """To the last request, token and sample under 200 calls at once; after the death of one, a freeze of the store and
    the loss of all that it had.
    """
    keys = write_keys(tmp_path / "keys.toml", **LIMITS)
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), Vocabulary.read(tokenizer).digests)
    async with AsyncExitStack() as life:
        server = await life.enter_async_context(redis_server("--requirepass", "right"))
        address = await life.enter_async_context(serving(target))
        url = server.url.replace("//", "//:right@")
        words, environment = ("--api-keys", keys), {"OUTRIDER_KEY_STORE": url}
        started = [gateway_before(address, tokenizer, *words, environment=environment) for _ in range(NUM_GATEWAYS)]
        running = await asyncio.gather(*(life.enter_async_context(each) for each in started))
        http = await life.enter_async_context(httpx.AsyncClient(timeout=120, limits=EACH_ITS_OWN))
        all_gateways = Gateways(running, http)
        await all_gateways.check_at_once("few", NUM_CALLS, 20, 20)
        await all_gateways.check_at_once("frugal", NUM_CALLS, 60 / NUM_TOKENS, 60 // NUM_TOKENS)

        extra = await all_gateways.hold(target)
        calls = all_gateways.begin("narrow", NUM_CALLS)
        await eventually(lambda: sum(call.done() for call in calls) == NUM_CALLS - 7, 60)
        target.reading.set()
        assert Counter(await asyncio.gather(*calls)) == {200: 7, 429: NUM_CALLS - 7}
        assert await asyncio.gather(*extra) == [200] * NUM_GATEWAYS

        extra = await all_gateways.hold(target)
        dead = running[0]
        held = Gateways([dead], http).begin("narrow", 7)
        store = await life.enter_async_context(Redis.from_url(url))

        async def is_full() -> bool:
            record = AccountRecord.parse(await store.get(f"{PREFIX}narrow") or b"")
            return record.others("") == (7, 0)

        await eventually(is_full, 60)
        assert await all_gateways.status("narrow", running[1]) == 429
        os.kill(dead.process.pid, signal.SIGKILL)
        target.reading.set()
        await asyncio.gather(*held, *extra, return_exceptions=True)
        alive = Gateways(running[1:], http)
        assert await alive.status("narrow", running[1]) == 429

        async def is_back() -> bool:
            return await asyncio.gather(*alive.begin("narrow", 7)) == [200] * 7

        await eventually(is_back, HOLD_S)

        await alive.know_each_other(store)
        # Two are left, and each has half of what there is.
        server.freeze()
        await alive.become(0.0)
        for gateway in alive.running:
            await Gateways([gateway], http).check_at_once("halved", 30, 5, 5)
        server.thaw()
        await alive.become(1.0)
        await alive.check_at_once("halved", 30, 10, 0)

        await server.kill()
        await server.start()
        await alive.become(1.0)
        await alive.check_at_once("halved", 30, 10, 0)
        lines = [json.loads(line) for gateway in alive.running for line in gateway.lines if line.startswith("{")]
        away = [line for line in lines if line["event"].startswith("limits of keys are counted by each gateway alone")]
        assert {(line["gateways"], line["store"]) for line in away} == {(2, server.url.replace("//", "//***@"))}
        assert "right" not in "".join(line for gateway in running for line in gateway.lines)


async def test_workers_use_the_store_and_a_wrong_password_is_a_sentence(tokenizer: str, tmp_path: Path) -> None:
    """Of several workers too, on whose command lines no password is; where it is wrong, 78 is all."""
    keys = write_keys(tmp_path / "keys.toml", **LIMITS)
    async with redis_server("--requirepass", "right") as server:
        for password, flags in (("wrong", ()), ("wrong", ("--workers", "2"))):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "--target", "127.0.0.1:1", "--tokenizer", tokenizer),
                *("--listen", "127.0.0.1:0", "--rest-listen", "", "--api-keys", keys, *flags),
                env={**os.environ, "OUTRIDER_KEY_STORE": server.url.replace("//", f"//:{password}@")},
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await asyncio.wait_for(process.communicate(), 120)
            sentence = errors.decode().splitlines()[-1]
            assert process.returncode == 78
            assert "key_store is 'redis://***@127.0.0.1:" in sentence
            assert "wrong" not in sentence
        target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), Vocabulary.read(tokenizer).digests)
        url = server.url.replace("//", "//:right@")
        words, environment = ("--api-keys", keys, "--workers", "2"), {"OUTRIDER_KEY_STORE": url}
        async with (
            serving(target) as address,
            gateway_before(address, tokenizer, *words, environment=environment) as gateway,
            httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=NUM_CALLS)) as http,
            Redis.from_url(url) as store,
        ):
            await Gateways([gateway], http).check_at_once("few", NUM_CALLS, 20, 20)
            assert await store.zcard(GATEWAYS) == 2
            workers = children_of(gateway.process.pid).values()
            assert len(workers) == 2
            assert "right" not in " ".join(word for words in workers for word in words)
