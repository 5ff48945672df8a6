"""Accounts of the keys' limits that any number of gateways have together, in a store that speaks Redis' protocol.

A key's record is changed as a whole: a gateway makes a new one of what it saw last and sends both, and the store takes
the new one if no other was faster, else it answers with what there is. All changes that came meanwhile go in one trip,
one trip at a time. Time is the store's, which all gateways share. Needs the extra `redis`, so it is imported by name.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.keys.account import Account, AccountRecord
from gateway.keys.table import Key
from gateway.keys.usage import outcome
from outrider.errors import NotReady, OutriderError

# Of a trip to the store, and of a connection to it.
TIMEOUT_S = 1.0
# How long what a gateway has under way counts after it was heard of, and how often it is heard of.
HOLD_S, BEAT_S = 15.0, 1.0
# How often a store that is away is asked, and how long a gateway that starts waits for it.
PROBE_S, START_S = 1.0, 10.0
# Gateways' ideas of the store's time differ by less; by more, its clock was put back.
MAX_SKEW_S = 10.0
# Of keys without a request: far more than the minute in which all has come back.
KEPT_S = 3600
PREFIX, GATEWAYS = "outrider:limits:", "outrider:gateways"

# A record is taken where the one before it is there still; all answers are what there is then, and the time.
CHANGE = """
local found, time = redis.call('GET', KEYS[1]) or '', redis.call('TIME')
if found == ARGV[1] then
    found = ARGV[2]
    redis.call('SET', KEYS[1], found, 'EX', ARGV[3])
end
return {found, time[1], time[2]}
"""
# Number of gateways that were heard of lately, this one too.
BEAT = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + ARGV[2], '+inf')
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {redis.call('ZCARD', KEYS[1]), time[1], time[2]}
"""

log = structlog.get_logger()

T = TypeVar("T")
Change = tuple[Callable[[Account], Any], "asyncio.Future[Any]"]


class KeyStoreRefused(OutriderError):
    """The operator must mend the address of the store, or what it lets this gateway do."""

    status = "FAILED_PRECONDITION"
    reason = "KEY_STORE_REFUSED"
    exit_code = 78


@dataclass(slots=True)
class Alone:
    """What was used since the store is away: an account of a part of the limits, which began with a part of what had
    been used before.
    """

    account: Account
    before: AccountRecord

    def add_to(self, account: Account, key: Key) -> None:
        """Adds what was used alone to an account; what is left of before is in both."""
        for limit, own, known, bucket in (
            (key.limits.requests_per_minute, self.account.requests, self.before.requests, account.requests),
            (key.limits.tokens_per_minute, self.account.tokens, self.before.tokens, account.tokens),
        ):
            if limit is not None:
                known.left(limit, account.now_s)
                bucket.left(limit, account.now_s)
                own.left(self.account.part(limit), account.now_s)
                bucket.used += max(0.0, own.used - known.used / self.account.share)


@dataclass(slots=True)
class CountedKey:
    """A key, as this gateway knows it."""

    key: Key
    seen: str = ""
    """What the store has, as far as is known; empty for nothing."""
    newest: str = ""
    """The newest record that is known: a store that has lost it gets it back."""
    told_s: float = 0.0
    """When the store took a record of this gateway last, by its own clock."""
    samples: int = 0
    held_tokens: int = 0
    """What this gateway has under way, whatever the store says."""
    alone: Alone | None = None
    waiting: list[Change] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """Whether there is nothing to count."""
        limits = self.key.limits
        return limits.concurrent_samples is limits.requests_per_minute is limits.tokens_per_minute is None

    def is_due(self, now_s: float) -> bool:
        """Whether the store must hear of it: what is under way, before that counts no more, and what was used alone."""
        must = self.alone is not None or (self.samples > 0 and now_s - self.told_s > HOLD_S / 4)
        return must and not self.is_free

    def learn(self, found: str) -> None:
        """Takes what the store has for the newest record, as far as it is not from before a loss."""
        if found:
            record = AccountRecord.parse(found)
            record.keep(AccountRecord.parse(self.newest))
            self.newest = record.text()

    def record(self, now_s: float) -> AccountRecord:
        """The newest record at a time, without what gateways held that were not heard of."""
        record = AccountRecord.parse(self.newest)
        for bucket in (record.requests, record.tokens):
            if bucket.at_s > now_s + MAX_SKEW_S:
                bucket.at_s = now_s
        record.under_way = {name: each for name, each in record.under_way.items() if each[2:] > [now_s]}
        return record


