"""Sessions that share a small pool in any order of steps: books that balance, and keys that are everyone's own."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from outrider.engine import cache
from outrider.engine.cache import BlockPool, BlockTable, KVCache, PrefixIndex
from outrider.engine.session import Session
from outrider.errors import CacheFull
from outrider.token_tree import TokenTree

SIZE, NUM_BLOCKS, MAX_SESSIONS = 2, 7, 4
SALTS = (b"", b"other", None)
NUMBERS = st.integers(0, 11)
# Two ids only, so that sessions meet.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
MACHINE_SETTINGS = settings(
    max_examples=150,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def key_of(token_ids: list[int]) -> int:
    """What stands for the keys of the last of these tokens: they depend on all of them."""
    return int("1" + "".join(map(str, token_ids)), 2)


class Sharing(RuleBasedStateMachine):
    """Every rule is what a service does between two forwards; a full pool refuses it without an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.cache = KVCache(1, NUM_BLOCKS * SIZE, 1, 1, torch.int64, torch.device("cpu"))
        self.sessions: list[Session] = []

    def pick(self, number: int) -> Session:
        return self.sessions[number % len(self.sessions)]

    @precondition(lambda self: len(self.sessions) < MAX_SESSIONS)
    @rule(token_ids=TOKENS, salt=st.sampled_from(SALTS))
    def open(self, token_ids: list[int], salt: bytes | None) -> None:
        session = Session(BlockTable(self.pool, self.cache), token_ids, 1, salt)
        assert session.take_prefix() == session.cached_len < len(session)
        self.sessions.append(session)

    @precondition(lambda self: self.sessions)
    @rule(number=NUMBERS, guesses=st.lists(st.integers(0, 1), max_size=3), kept=NUMBERS)
    def step(self, number: int, guesses: list[int], kept: int) -> None:
        """A forward over uncached tokens and a chain of guesses, of which some are kept."""
        session = self.pick(number)
        try:
            session.reserve(len(guesses))
        except CacheFull:
            return
        written = [*session.token_ids, *guesses]
        for place in range(session.next_position, len(written)):
            slot = session.table.slots(place, place + 1)
            for tensor in (*self.cache.keys, *self.cache.values):
                tensor[slot] = key_of(written[: place + 1])
        session.advance(len(session), TokenTree.chain(guesses))
        session.keep(tuple(range(1, kept % (len(guesses) + 1) + 1)))
        session.publish(len(session))

    @precondition(lambda self: self.sessions)
    @rule(number=NUMBERS, base=NUMBERS, token_ids=TOKENS)
    def replace_tail(self, number: int, base: int, token_ids: list[int]) -> None:
        session = self.pick(number)
        session.replace_tail(1 + base % len(session), token_ids)

    @precondition(lambda self: self.sessions)
    @rule(number=NUMBERS, length=NUMBERS)
    def truncate(self, number: int, length: int) -> None:
        session = self.pick(number)
        session.truncate(1 + length % len(session))

    @precondition(lambda self: self.sessions)
    @rule(number=NUMBERS, base=NUMBERS, token_ids=TOKENS)
    def reopen(self, number: int, base: int, token_ids: list[int]) -> None:
        session = self.pick(number)
        session.replace_tail(1 + base % len(session), token_ids)
        session.publish(len(session))
        session.take_prefix()
        assert session.cached_len <= len(session)

    @precondition(lambda self: 0 < len(self.sessions) < MAX_SESSIONS)
    @rule(number=NUMBERS, salt=st.sampled_from(SALTS))
    def fork(self, number: int, salt: bytes | None) -> None:
        session = self.pick(number)
        twin = Session(session.table.fork(session.cached_len), session.token_ids, 1, salt)
        twin.cached_len = session.cached_len
        self.sessions.append(twin)

    @precondition(lambda self: self.sessions)
    @rule(number=NUMBERS)
    def give_way(self, number: int) -> None:
        self.pick(number).free()

    @precondition(lambda self: self.sessions)
    @rule(number=NUMBERS)
    def close(self, number: int) -> None:
        session = self.pick(number)
        session.free()
        self.sessions.remove(session)

    @invariant()
    def books_balance(self) -> None:
        """Free and cached blocks are those that no table has, and a table's blocks are its holders."""
        self.pool.check_integrity()
        held = {block for session in self.sessions for block in session.table._blocks}
        assert self.pool.num_used == len(held)
        for session in self.sessions:
            shared = [self.pool.is_shared(block) for block in session.table._blocks]
            assert shared == sorted(shared, reverse=True)

    @invariant()
    def keys_are_their_own(self) -> None:
        """Whatever was shared, evicted or written by others, every cached position holds the session's own keys."""
        for session in self.sessions:
            keys, _ = self.cache.gather(session.table.slots(0, session.cached_len))
            expected = [key_of(session.token_ids[: place + 1]) for place in range(session.cached_len)]
            assert keys[0, :, 0, 0].tolist() == expected

    def teardown(self) -> None:
        for session in self.sessions:
            session.free()
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS


