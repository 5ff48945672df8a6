"""The holder of a key while the gateway runs: what was used of the key's limits. Times come from a clock that is handed
in.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.keys.table import Key, KeyLimits
from outrider.errors import InvalidRequest, PromptTooLong, RateLimited

Clock = Callable[[], float]
MINUTE_S = 60.0
# Far below one request or token, and far above what floating point loses.
SLACK = 1e-6
# What a client is told to wait for a sample's end, by how long samples took lately.
WAIT_S = (1.0, 60.0)
SMOOTHING = 0.2


@dataclass(slots=True)
class Bucket:
    """A token bucket: so many units fit in and come back a minute. `used` are those that have not come back."""

    used: float = 0.0
    at_s: float = 0.0

    def left(self, per_minute: int, now_s: float) -> float:
        """What may be taken now."""
        self.used = max(0.0, self.used - (now_s - self.at_s) * per_minute / MINUTE_S)
        self.at_s = now_s
        return per_minute - self.used

    def wait_s(self, amount: int, per_minute: int, now_s: float) -> float:
        """How long until an amount can be taken; 0 is now."""
        missing = amount - self.left(per_minute, now_s)
        return 0.0 if missing <= SLACK else missing * MINUTE_S / per_minute

    def take(self, amount: int) -> None:
        self.used += amount

    def give_back(self, amount: int) -> None:
        """Takes back what was not used; what has come back meanwhile stays."""
        self.used = max(0.0, self.used - amount)


@dataclass(frozen=True, slots=True)
class Allowance:
    """One of the limits by the minute: all of it, what is left, and when all is left again if nothing is taken."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class Spending:
    """What a request holds of a key's limits; `used_tokens` are the only ones that it does not give back."""

    used_tokens: int = 0


@dataclass(slots=True, eq=False)
class Tenant:
    """The holder of a key. All counts are this process's own."""

    key: Key
    clock: Clock
    samples: int = 0
    """That run or wait."""
    _requests: Bucket = field(default_factory=Bucket)
    _tokens: Bucket = field(default_factory=Bucket)
    _held_s: float = WAIT_S[0]

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def limits(self) -> KeyLimits:
        return self.key.limits

    @property
    def requests(self) -> Allowance | None:
        """Requests, where they are limited."""
        return self._allowance(self._requests, self.limits.requests_per_minute)

    @property
    def tokens(self) -> Allowance | None:
        """Tokens, where they are limited; running requests hold all that they may use."""
        return self._allowance(self._tokens, self.limits.tokens_per_minute)

    def count_request(self) -> None:
        """Counts a request that has come, whatever becomes of it. Raises RateLimited about one too many."""
        if self.limits.requests_per_minute is not None:
            self._take(self._requests, 1, self.limits.requests_per_minute, "requests")

    @contextmanager
    def spending(self, samples: int, prompt_tokens: int, max_tokens: int) -> Iterator[Spending]:
        """Holds a request's samples and all tokens that it may use, its prompts and up to max_tokens a sample.

        Raises RateLimited, and InvalidRequest or PromptTooLong about what the key's limits never allow.
        """
        self._check_size(samples, prompt_tokens, max_tokens)
        self._check_samples(samples)
        taken = 0
        if self.limits.tokens_per_minute is not None:
            taken = prompt_tokens + samples * max_tokens
            self._take(self._tokens, taken, self.limits.tokens_per_minute, "tokens")
        self.samples += samples
        spending, begun_s = Spending(), self.clock()
        try:
            yield spending
        finally:
            self.samples -= samples
            self._held_s += SMOOTHING * (self.clock() - begun_s - self._held_s)
            self._tokens.give_back(max(0, taken - spending.used_tokens))

    def _check_size(self, samples: int, prompt_tokens: int, max_tokens: int) -> None:
        most_samples, most_tokens = self.limits.concurrent_samples, self.limits.tokens_per_minute
        if most_samples is not None and samples > most_samples:
            raise InvalidRequest("sample_count", samples, f"at most {most_samples} over all prompts with this key")
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

    def _check_samples(self, samples: int) -> None:
        most = self.limits.concurrent_samples
        if most is not None and self.samples + samples > most:
            min_s, max_s = WAIT_S
            wait_s = math.ceil(min(max(min_s, self._held_s / most), max_s))
            raise RateLimited(
                f"{self.samples} of at most {most} samples of the key {self.name!r} are under way",
                key=self.name,
                limit=most,
                retry_after_s=wait_s,
            )

    def _take(self, bucket: Bucket, amount: int, per_minute: int, unit: str) -> None:
        wait_s = bucket.wait_s(amount, per_minute, self.clock())
        if wait_s:
            raise RateLimited(
                f"the key {self.name!r} has {per_minute} {unit} a minute, and too few are left for {amount} more; "
                f"ask again in {math.ceil(wait_s)} s",
                key=self.name,
                limit=per_minute,
                retry_after_s=math.ceil(wait_s),
            )
        bucket.take(amount)

    def _allowance(self, bucket: Bucket, per_minute: int | None) -> Allowance | None:
        if per_minute is None:
            return None
        left = bucket.left(per_minute, self.clock())
        return Allowance(per_minute, max(0, math.floor(left + SLACK)), bucket.used * MINUTE_S / per_minute)


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """What separates the caches of a tenant's request: no other tenant's has it, whatever salt is sent with it.

    Without a tenant it is the request's own salt.
    """
    # No name has the separator.
    return hashlib.sha256(f"{tenant}:{cache_salt}".encode()).hexdigest().encode() if tenant else cache_salt.encode()
