"""What was used of the keys' limits: in this process alone, or in all workers of a gateway together.

Workers share a folder with a file for each key. A file is read, changed and written under its lock, which the kernel
gives back for a worker that dies; nothing stays open in between. All read the same clock, the machine's monotonic one.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MINUTE_S = 60.0
# Far below one request or token, and far above what floating point loses.
SLACK = 1e-6
# Far more than what is written of a key: a count for each worker that has samples of it.
MAX_FILE_BYTES = 1 << 16
NOTHING_USED = '{"requests": [0, 0], "tokens": [0, 0], "under_way": {}}'


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
        """Takes an amount, behind a look at what is left: else what is taken had time to come back already."""
        self.used += amount


@dataclass(slots=True)
class Account:
    """What was used of one key's limits."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    """What requests that are over have used of them."""
    samples: int = 0
    """Of this process, that run or wait."""
    held_tokens: int = 0
    """All that these may use, apart from the bucket: what is held does not come back while it is."""
    other_samples: int = 0
    """Of the other workers."""
    other_held_tokens: int = 0


class Usage(Protocol):
    """The accounts of all keys."""

    def account(self, name: str) -> AbstractContextManager[Account]:
        """The account of a key's name, which nobody else sees or changes while it is open. It must not be open long."""
        ...


class OwnUsage:
    """The accounts of a process that has the keys for itself."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        yield self._accounts.setdefault(name, Account())


class SharedUsage:
    """The accounts that the workers of a gateway have together."""

    def __init__(self, folder: str, worker: int) -> None:
        """`worker` is this one's number; what one before it with that number had under way is over, for it has died."""
        self._folder, self._worker = Path(folder), str(worker)
        for path in self._folder.iterdir():
            with self.account(path.name) as account:
                account.samples = account.held_tokens = 0

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        opened = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            written = os.pread(opened, MAX_FILE_BYTES, 0)
            record = json.loads(written or NOTHING_USED)
            under_way = record["under_way"]
            own = under_way.pop(self._worker, (0, 0))
            others = [sum(each) for each in zip((0, 0), *under_way.values(), strict=True)]
            account = Account(Bucket(*record["requests"]), Bucket(*record["tokens"]), *own, *others)
            yield account
            if account.samples:
                under_way[self._worker] = [account.samples, account.held_tokens]
            requests, tokens = account.requests, account.tokens
            record = {
                "requests": [requests.used, requests.at_s],
                "tokens": [tokens.used, tokens.at_s],
                "under_way": under_way,
            }
            # In one write, so that a worker that is killed leaves all of it or nothing.
            os.pwrite(opened, json.dumps(record).encode().ljust(len(written)), 0)
        finally:
            os.close(opened)