@pytest.mark.slow
def test_nobody_reads_what_is_not_theirs() -> None:
    """Publish, find, evict, fork, truncate and free, in any order, in a pool that is nearly always full."""
    run_state_machine_as_test(Sharing, settings=MACHINE_SETTINGS)


def serving_by_digest(self: PrefixIndex, salt: bytes, parent: int, token_ids: list[int]) -> int | None:
    """A look-up that believes the digest."""
    return self._blocks.get(self._prefix(salt, parent, token_ids).digest)


def evicting_without_withdrawing(self: PrefixIndex) -> int:
    """An eviction that leaves the name."""
    return self._unheld.popitem(last=False)[0]


def putting_by_first(self: PrefixIndex, block: int) -> None:
    """An order in which the block that was let go of last is the first to go."""
    self._unheld[block] = None
    self._unheld.move_to_end(block, last=False)


def publishing_uncached(self: Session, length: int) -> None:
    """A session that also publishes the places of its last block that no forward has computed."""
    if self.salt is not None:
        self.table.publish(self.salt, self.token_ids, min(length, self.table.capacity))


def short_digest(before: bytes, token_ids: list[int]) -> bytes:
    """A digest of two values, so that collisions are many."""
    return bytes([sum(before + bytes(token_ids)) % 2])


def digest_of_a_block(before: bytes, token_ids: list[int]) -> bytes:
    """A digest that forgets what stands before a block."""
    return bytes(token_ids)


FAULTS: dict[str, list[tuple[object, str, Callable[..., object]]]] = {
    "published blocks are written": [(PrefixIndex, "__contains__", lambda self, block: False)],
    "evicted blocks are still found": [(PrefixIndex, "evict", evicting_without_withdrawing)],
    "the newest goes first": [(PrefixIndex, "put_by", putting_by_first)],
    "a digest is believed": [(PrefixIndex, "find", serving_by_digest), (cache, "digest", short_digest)],
    "blocks have no chain": [(PrefixIndex, "find", serving_by_digest), (cache, "digest", digest_of_a_block)],
    "what is not computed is published": [(Session, "publish", publishing_uncached)],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is sharp enough for each of these."""
    for place, name, broken in FAULTS[fault]:
        monkeypatch.setattr(place, name, broken)
    with pytest.raises((AssertionError, RuntimeError, KeyError, ValueError)):
        run_state_machine_as_test(
            Sharing, settings=settings(MACHINE_SETTINGS, phases=[Phase.generate], print_blob=False)
        )


@pytest.mark.slow
def test_collisions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest of one bit fewer blocks are shared, and none wrongly."""
    monkeypatch.setattr(cache, "digest", short_digest)
    run_state_machine_as_test(Sharing, settings=MACHINE_SETTINGS)
