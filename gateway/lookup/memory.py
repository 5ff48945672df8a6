"""Memory of a tenant's finished requests, to look up in: each tenant its own, never another's."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from gateway.lookup.chains import MAX_PLACES, Chains, Context, Match
from gateway.lookup.rates import LookupRates
from outrider.errors import InvalidRequest

SEPARATOR = -1  # is no token, so nothing matches across it
NUM_SEGMENTS = 16
MAX_SEGMENT = 1 << 16  # tokens; with more of them than hashes the chains would be mixed
MAX_BYTES_PER_TOKEN = 18
"""Bytes a token of a full memory: token, link, and what the hashes take; usually 13."""
LEAST_TOKENS = 4096

Ints: TypeAlias = "array[int]"


class TenantMemory:
    """The newest tokens of one tenant, in segments that are dropped whole, the oldest first."""

    def __init__(self, max_tokens: int, resized: Callable[["TenantMemory", int], None]) -> None:
        """`resized` gets how many bytes more there are, or fewer, whenever something was added."""
        self.rates = LookupRates()
        """Acceptance of guesses in this tenant's requests: its own too, so that no tenant learns from another."""
        self._resized = resized
        self._segment_len = min(max_tokens // NUM_SEGMENTS, MAX_SEGMENT)
        self._max_segments = max_tokens // self._segment_len
        self._segments: deque[Chains] = deque([Chains()])
        self.num_bytes = self._segments[0].num_bytes
        """Bytes of all tables, what they have reserved included."""

    def __len__(self) -> int:
        """Tokens, with one more for each request."""
        return sum(len(segment.tokens) for segment in self._segments)

    def add(self, token_ids: Ints) -> None:
        """Takes a finished request, prompt and answer."""
        left = token_ids[-self._max_segments * self._segment_len :]
        left.append(SEPARATOR)
        while left:
            room = self._segment_len - len(self._segments[-1].tokens)
            if room == 0:
                if len(self._segments) == self._max_segments:
                    self._segments.popleft()
                self._segments.append(Chains(self._segment_len))
            self._segments[-1].extend(left[:room])
            del left[:room]
        before, self.num_bytes = self.num_bytes, sum(segment.num_bytes for segment in self._segments)
        self._resized(self, self.num_bytes - before)

    def matches(self, context: Context) -> list[Match]:
        """Places after three or more of the same tokens, the newest first; at most MAX_PLACES."""
        found: list[Match] = []
        for segment in reversed(self._segments):
            found += segment.matches(context)
            if len(found) >= MAX_PLACES:
                break
        return found[:MAX_PLACES]


class Memories:
    """The memories of all tenants, by the salt of their requests; requests without one are a tenant together.

    `num_bytes` are the bytes of all their tables, `max_bytes` at most: the tenants that asked least recently are
    forgotten.
    """

    def __init__(self, max_tokens_each: int, max_bytes: int) -> None:
        """Raises InvalidRequest for less than LEAST_TOKENS, and where not even one full memory would fit."""
        if max_tokens_each < LEAST_TOKENS:
            raise InvalidRequest("max_tokens_each", max_tokens_each, f"at least {LEAST_TOKENS}")
        needed = max_tokens_each * MAX_BYTES_PER_TOKEN
        if max_bytes < needed:
            raise InvalidRequest("max_bytes", max_bytes, f"at least {needed}, for {max_tokens_each} tokens of a tenant")
        self.num_bytes = 0
        self._max_tokens_each = max_tokens_each
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, TenantMemory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, salt: str) -> TenantMemory:
        """The memory of a tenant, an empty one where there is none yet."""
        memory = self._tenants.get(salt)
        if memory is None:
            memory = TenantMemory(self._max_tokens_each, partial(self._resized, salt))
            self._tenants[salt] = memory
            self._resized(salt, memory, memory.num_bytes)
        self._tenants.move_to_end(salt)
        return memory

    def _resized(self, salt: str, memory: TenantMemory, num_bytes: int) -> None:
        if self._tenants.get(salt) is not memory:
            # Forgotten while a request of its still ran.
            return
        self.num_bytes += num_bytes
        self._tenants.move_to_end(salt)
        while self.num_bytes > self._max_bytes:
            _, forgotten = self._tenants.popitem(last=False)
            self.num_bytes -= forgotten.num_bytes
