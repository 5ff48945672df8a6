"""What several gateways count together in a Redis server: exact at once, and careful without it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from support.basics import eventually
from support.keys import samples_of
from support.services.redis_server import RedisServer, redis_server

from gateway.keys import store
from gateway.keys.account import AccountRecord, Bucket
from gateway.keys.store import KeyStoreRefused, RedisUsage
from gateway.keys.table import Key, KeyLimits
from gateway.keys.tenant import Tenant
from outrider.errors import NotReady, RateLimited

NUM_GATEWAYS = 3
ALONE, TOGETHER = "limits of keys are counted by each gateway alone", "limits of keys are counted together again"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RedisServer]:
    """A store with nothing in it."""
    async with redis_server() as running:
        yield running


@pytest_asyncio.fixture
async def usages(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[RedisUsage]]:
    """What each of three gateways counts with; all have heard of each other."""
    monkeypatch.setattr(store, "PROBE_S", 0.02)
    monkeypatch.setattr(store, "BEAT_S", 0.05)
    monkeypatch.setattr(store, "TIMEOUT_S", 0.3)
    made = [RedisUsage(server.url, "shown") for _ in range(NUM_GATEWAYS)]
    for usage in made:
        await usage.start()
    await eventually(lambda: all(usage._gateways == NUM_GATEWAYS for usage in made))
    yield made
    for usage in made:
        await usage.close()


def holders(usages: Sequence[RedisUsage], name: str = "alice", **limits: int) -> list[Tenant]:
    """The holder of one key at each gateway."""
    return [Tenant(Key(name, b"", KeyLimits(**limits)), usage) for usage in usages]


async def count(tenants: Sequence[Tenant], times: int, ask: Callable[[Tenant], Awaitable[object]]) -> int:
    """How many of so many at once are let in, at all gateways by turns."""

    async def is_let_in(tenant: Tenant) -> bool:
        try:
            await ask(tenant)
        except RateLimited:
            return False
        return True

    return sum(await asyncio.gather(*(is_let_in(tenants[number % len(tenants)]) for number in range(times))))


def come_back(per_minute: int, since_s: float) -> int:
    """How many requests of a minute are free again, since all were used."""
    return int((time.monotonic() - since_s) * per_minute / 60)


async def is_alone(usages: Sequence[RedisUsage]) -> None:
    """Returns when all have noticed that the store is away."""
    await eventually(lambda: all(usage.is_away for usage in usages))


async def is_together(usages: Sequence[RedisUsage]) -> None:
    """Returns when all count together again, and have told what they used alone."""
    entries = [entry for usage in usages for entry in usage._entries.values()]
    await eventually(lambda: not any(usage.is_away for usage in usages) and all(not each.alone for each in entries))


async def test_of_two_hundred_at_once_as_many_come_in_as_may(usages: list[RedisUsage]) -> None:
    """By each limit, to the last one, whichever gateway is asked; what is over is free for all."""
    tenants = holders(usages, concurrent_samples=7, requests_per_minute=20, tokens_per_minute=100)
    assert await count(tenants, 200, Tenant.count_request) == 20
    async with AsyncExitStack() as running:
        assert await count(tenants, 200, lambda each: running.enter_async_context(each.spending(1, 1, 1))) == 7
        assert {await samples_of(tenant) for tenant in tenants} == {7}
    assert {await samples_of(tenant) for tenant in tenants} == {0}
    frugal = holders(usages, "frugal", tokens_per_minute=100)
    async with AsyncExitStack() as running:
        assert await count(frugal, 200, lambda each: running.enter_async_context(each.spending(1, 2, 7))) == 11
        with pytest.raises(RateLimited):
            async with frugal[0].spending(1, 1, 1):
                pass
        _, tokens = await frugal[2].allowances()
        assert tokens is not None
        assert tokens.remaining == 1


async def test_a_request_that_leaves_while_it_is_let_in_holds_nothing(
    server: RedisServer, usages: list[RedisUsage]
) -> None:
    """Though the store learns of it only then."""
    tenants = holders(usages, concurrent_samples=1)
    server.freeze()
    leaving = asyncio.create_task(tenants[0].spending(1, 1, 1).__aenter__())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    server.thaw()

    async def is_free() -> bool:
        return await samples_of(tenants[1]) == 0

    await eventually(is_free)
    async with tenants[1].spending(1, 1, 1):
        assert await samples_of(tenants[0]) == 1


async def test_what_a_dead_gateway_held_comes_back(usages: list[RedisUsage], monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing was heard of it for a while; what lives holds on for as long as it runs."""
    monkeypatch.setattr(store, "HOLD_S", 0.4)
    tenants = holders(usages, concurrent_samples=3)
    dead, alive = tenants[0].spending(1, 1, 1), tenants[1].spending(2, 1, 1)
    await dead.__aenter__()
    await alive.__aenter__()
    assert await samples_of(tenants[2]) == 3
    # It says nothing any more, and nothing of that.
    usages[0]._is_closing = True

    async def is_back() -> bool:
        return await samples_of(tenants[2]) == 2

    await eventually(is_back)
    for _ in range(8):
        await asyncio.sleep(0.1)
        assert await samples_of(tenants[2]) == 2
    await eventually(lambda: usages[2]._gateways == NUM_GATEWAYS - 1)
    await alive.__aexit__(None, None, None)
    assert await samples_of(tenants[2]) == 0


