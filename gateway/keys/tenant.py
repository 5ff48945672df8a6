"""The holder of a key while the gateway runs, held to the key's limits. Times come from a clock that is handed in."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.keys.table import Key, KeyLimits
from gateway.keys.usage import MINUTE_S, SLACK, Bucket, KeyUsage, OwnUsage
from outrider.errors import InvalidRequest, PromptTooLong, RateLimited

Clock = Callable[[], float]
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
    clock: Clock
    usage: KeyUsage = field(default_factory=OwnUsage)
    _held_s: float = WAIT_S[0]

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def limits(self) -> KeyLimits:
        return self.key.limits

    @property
    def samples(self) -> int:
        """Number of samples that run or wait."""
        with self.usage.account(self.name) as account:
            return account.samples + account.other_samples

    @property
    def requests(self) -> Allowance | None:
        """Allowance of requests, where they are limited."""
        if self.limits.requests_per_minute is None:
            return None
        with self.usage.account(self.name) as account:
            return self._allowance(account.requests, 0, self.limits.requests_per_minute)

    @property
    def tokens(self) -> Allowance | None:
        """Tokens, where they are limited; running requests hold all that they may use."""
        if self.limits.tokens_per_minute is None:
            return None
        with self.usage.account(self.name) as account:
            held = account.held_tokens + account.other_held_tokens
            return self._allowance(account.tokens, held, self.limits.tokens_per_minute)

    def count_request(self) -> None:
        """Counts a request that has come, whatever becomes of it. Raises RateLimited about one too many."""
        if self.limits.requests_per_minute is None:
            return
        with self.usage.account(self.name) as account:
            self._check_left(account.requests, 1, self.limits.requests_per_minute, "requests")
            account.requests.take(1)

    def check_left(self) -> None:
        """Raises RateLimited where nothing is left of what a minute allows: then no more is read."""
        with self.usage.account(self.name) as account:
            if self.limits.requests_per_minute is not None:
                self._check_left(account.requests, 1, self.limits.requests_per_minute, "requests")
            if self.limits.tokens_per_minute is not None:
                held = account.held_tokens + account.other_held_tokens
                self._check_left(account.tokens, 1, self.limits.tokens_per_minute, "tokens", held)

    def count_refusal(self, num_bytes: int) -> None:
        """Counts a request that was refused before it was known what it asks for: as one, and as many tokens as its
        bytes may have been, but no more of them than are left.
        """
        with self.usage.account(self.name) as account:
            if self.limits.requests_per_minute is not None:
                account.requests.left(self.limits.requests_per_minute, self.clock())
                account.requests.take(1)
            if self.limits.tokens_per_minute is not None:
                left = max(0, math.floor(account.tokens.left(self.limits.tokens_per_minute, self.clock())))
                account.tokens.take(min(left, num_bytes // BYTES_PER_TOKEN))

    @contextmanager
    def spending(self, samples: int, prompt_tokens: int, max_tokens: int, num_prompts: int = 1) -> Iterator[Spending]:
        """Holds a request's samples and all tokens that it may use, its prompts and up to max_tokens a sample.

        Raises RateLimited, and InvalidRequest or PromptTooLong about what the key's limits never allow.
        """
        self._check_size(samples, prompt_tokens, max_tokens, num_prompts)
        taken = 0
        with self.usage.account(self.name) as account:
            under_way, most = account.samples + account.other_samples, self.limits.concurrent_samples
            if most is not None and under_way + samples > most:
                min_s, max_s = WAIT_S
                raise RateLimited(
                    f"{under_way} of at most {most} samples of the key {self.name!r} are under way",
                    key=self.name,
                    limit=most,
                    unit="requests",
                    retry_after_s=math.ceil(min(max(min_s, self._held_s / most), max_s)),
                )
            if self.limits.tokens_per_minute is not None:
                held = account.held_tokens + account.other_held_tokens
                taken = prompt_tokens + samples * max_tokens
                self._check_left(account.tokens, taken, self.limits.tokens_per_minute, "tokens", held)
            account.samples += samples
            account.held_tokens += taken
        spending, begun_s = Spending(), self.clock()
        try:
            yield spending
        finally:
            self._held_s += SMOOTHING * (self.clock() - begun_s - self._held_s)
            with self.usage.account(self.name) as account:
                account.samples -= samples
                account.held_tokens -= taken
                # A limit that is new counts no tokens of requests from before it.
                if taken and self.limits.tokens_per_minute is not None:
                    account.tokens.left(self.limits.tokens_per_minute, self.clock())
                    account.tokens.take(spending.used_tokens)

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

    def _check_left(self, bucket: Bucket, amount: int, per_minute: int, unit: str, held: int = 0) -> None:
        wait_s = bucket.wait_s(held + amount, per_minute, self.clock())
        if wait_s:
            raise RateLimited(
                f"the key {self.name!r} has {per_minute} {unit} a minute, and too few are left for {amount} more; "
                f"ask again in {math.ceil(wait_s)} s",
                key=self.name,
                limit=per_minute,
                unit=unit,
                retry_after_s=math.ceil(wait_s),
            )

    def _allowance(self, bucket: Bucket, held: int, per_minute: int) -> Allowance:
        left = bucket.left(per_minute, self.clock()) - held
        return Allowance(per_minute, max(0, math.floor(left + SLACK)), (bucket.used + held) * MINUTE_S / per_minute)


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """Salt that separates the caches of a tenant's request: no other tenant's has it, whatever salt is sent with it.

    Without a tenant it is the request's own salt.
    """
    # No name has the separator.
    return hashlib.sha256(f"{tenant}:{cache_salt}".encode()).hexdigest().encode() if tenant else cache_salt.encode()
