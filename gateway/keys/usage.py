"""Accounts of the keys' limits: of this process alone, or of all workers of a gateway together.

Workers share a folder with a file for each key. A file is read, changed and written under its lock, which the kernel
gives back for a worker that dies; nothing stays open in between. All read the same clock, the machine's monotonic one.
"""

import asyncio
import errno
import fcntl
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from gateway.keys.account import Account, AccountRecord
from gateway.keys.table import Key

log = structlog.get_logger()

Clock = Callable[[], float]
T = TypeVar("T")
# Far more than what is written of a key: a count for each worker that has samples of it.
MAX_FILE_BYTES = 1 << 16


class KeyUsage(Protocol):
    """The accounts of all keys."""

    is_away: bool | None = None
    """Whether the store that they are in is away; None without a store."""

    async def start(self) -> None:
        """Returns when accounts can be changed; raises NotReady or KeyStoreRefused where they cannot."""

    def change(self, key: Key, operation: Callable[[Account], T]) -> "asyncio.Future[T]":
        """Does an operation on a key's account, which no other caller changes meanwhile. It begins with this call,
        whether its result is waited for or not. It may be done again on a newer account, whose result counts then; so
        it has no other effect, and what it raises it raises before it changes anything.
        """
        ...

    async def close(self) -> None:
        """Ends the counting, when no request is left."""


def outcome(operation: Callable[[Account], T], account: Account) -> "Callable[[asyncio.Future[T]], None]":
    """Does an operation; what is returned hands its result, or what it raised, to a caller that still waits for it."""
    try:
        value = operation(account)
    except Exception as raised:  # noqa: BLE001 - raised where it is waited for
        error = raised
        return lambda result: None if result.done() else result.set_exception(error)
    return lambda result: None if result.done() else result.set_result(value)


class LocalUsage(KeyUsage):
    """Accounts on one machine, which are changed at once, and need no start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @abstractmethod
    def account(self, name: str) -> AbstractContextManager[Account]:
        """Account of a key's name, which no other caller sees or changes while it is open. It must not be open long."""

    async def start(self) -> None:
        """Nothing is waited for."""

    def change(self, key: Key, operation: Callable[[Account], T]) -> "asyncio.Future[T]":
        """Result of an operation on a key's account, as KeyUsage says."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self.account(key.name) as account:
            account.now_s = self._clock()
            outcome(operation, account)(result)
        return result

    async def close(self) -> None:
        """Nothing is left to do."""


class OwnUsage(LocalUsage):
    """The accounts of a process that has the keys for itself."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._accounts: dict[str, Account] = {}

    @contextmanager
    def account(self, name: str) -> Iterator[Account]:
        yield self._accounts.setdefault(name, Account())


class SharedUsage(LocalUsage):
    """The accounts that the workers of a gateway have together.

    Where the folder cannot be read or written, as on a full disk, a worker goes on with what it knew last, and informs
    the others when it can: limits are then each worker's own for a while, which is better than no answers.
    """

    def __init__(self, folder: str, worker: int, clock: Clock = time.monotonic) -> None:
        """`worker` is this one's number; what one before it with that number had under way is over, for it has died."""
        super().__init__(clock)
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
        self._record = AccountRecord()

    def read_into(self, account: Account, worker: str, *, is_newer: bool) -> None:
        """Brings an account up to date; where it is newer than the file, what is used is the more of both."""
        written = os.pread(self._opened, MAX_FILE_BYTES, 0)
        self._length = len(written)
        self._record = record = AccountRecord.parse(written)
        account.other_samples, account.other_held_tokens = record.others(worker)
        if not is_newer or record.requests.used > account.requests.used:
            account.requests = record.requests
        if not is_newer or record.tokens.used > account.tokens.used:
            account.tokens = record.tokens

    def write(self, account: Account, worker: str) -> None:
        """Writes an account into the file."""
        record = self._record
        record.under_way.pop(worker, None)
        if account.samples:
            record.under_way[worker] = [account.samples, account.held_tokens]
        record.requests, record.tokens = account.requests, account.tokens
        data = record.text().encode().ljust(self._length)
        # In one write, so that a worker that is killed leaves all of it or nothing.
        if os.pwrite(self._opened, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
