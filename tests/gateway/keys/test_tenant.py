"""What the holder of a key may use, on a clock that the test moves: exact to the request and to the token, whether it
is counted in one process or in a folder that several share.
"""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.keys import samples_of, table_of

from gateway.keys.table import parse_keys
from gateway.keys.tenant import Allowance, Tenant, salt_of
from gateway.keys.usage import KeyUsage, OwnUsage, SharedUsage
from outrider.errors import InvalidRequest, PromptTooLong, RateLimited


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """The clock of what is counted."""
    return Clock()


@pytest.fixture(params=["own", "shared"])
def usage(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> KeyUsage:
    """Where it is counted."""
    return OwnUsage(clock) if request.param == "own" else SharedUsage(str(tmp_path), 0, clock)


def tenant_of(usage: KeyUsage, **limits: int) -> Tenant:
    """The holder of a key with these limits."""
    [key] = parse_keys(table_of("alice", **limits).encode(), "keys.toml")
    return Tenant(key, usage)


async def requests_of(tenant: Tenant) -> Allowance | None:
    """What is left of the requests."""
    return (await tenant.allowances())[0]


async def tokens_of(tenant: Tenant) -> Allowance | None:
    """What is left of the tokens."""
    return (await tenant.allowances())[1]


async def remaining(tenant: Tenant) -> int:
    """Tokens that are left."""
    tokens = await tokens_of(tenant)
    assert tokens is not None
    return tokens.remaining


async def count_let_in(tenant: Tenant, times: int) -> int:
    """How many of so many requests at once are let in."""
    count = 0
    for _ in range(times):
        try:
            await tenant.count_request()
        except RateLimited:
            continue
        count += 1
    return count


async def test_a_refused_request_counts_as_one_and_its_bytes_as_tokens(usage: KeyUsage, clock: Clock) -> None:
    """Down to nothing and no further: what is left of a minute comes back as fast as ever."""
    tenant = tenant_of(usage, requests_per_minute=3, tokens_per_minute=60)
    tenant.count_refusal(83)
    assert await tenant.allowances() == (Allowance(3, 2, 20.0), Allowance(60, 40, 20.0))
    await tenant.check_left()
    tenant.count_refusal(4 << 20)
    assert await tokens_of(tenant) == Allowance(60, 0, 60.0)
    with pytest.raises(RateLimited, match="60 tokens a minute"):
        await tenant.check_left()
    clock.now_s += 1.0
    await tenant.check_left()
    tenant.count_refusal(0)
    with pytest.raises(RateLimited, match="3 requests a minute"):
        await tenant.check_left()
    free = tenant_of(OwnUsage(clock))
    free.count_refusal(4 << 20)
    await free.check_left()


async def test_of_two_hundred_requests_at_once_as_many_come_in_as_may(usage: KeyUsage, clock: Clock) -> None:
    """And as time goes by as many more as have come back, to the request."""
    tenant = tenant_of(usage, requests_per_minute=50)
    assert await count_let_in(tenant, 200) == 50
    clock.now_s += 30.0
    assert await count_let_in(tenant, 200) == 25
    clock.now_s += 3600.0
    assert await count_let_in(tenant, 200) == 50


@pytest.mark.parametrize("per_minute", [1, 7, 50, 59, 61, 997])
async def test_a_request_comes_in_when_it_was_told_to_come_again(
    usage: KeyUsage, clock: Clock, per_minute: int
) -> None:
    """Neither a request sooner, nor refused at that moment for what floating point loses."""
    tenant = tenant_of(usage, requests_per_minute=per_minute)
    assert await count_let_in(tenant, per_minute) == per_minute
    for _ in range(20):
        assert await count_let_in(tenant, 3) == 0
        clock.now_s += 60.0 / per_minute
        assert await count_let_in(tenant, 3) == 1
    with pytest.raises(RateLimited) as refused:
        await tenant.count_request()
    clock.now_s += float(refused.value.metadata["retry_after_s"])
    assert await count_let_in(tenant, 1) == 1


async def test_what_is_left_is_told(usage: KeyUsage, clock: Clock) -> None:
    """And when all of it is left again; of what is not limited, nothing."""
    tenant = tenant_of(usage, requests_per_minute=60, tokens_per_minute=6000)
    await count_let_in(tenant, 3)
    assert await requests_of(tenant) == Allowance(60, 57, 3.0)
    async with tenant.spending(2, 10, 100) as spending:
        assert await tokens_of(tenant) == Allowance(6000, 5790, 2.1)
        spending.used_tokens = 60
    assert await tokens_of(tenant) == Allowance(6000, 5940, 0.6)
    clock.now_s += 0.6
    assert await tokens_of(tenant) == Allowance(6000, 6000, 0.0)
    assert await tenant_of(usage).allowances() == (None, None)


async def test_tokens_are_held_while_a_request_runs_so_that_the_limit_is_never_passed(usage: KeyUsage) -> None:
    """Each holds its prompt and all that it may answer; what it did not say is given back at its end."""
    tenant = tenant_of(usage, tokens_per_minute=1000)
    async with AsyncExitStack() as running:
        held = [await running.enter_async_context(tenant.spending(1, 50, 150)) for _ in range(5)]
        with pytest.raises(RateLimited) as refused:
            async with tenant.spending(1, 1, 1):
                pass
        assert refused.value.metadata["retry_after_s"] == "1"
        for each in held:
            each.used_tokens = 70
    assert await remaining(tenant) == 1000 - 5 * 70
    async with tenant.spending(1, 50, 600):
        assert await remaining(tenant) == 0
    # Its client left the queue.
    assert await remaining(tenant) == 650


async def test_what_is_held_does_not_come_back_while_it_is(usage: KeyUsage, clock: Clock) -> None:
    """However long requests run, no more is used than may be: neither by many together, nor by what they give back."""
    tenant = tenant_of(usage, tokens_per_minute=1000)
    async with AsyncExitStack() as running:
        held = [await running.enter_async_context(tenant.spending(1, 0, 250)) for _ in range(4)]
        for _ in range(10):
            clock.now_s += 60.0
            with pytest.raises(RateLimited):
                async with tenant.spending(1, 0, 1):
                    pass
        assert await tokens_of(tenant) == Allowance(1000, 0, 60.0)
        for each in held:
            each.used_tokens = 225
    assert await tokens_of(tenant) == Allowance(1000, 100, 54.0)
    clock.now_s += 30.0
    async with tenant.spending(1, 0, 500) as spending:
        assert await tokens_of(tenant) == Allowance(1000, 100, 54.0)
        spending.used_tokens = 200
        clock.now_s += 24.0
    # All that was used before has come back; what has only just been used has not.
    assert await tokens_of(tenant) == Allowance(1000, 800, 12.0)
    clock.now_s += 12.0
    async with tenant.spending(1, 0, 1000) as spending:
        spending.used_tokens = 1000
        clock.now_s += 600.0
    assert await tokens_of(tenant) == Allowance(1000, 0, 60.0)


async def test_no_more_samples_are_under_way_than_may(usage: KeyUsage, clock: Clock) -> None:
    """A request has all of its samples at once, or none; and a place is free when another one has ended."""
    tenant = tenant_of(usage, concurrent_samples=4)
    async with tenant.spending(1, 1, 1):
        async with tenant.spending(3, 1, 1):
            with pytest.raises(RateLimited, match="4 of at most 4 samples"):
                async with tenant.spending(1, 1, 1):
                    pass
            clock.now_s += 400.0
        with pytest.raises(RateLimited) as refused:
            async with tenant.spending(4, 1, 1):
                pass
    # A fifth of these 400 s has gone into what it expects, and four samples end in that time.
    assert 15 <= int(refused.value.metadata["retry_after_s"]) <= 25
    assert await samples_of(tenant) == 0


async def test_what_can_never_be_is_no_matter_of_waiting(usage: KeyUsage) -> None:
    """It is a wrong request, with the field and the most that it may be."""
    tenant = tenant_of(usage, concurrent_samples=2, tokens_per_minute=100)
    for size, sentence in (
        ((3, 1, 1), "sample_count is 3, but must be at most 2 with this key"),
        ((4, 1, 1, 2), "sample_count is 2, but must be at most 1 with this key, for each of 2 prompts"),
        ((3, 1, 1, 3), "prompt is '3 prompts', but must be at most 2 with this key"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            async with tenant.spending(*size):
                pass
    with pytest.raises(InvalidRequest, match="max_tokens is 41, but must be at most 40"):
        async with tenant.spending(2, 20, 41):
            pass
    with pytest.raises(PromptTooLong, match="prompt has 100 tokens"):
        async with tenant.spending(1, 100, 1):
            pass
    assert (await samples_of(tenant), await tokens_of(tenant)) == (0, Allowance(100, 100, 0.0))


async def test_new_limits_hold_for_what_was_used_before(usage: KeyUsage) -> None:
    """A tenant that used 40 of 50 has used 40 of 45 as well, and is not given more by running requests of before."""
    tenant = tenant_of(usage, requests_per_minute=50)
    assert await count_let_in(tenant, 40) == 40
    async with tenant.spending(1, 10, 500):
        [tenant.key] = parse_keys(table_of("alice", requests_per_minute=45, tokens_per_minute=100).encode(), "keys")
        assert await count_let_in(tenant, 40) == 5
        async with tenant.spending(1, 10, 40) as spending:
            spending.used_tokens = 50
    assert await remaining(tenant) == 50


def test_no_two_tenants_have_a_salt_in_common() -> None:
    """Whatever they send with their requests; one tenant's are as different as what it sends. Without a tenant nothing
    is added.
    """
    pairs = [
        (name, salt) for name in ("a", "ab", "b") for salt in ("", "b", ":b", "a:b", "ab", salt_of("a", "b").decode())
    ]
    salts = {salt_of(*pair) for pair in pairs}
    assert len(salts) == len(pairs)
    assert max(map(len, salts)) <= 64
    assert salt_of("", "mine") == b"mine"
