"""The holder of a key while the gateway runs, held to the key's limits: the rules of counting, wherever it is done."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.keys.account import MINUTE_S, SLACK, Account, Bucket
from gateway.keys.table import Key, KeyLimits
from gateway.keys.usage import KeyUsage, OwnUsage
from outrider.errors import InvalidRequest, PromptTooLong, RateLimited

# Seconds that a client is asked to wait for a sample's end, by how long samples took lately.
WAIT_S = (1.0, 60.0)
SMOOTHING = 0.2
# Of a request that was refused before it had tokens.
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Allowance:
    """State of a limit by the minute: all of it, what is left, and when all is left again if nothing is taken."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class Spending:
    """Share of a key's limits that a request holds; `used_tokens` are the only ones that it does not give back."""

    used_tokens: int = 0


@dataclass(slots=True, eq=False)
class Tenant:
    """The holder of a key, with its limits and what it used of them."""

    key: Key
    usage: KeyUsage = field(default_factory=OwnUsage)
    _held_s: float = WAIT_S[0]

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def limits(self) -> KeyLimits:
        return self.key.limits

    async def allowances(self) -> tuple[Allowance | None, Allowance | None]:
        """Allowances of requests and of tokens, where they are limited; running requests hold all tokens that they may
        use.
        """
        requests, tokens = self.limits.requests_per_minute, self.limits.tokens_per_minute
        if requests is None and tokens is None:
            return None, None

        def look(account: Account) -> tuple[Allowance | None, Allowance | None]:
            return (
                None if requests is None else self._allowance(account, account.requests, requests),
                None if tokens is None else self._allowance(account, account.tokens, tokens),
            )

        return await self.usage.change(self.key, look)

    async def count_request(self) -> None:
        """Counts a request that has come, whatever becomes of it. Raises RateLimited about one too many."""
        per_minute = self.limits.requests_per_minute
        if per_minute is None:
            return

        def take(account: Account) -> None:
            self._check_left(account, account.requests, 1, per_minute)
            account.requests.take(1)

        await self.usage.change(self.key, take)

    async def check_left(self) -> None:
        """Raises RateLimited where nothing is left of what a minute allows: then no more is read."""
        requests, tokens = self.limits.requests_per_minute, self.limits.tokens_per_minute

        def check(account: Account) -> None:
            if requests is not None:
                self._check_left(account, account.requests, 1, requests)
            if tokens is not None:
                self._check_left(account, account.tokens, 1, tokens)

        await self.usage.change(self.key, check)

    def count_refusal(self, num_bytes: int) -> None:
        """Counts a request that was refused before it was known what it asks for: as one, and as many tokens as its
        bytes may have been, but no more of them than are left.
        """
        requests, tokens = self.limits.requests_per_minute, self.limits.tokens_per_minute

        def take(account: Account) -> None:
            if requests is not None:
                account.requests.left(account.part(requests), account.now_s)
                account.requests.take(1)
            if tokens is not None:
                left = max(0, math.floor(account.tokens.left(account.part(tokens), account.now_s)))
                account.tokens.take(min(left, num_bytes // BYTES_PER_TOKEN))

        self.usage.change(self.key, take)

    @asynccontextmanager
    async def spending(
        self, samples: int, prompt_tokens: int, max_tokens: int, num_prompts: int = 1
    ) -> AsyncIterator[Spending]:
        """Holds a request's samples and all tokens that it may use, its prompts and up to max_tokens a sample.

        Raises RateLimited, and InvalidRequest or PromptTooLong about what the key's limits never allow.
        """
        self._check_size(samples, prompt_tokens, max_tokens, num_prompts)
        limits, spending = self.limits, Spending()
        held = 0 if limits.tokens_per_minute is None else prompt_tokens + samples * max_tokens

        def take(account: Account) -> float:
            if limits.concurrent_samples is not None:
                self._check_room(account, samples, limits.concurrent_samples)
            if limits.tokens_per_minute is not None:
                self._check_left(account, account.tokens, held, limits.tokens_per_minute)
            account.samples += samples
            account.held_tokens += held
            return account.now_s

        def give_back(account: Account) -> float:
            account.samples -= samples
            account.held_tokens -= held
            per_minute = self.limits.tokens_per_minute
            # A limit that is new counts no tokens of requests from before it.
            if held and per_minute is not None:
                account.tokens.left(account.part(per_minute), account.now_s)
                account.tokens.take(spending.used_tokens)
            return account.now_s

        taking = self.usage.change(self.key, take)
        try:
            begun_s = await asyncio.shield(taking)
        except asyncio.CancelledError:
            # A caller that leaves while it is taken may have got it all the same.
            taking.add_done_callback(lambda taken: taken.exception() or self.usage.change(self.key, give_back))
            raise
        try:
            yield spending
        finally:
            ended_s = await self.usage.change(self.key, give_back)
            self._held_s += SMOOTHING * (ended_s - begun_s - self._held_s)

    def _check_room(self, account: Account, samples: int, limit: int) -> None:
        under_way, most = account.samples + account.other_samples, account.part(limit)
        # What is more than a part, and no more than the limit, has to be alone.
        if under_way + min(samples, most) > most:
            min_s, max_s = WAIT_S
            raise RateLimited(
                f"{under_way} of at most {most} samples of the key {self.name!r} are under way",
                key=self.name,
                limit=most,
                unit="requests",
                retry_after_s=math.ceil(min(max(min_s, self._held_s / most), max_s)),
            )

    def _check_size(self, samples: int, prompt_tokens: int, max_tokens: int, num_prompts: int) -> None:
        most_samples, most_tokens = self.limits.concurrent_samples, self.limits.tokens_per_minute
        if most_samples is not None and samples > most_samples:
            if num_prompts > most_samples:
                raise InvalidRequest("prompt", f"{num_prompts} prompts", f"at most {most_samples} with this key")
            limit = f"at most {most_samples // num_prompts} with this key, for each of {num_prompts} prompts"
            raise InvalidRequest("sample_count", samples // num_prompts, limit)
        if most_tokens is None:
            return
        room = (most_tokens - prompt_tokens) // samples
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens, but prompt and answers of this key may have {most_tokens} "
                "together in a minute",
                prompt_tokens=prompt_tokens,
                tokens_per_minute=most_tokens,
            )
        if max_tokens > room:
            limit = f"at most {room} behind {prompt_tokens} tokens of prompt, of {most_tokens} a minute with this key"
            raise InvalidRequest("max_tokens", max_tokens, limit)

    def _check_left(self, account: Account, bucket: Bucket, amount: int, limit: int) -> None:
        per_minute, is_tokens = account.part(limit), bucket is account.tokens
        held = account.held_tokens + account.other_held_tokens if is_tokens else 0
        # What is more than a part, and no more than the limit, waits for all of the part and is owed.
        wait_s = bucket.wait_s(held + min(amount, per_minute), per_minute, account.now_s)
        if wait_s:
            unit = "tokens" if is_tokens else "requests"
            raise RateLimited(
                f"the key {self.name!r} has {per_minute} {unit} a minute, and too few are left for {amount} more; "
                f"ask again in {math.ceil(wait_s)} s",
                key=self.name,
                limit=per_minute,
                unit=unit,
                retry_after_s=math.ceil(wait_s),
            )

    @staticmethod
    def _allowance(account: Account, bucket: Bucket, limit: int) -> Allowance:
        per_minute = account.part(limit)
        held = account.held_tokens + account.other_held_tokens if bucket is account.tokens else 0
        left = bucket.left(per_minute, account.now_s) - held
        return Allowance(per_minute, max(0, math.floor(left + SLACK)), (bucket.used + held) * MINUTE_S / per_minute)


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """Salt that separates the caches of a tenant's request: no other tenant's has it, whatever salt is sent with it.

    Without a tenant it is the request's own salt.
    """
    # No name has the separator.
    return hashlib.sha256(f"{tenant}:{cache_salt}".encode()).hexdigest().encode() if tenant else cache_salt.encode()
