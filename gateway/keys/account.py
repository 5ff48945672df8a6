"""Account of one key's limits: what was used, what is under way, and the record of it for those who count together."""

import json
from dataclasses import dataclass, field
from typing import Self

MINUTE_S = 60.0
# Far below one request or token, and far above what floating point loses.
SLACK = 1e-6


@dataclass(slots=True)
class Bucket:
    """A token bucket: so many units fit in and come back a minute. `used` are those that have not come back."""

    used: float = 0.0
    at_s: float = 0.0

    def left(self, per_minute: int, now_s: float) -> float:
        """Amount that may be taken now."""
        self.used = max(0.0, self.used - (now_s - self.at_s) * per_minute / MINUTE_S)
        self.at_s = now_s
        return per_minute - self.used

    def wait_s(self, amount: int, per_minute: int, now_s: float) -> float:
        """Seconds until an amount can be taken; 0 is now."""
        missing = amount - self.left(per_minute, now_s)
        return 0.0 if missing <= SLACK else missing * MINUTE_S / per_minute

    def take(self, amount: int) -> None:
        """Takes an amount, after a look at what is left: else what is taken had time to come back already."""
        self.used += amount


@dataclass(slots=True)
class Account:
    """Usage of one key's limits."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    """Buckets have what requests that are over have used."""
    samples: int = 0
    """Number of samples of this process that run or wait."""
    held_tokens: int = 0
    """Tokens that these samples may use, apart from the bucket: what is held does not come back meanwhile."""
    other_samples: int = 0
    """Number of samples of the other processes that count here."""
    other_held_tokens: int = 0
    now_s: float = 0.0
    """Time on the clock of all who count here."""
    share: int = 1
    """Number of processes that each have an equal part of every limit, while they cannot count together."""

    def part(self, limit: int) -> int:
        """What this account may have of a limit, at least 1."""
        return max(1, limit // self.share)


@dataclass(slots=True)
class AccountRecord:
    """What is written of an account for all who count together, in JSON."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    under_way: dict[str, list[float]] = field(default_factory=dict)
    """Samples of each process and the tokens that they hold; in a store also until when they do, in seconds."""

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Record of a text; what is none, such as half of one that a full disk leaves, is an empty record."""
        try:
            found = json.loads(text)
            requests, tokens = (Bucket(*map(float, found[unit])) for unit in ("requests", "tokens"))
            # At least these two, as numbers.
            under_way = {
                name: [float(samples), float(held), *map(float, end)]
                for name, (samples, held, *end) in found["under_way"].items()
            }
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return cls()
        return cls(requests, tokens, under_way)

    def others(self, process: str) -> tuple[int, int]:
        """Samples of the other processes, and tokens that these hold."""
        found = [each for name, each in self.under_way.items() if name != process]
        return sum(int(each[0]) for each in found), sum(int(each[1]) for each in found)

    def keep(self, known: Self) -> None:
        """Takes what was used of another record where that is later: then this one is from before a loss."""
        if known.requests.at_s > self.requests.at_s:
            self.requests = known.requests
        if known.tokens.at_s > self.tokens.at_s:
            self.tokens = known.tokens

    def text(self, **more: object) -> str:
        """The record as text, with further fields that no reader needs."""
        requests, tokens = self.requests, self.tokens
        written = {
            "requests": [requests.used, requests.at_s],
            "tokens": [tokens.used, tokens.at_s],
            "under_way": self.under_way,
        }
        return json.dumps({**written, **more})