async def test_a_store_that_has_lost_all_gets_it_back(server: RedisServer, usages: list[RedisUsage]) -> None:
    """From who knows it: what was used of a minute, and what runs. No request notices."""
    tenants = holders(usages, concurrent_samples=4, requests_per_minute=10)
    began_s = time.monotonic()
    assert await count(tenants, 30, Tenant.count_request) == 10
    async with tenants[0].spending(3, 1, 1):
        await server.kill()
        await server.start()
        await is_together(usages)
        assert await count(tenants, 30, Tenant.count_request) <= come_back(10, began_s)
        await eventually(lambda: all(usage._gateways == NUM_GATEWAYS for usage in usages))
        assert await samples_of(tenants[1]) == 3
    assert await samples_of(tenants[1]) == 0


@pytest.mark.parametrize("loss", ["frozen", "gone"])
async def test_without_the_store_each_gateway_has_its_part(
    server: RedisServer, usages: list[RedisUsage], loss: str
) -> None:
    """Of what was left, and the log says so once; what was used so is counted when the store is there again."""
    tenants = holders(usages, requests_per_minute=30, concurrent_samples=6)
    began_s = time.monotonic()
    assert await count(tenants[:1], 15, Tenant.count_request) == 15
    for tenant in tenants:
        await tenant.allowances()
    with capture_logs() as lines:
        if loss == "frozen":
            server.freeze()
        else:
            await server.kill()
        await is_alone(usages)
        assert [await count([each], 30, Tenant.count_request) for each in tenants] == [5, 5, 5]
        async with AsyncExitStack() as running:
            for each in tenants:
                entered = await count([each], 9, lambda one: running.enter_async_context(one.spending(1, 1, 1)))
                assert entered == 2
        if loss == "frozen":
            server.thaw()
        else:
            await server.start()
        await is_together(usages)
        assert await count(tenants, 30, Tenant.count_request) <= come_back(30, began_s)
    said = [line["event"] for line in lines]
    assert [sum(each.startswith(words) for each in said) for words in (ALONE, TOGETHER)] == [3, 3]


async def test_without_the_store_no_key_is_shut_out(server: RedisServer, usages: list[RedisUsage]) -> None:
    """A limit below the number of gateways is 1 at each; what is more than a part, but may be, runs alone and is
    paid for.
    """
    tenants = holders(usages, requests_per_minute=2, concurrent_samples=4, tokens_per_minute=90)
    await server.kill()
    await is_alone(usages)
    assert [await count([each], 9, Tenant.count_request) for each in tenants] == [1, 1, 1]
    async with tenants[0].spending(4, 10, 20) as spending:
        with pytest.raises(RateLimited):
            async with tenants[0].spending(1, 1, 1):
                pass
        spending.used_tokens = 60
    with pytest.raises(RateLimited) as refused:
        async with tenants[0].spending(1, 1, 1):
            pass
    assert refused.value.metadata["retry_after_s"] == "64"


async def test_a_clock_that_was_put_back_shuts_nobody_out(usages: list[RedisUsage]) -> None:
    """What was used at a time that is yet to come counts as used now, and comes back within its minute."""
    tenants = holders(usages, requests_per_minute=600)
    await tenants[1].count_request()
    later = AccountRecord(Bucket(600.0, 4e9), Bucket())
    await usages[0]._redis.set(store.PREFIX + "alice", later.text())

    async def is_let_in() -> bool:
        return await count(tenants, 1, Tenant.count_request) == 1

    await eventually(is_let_in)


async def test_a_record_that_is_none_counts_as_nothing_used(usages: list[RedisUsage]) -> None:
    """Whoever else writes into the store ends no request."""
    begin = b'{"requests": [0, 0], "tokens": [0, 0], "under_way": '
    texts = (
        b"\xff{",
        b"[]",
        b"[" * 10**5,
        begin + b"[]}",
        begin + b'{"a": [9]}}',
        begin + b'{"a": [9, 9]}}',
        b'{"requests": [9]}',
    )
    for number, text in enumerate(texts):
        tenants = holders(usages, f"holder-{number}", requests_per_minute=5, concurrent_samples=1)
        await usages[0]._redis.set(f"{store.PREFIX}holder-{number}", text)
        assert await count(tenants, 20, Tenant.count_request) == 5
        assert {await samples_of(tenant) for tenant in tenants} == {0}
    assert not any(usage.is_away for usage in usages)


async def test_a_key_without_limits_is_no_business_of_the_store(usages: list[RedisUsage]) -> None:
    """Until it has some: then what runs counts."""
    tenants = holders(usages)
    async with tenants[0].spending(2, 1, 1):
        assert await usages[0]._redis.exists(store.PREFIX + "alice") == 0
        limited = holders(usages, concurrent_samples=3)
        assert await samples_of(limited[0]) == 2
        assert await samples_of(limited[1]) == 2


async def test_a_store_that_refuses_or_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never with the password."""
    monkeypatch.setattr(store, "START_S", 0.0)
    async with redis_server("--requirepass", "right") as server:
        for credentials in ("", ":wrong@", "bob:right@"):
            usage = RedisUsage(server.url.replace("//", f"//{credentials}"), "redis://***@host")
            with pytest.raises(KeyStoreRefused, match=r"key_store is 'redis://\*\*\*@host', which refuses") as refused:
                await usage.start()
            assert "wrong" not in refused.value.message.replace("WRONGPASS", "")
            await usage.close()
        right = RedisUsage(server.url.replace("//", "//:right@"), "shown")
        await right.start()
        await right.close()
    gone = RedisUsage(server.url, "shown")
    with pytest.raises(NotReady, match="key_store is 'shown', which did not answer within"):
        await gone.start()
    await gone.close()
