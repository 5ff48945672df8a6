"""Accounts of the keys' limits: of this process alone, or of all workers of a gateway together.

Workers share a folder with a file for each key. A file is read, changed and written under its lock, which the kernel
gives back for a worker that dies; nothing stays open in between. All read the same clock, the machine's monotonic one.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

log = structlog.get_logger()

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
    """Number of samples of the other workers."""
    other_held_tokens: int = 0


class KeyUsage(Protocol):
    """The accounts of all keys."""

    def account(self, name: str) -> AbstractContextManager[Account]:
        """Account of a key's name, which no other caller sees or changes while it is open. It must not be open long."""
        ...


class OwnUsage:
    """The accounts of a process that has the keys for itself."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        yield self._accounts.setdefault(name, Account())


class SharedUsage:
    """The accounts that the workers of a gateway have together.

    Where the folder cannot be read or written, as on a full disk, a worker goes on with what it knew last, and informs
    the others when it can: limits are then each worker's own for a while, which is better than no answers.
    """

    def __init__(self, folder: str, worker: int) -> None:
        """`worker` is this one's number; what one before it with that number had under way is over, for it has died."""
        self._folder, self._worker = Path(folder), str(worker)
        # As they were here last, and those of them that no file has yet.
        self._known: dict[str, Account] = {}
        self._unwritten: set[str] = set()
        self._complaint = ""
        with suppress(OSError):
            for path in self._folder.iterdir():
                with self.account(path.name):
                    pass

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        with ExitStack() as life:
            found = deepcopy(self._known.get(name, Account()))
            file = None
            try:
                file = life.enter_context(self._opened(name))
                file.read_into(found, self._worker, is_newer=name in self._unwritten)
            except OSError as error:
                file = None
                self._complain(error)
            yield found
            self._known[name] = found
            self._unwritten.add(name)
            if file is not None:
                try:
                    file.write(found, self._worker)
                except OSError as error:
                    self._complain(error)
                else:
                    self._unwritten.discard(name)
                    self._complaint = ""

    @contextmanager
    def _opened(self, name: str) -> Iterator["AccountFile"]:
        opened = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield AccountFile(opened)
        finally:
            os.close(opened)

    def _complain(self, error: OSError) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.error("limits of keys are counted by each worker alone", folder=str(self._folder), reason=str(error))


class AccountFile:
    """The file of a key, under its lock."""

    def __init__(self, opened: int) -> None:
        self._opened = opened
        self._length = 0
        self._under_way: dict[str, list[int]] = {}

    def read_into(self, account: Account, worker: str, *, is_newer: bool) -> None:
        """Brings an account up to date; where it is newer than the file, what is used is the more of both."""
        written = os.pread(self._opened, MAX_FILE_BYTES, 0)
        self._length = len(written)
        try:
            record = json.loads(written or NOTHING_USED)
        except ValueError:
            # Half of it, from when the disk was full.
            record = json.loads(NOTHING_USED)
        self._under_way = record["under_way"]
        self._under_way.pop(worker, None)
        others = self._under_way.values()
        account.other_samples, account.other_held_tokens = (sum(each) for each in zip((0, 0), *others, strict=True))
        for unit in ("requests", "tokens"):
            bucket = Bucket(*record[unit])
            if not is_newer or bucket.used > getattr(account, unit).used:
                setattr(account, unit, bucket)

    def write(self, account: Account, worker: str) -> None:
        """Writes an account into the file."""
        if account.samples:
            self._under_way[worker] = [account.samples, account.held_tokens]
        requests, tokens = account.requests, account.tokens
        record = {
            "requests": [requests.used, requests.at_s],
            "tokens": [tokens.used, tokens.at_s],
            "under_way": self._under_way,
        }
        data = json.dumps(record).encode().ljust(self._length)
        # In one write, so that a worker that is killed leaves all of it or nothing.
        if os.pwrite(self._opened, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