@dataclass(slots=True)
class Attempt:
    """A new record of a key, on its way, and what the changes that made it have brought."""

    entry: CountedKey
    account: Account
    text: str
    before: tuple[int, int]
    """What the gateway had under way."""
    outcomes: list[Callable[["asyncio.Future[Any]"], None]]

    def accept(self, now_s: float) -> None:
        """The store has taken it."""
        entry = self.entry
        entry.newest, entry.alone, entry.told_s = self.text, None, now_s
        entry.samples += self.account.samples - self.before[0]
        entry.held_tokens += self.account.held_tokens - self.before[1]
        for (_, result), tell in zip(entry.waiting, self.outcomes, strict=False):
            tell(result)
        del entry.waiting[: len(self.outcomes)]


class RedisUsage:
    """The accounts that all gateways with the same store have together.

    While the store is away, each gateway has its part of every limit, by the number of those that were there last, and
    reports to the store when it is back. Until then it is asked in the background, so no request waits for it.
    """

    def __init__(self, url: str, shown: str) -> None:
        """`url` is one that --key-store takes, `shown` the same without its password."""
        self._shown = shown
        # A connection that was cut while it was idle is made again, once.
        self._redis = Redis.from_url(
            url,
            decode_responses=True,
            encoding_errors="surrogateescape",
            protocol=2,
            retry=Retry(NoBackoff(), 1, (exceptions.ConnectionError,)),
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
        )
        self._process, self._number = secrets.token_hex(8), 0
        self._entries: dict[str, CountedKey] = {}
        self._asked = asyncio.Event()
        self._gateways = 1
        # What the store's clock is ahead of this machine's.
        self._ahead_s = 0.0
        self._next_beat_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.is_away: bool | None = False

    async def start(self) -> None:
        """Returns when the store has answered. Raises NotReady, and KeyStoreRefused about a user or a password."""
        until_s = time.monotonic() + START_S
        while True:
            try:
                await self._trip(frozenset())
                break
            except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
                message = f"key_store is {self._shown!r}, which refuses this gateway: {error}"
                raise KeyStoreRefused(message, field="key_store", value=self._shown) from None
            except (exceptions.RedisError, OSError) as error:
                if time.monotonic() >= until_s:
                    message = f"key_store is {self._shown!r}, which did not answer within {START_S:g} seconds: {error}"
                    raise NotReady(message, field="key_store", value=self._shown) from None
            await asyncio.sleep(PROBE_S)
        log.info("limits of keys are counted together", store=self._shown, gateways=self._gateways)
        self._task = asyncio.create_task(self._run(), name="key store")

    def change(self, key: Key, operation: Callable[[Account], T]) -> "asyncio.Future[T]":
        """Result of an operation on a key's account, as KeyUsage says."""
        entry = self._entries.setdefault(key.name, CountedKey(key))
        entry.key = key
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self.is_away or entry.is_free:
            self._do_alone(entry, [(operation, result)])
        else:
            entry.waiting.append((operation, result))
            self._asked.set()
        return result

    async def close(self) -> None:
        """Reports to the store what is over, and leaves it."""
        if self._task is not None:
            # Not cancelled: it would leave a trip half way, and what the store has taken would be unknown.
            self._is_closing = True
            self._asked.set()
            await asyncio.wait({self._task})
        with suppress(exceptions.RedisError, OSError):
            again = await self._trip(frozenset())
            while again:
                again = await self._trip(again)
            await self._redis.zrem(GATEWAYS, self._process)
        await self._redis.aclose()

    async def _run(self) -> None:
        again: Set[str] = frozenset()
        while not self._is_closing:
            if not again:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_S if self.is_away else self._next_beat_s - time.monotonic()):
                        await self._asked.wait()
            self._asked.clear()
            try:
                again = await self._trip(again)
            except Exception as error:  # noqa: BLE001 - whatever it is, requests go on without the store
                self._lose(f"{type(error).__name__}: {error}")
                again = frozenset()
            else:
                if self.is_away:
                    self.is_away, self._next_beat_s = False, 0.0
                    log.warning("limits of keys are counted together again", store=self._shown)

    def _lose(self, reason: str) -> None:
        self._next_beat_s = 0.0
        if not self.is_away:
            self.is_away = True
            what = "limits of keys are counted by each gateway alone, which has its part of them"
            log.error(what, store=self._shown, reason=reason, gateways=self._gateways)
            for entry in self._entries.values():
                waiting, entry.waiting = entry.waiting, []
                self._do_alone(entry, waiting)

    def _do_alone(self, entry: CountedKey, changes: Sequence[Change]) -> None:
        """Does changes of a key without the store."""
        now_s = time.monotonic() + self._ahead_s
        account = Account()
        if self.is_away and not entry.is_free:
            if entry.alone is None:
                own, share = entry.record(now_s), self._gateways
                for bucket in (own.requests, own.tokens):
                    bucket.used /= share
                entry.alone = Alone(Account(own.requests, own.tokens, share=share), entry.record(now_s))
            account = entry.alone.account
        account.samples, account.held_tokens, account.now_s = entry.samples, entry.held_tokens, now_s
        for operation, result in changes:
            outcome(operation, account)(result)
        entry.samples, entry.held_tokens = account.samples, account.held_tokens

    async def _trip(self, again: Set[str]) -> Set[str]:
        """Sends the changes that wait, those of keys that others changed first once more, and where it is time all that
        is under way; returns the keys that others changed first. To a store that is away nothing but a sign of life.
        """
        sent_s = time.monotonic()
        is_due = sent_s >= self._next_beat_s
        attempts = [
            self._attempt(entry, sent_s + self._ahead_s)
            for name, entry in self._entries.items()
            if entry.waiting or name in again or (is_due and entry.is_due(sent_s))
            if not self.is_away
        ]
        pipe = self._redis.pipeline(transaction=False)
        if is_due:
            pipe.eval(BEAT, 1, GATEWAYS, self._process, HOLD_S, KEPT_S)
        for each in attempts:
            pipe.eval(CHANGE, 1, PREFIX + each.entry.key.name, each.entry.seen, each.text, KEPT_S)
        answers = await pipe.execute()
        now_s = time.monotonic()
        if answers:
            _, seconds, micros = answers[-1]
            self._ahead_s = int(seconds) + int(micros) / 1e6 - (sent_s + now_s) / 2
        if is_due:
            self._gateways, self._next_beat_s = int(answers[0][0]), now_s + BEAT_S
        first = set()
        for attempt, (found, *_) in zip(attempts, answers[is_due:], strict=True):
            attempt.entry.seen = found
            if found == attempt.text:
                attempt.accept(now_s)
            else:
                first.add(attempt.entry.key.name)
                attempt.entry.learn(found)
        return first

    def _attempt(self, entry: CountedKey, now_s: float) -> Attempt:
        record = entry.record(now_s)
        before = entry.samples, entry.held_tokens
        account = Account(record.requests, record.tokens, *before, *record.others(self._process))
        account.now_s = max(now_s, account.requests.at_s, account.tokens.at_s)
        if entry.alone is not None:
            entry.alone.add_to(account, entry.key)
        outcomes = [outcome(operation, account) for operation, _ in entry.waiting]
        record.under_way.pop(self._process, None)
        if account.samples:
            record.under_way[self._process] = [account.samples, account.held_tokens, account.now_s + HOLD_S]
        self._number += 1
        # A name of its own, so that no two records are equal.
        text = record.text(by=f"{self._process}:{self._number}")
        return Attempt(entry, account, text, before, outcomes)
