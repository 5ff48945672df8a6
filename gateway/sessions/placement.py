"""Where a session goes: to the service with which all that wait, wait least. `choose` is pure.

Each link has a book of what this gateway knows of its service; a service that was replaced has a new one. All terms of
the cost of a place are microseconds of somebody's waiting:

    p (B + U) + p min(O, (owners - 1) (B + U))      the prompt, after those that wait there already
    + E / tau (c - least c + (n + 1) d)             slower steps than elsewhere, and what its rows cost all n + 1
    + s k / (1 - k)                                 a cache that is nearly full

U are the tokens of the prompt that are not in the cache there, B and O those that wait there, of this gateway and of
others, who have equal shares; p is what a token of a prompt costs, c a step there, or the whole answer of a draft with
what it waits for, and d what the rows of one more session add to it. E tokens are expected, tau in a round. k is the
share of the cache that is in use. What is known of no place is left out, and what is known of some is believed of the
others.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from statistics import fmean, median_low
from typing import Self

from gateway.rounds.target_costs import TargetCosts
from outrider.estimates.prefixes import BLOCK_TOKENS, KnownPrefixes, PrefixNews, first_link, name_of, next_link
from outrider.estimates.row_costs import Average, RowCosts
from outrider.estimates.timing import ServiceLoad
from outrider.process.metrics import Tally

KEY_BLOCKS = 4  # prompts that have so many blocks in common meet, where places are as good as equal
SLICE_TOKENS = 8192  # their digests take a third of a millisecond, and then others have their turn
SAME_COST, SAME_US = 1.05, 1_000.0  # costs that differ by so much are equal
CLEARLY = 1.2  # times the cost elsewhere makes a session that runs leave its place
ALIKE = 1.5  # times the least: of two that differ by more one is another machine, or busy with something else
LEAST_ROW_US = 10.0  # of a row in a step: messages take the time of processes where rows are free
CACHE_US = 150_000.0  # s
JOINING_S = 10.0  # an empty service looks best to all gateways at once
USUAL_OUTPUT = 128.0  # tokens of an answer, before there was one
FULL_US = 1_000_000.0  # of prompts that are read before: who would wait for longer waits where any place can be had
LEAST_PROMPT = 16  # tokens that must have been read to say what one costs
MAX_SETTLED = 4096  # openings between two words of a service on its cache, which come several times a second
ERROR_TOKENS = (0.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0)  # bounds of what was expected to be cached and was not


class PlacedFor(StrEnum):
    """Why a session went where it went."""

    ONLY = "only"  # no other place was open to it
    HIT = "hit"  # more of its prompt is in the cache there than elsewhere
    LOAD = "load"
    TIE = "tie"  # several were as good as equal, and gateways choose alike among them
    LATE = "late"  # it was the first to have room, after all were full


class MovedFor(StrEnum):
    """Why a session that runs goes on elsewhere."""

    LOAD = "load"
    LEAVING = "leaving"  # its place is about to end, or the address has gone


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The beginning of a prompt, by which sessions that share it find each other."""

    key: bytes = b""
    """Names its first blocks; empty where nothing is known of it."""
    chain: tuple[bytes, ...] = ()
    """A digest of the salt, and one of each whole block with all before it."""
    names: tuple[int, ...] = ()
    """Names of the whole blocks, as services say them."""

    @property
    def blocks(self) -> tuple[bytes, ...]:
        return self.chain[1:]

    @classmethod
    async def of(cls, token_ids: Sequence[int], salt: bytes) -> Self:
        """Prefix of a prompt; prompts of different salts have nothing in common."""
        prefix = cls(b"", (first_link(salt),))
        for end in range(SLICE_TOKENS, len(token_ids), SLICE_TOKENS):
            prefix = prefix.grown(token_ids[:end])
            await asyncio.sleep(0)
        whole = prefix.grown(token_ids)
        blocks = whole.blocks[:KEY_BLOCKS]
        return replace(whole, key=blocks[-1] if blocks else next_link(whole.chain[0], token_ids))

    def grown(self, token_ids: Sequence[int]) -> Self:
        """Prefix of these tokens, which begin with those that it is of."""
        links = list(self.chain)
        for start in range(BLOCK_TOKENS * len(self.blocks), len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            links.append(next_link(links[-1], token_ids[start : start + BLOCK_TOKENS]))
        return replace(self, chain=tuple(links), names=self.names + tuple(map(name_of, links[len(self.chain) :])))


NO_PREFIX = PromptPrefix()


@dataclass(frozen=True, slots=True)
class PlaceWish:
    """What makes one place better than another for a session."""

    length: int = 0
    """Tokens that the service has to read."""
    output: float = USUAL_OUTPUT
    """Tokens that it is expected to make."""
    prefix: PromptPrefix = NO_PREFIX
    numerics_id: str = ""
    """Numerics of where it was before; under others it may go on with other tokens."""


NO_WISH = PlaceWish()


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What is known of one place now; None where nothing is."""

    address: str
    numerics_id: str = ""
    hit_len: int = 0
    """Tokens of the prompt that should be in its cache."""
    session_count: int = 0
    own_waiting_tokens: int = 0
    """Tokens of this gateway's prompts that wait to be read."""
    waiting_tokens: int = 0
    """Tokens of all prompts that wait there."""
    owner_count: int = 1
    """Gateways that have sessions there."""
    prompt_token_us: float | None = None
    step_us: float | None = None
    row_us: float | None = None
    """What a step costs more with one session more."""
    round_tokens: float = 1.0
    free_tokens: int | None = None
    """Tokens that its cache can take."""
    cache_share: float | None = None
    """Share of its cache that is in use."""
    is_joining: bool = False
    is_failing: bool = False
    """The service's device hung when a session was there last."""
    is_silent: bool = False
    """Nothing comes from the service at the moment; it may have stopped, or be cut off."""
    has_failed: bool = False
    """The service has just lost this session."""

    def heard(self, load: ServiceLoad, kv_tokens: int, block_size: int) -> Self:
        """Figures with what the service, whose cache has so many tokens, said of its load last."""
        # What this gateway has sent counts at once, and what others have sent as the service said it last.
        others = max(load.waiting_tokens - load.own_waiting_tokens, 0)
        # Without a session nothing is held any more, whatever was a second ago.
        free_tokens = load.free_blocks * block_size if self.session_count else kv_tokens
        return replace(
            self,
            waiting_tokens=self.own_waiting_tokens + others,
            owner_count=load.owner_count,
            prompt_token_us=load.prefill_us_per_token or self.prompt_token_us,
            free_tokens=free_tokens,
            cache_share=1 - min(free_tokens / max(kv_tokens, 1), 1.0),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice that was made, as it can be printed."""

    address: str
    reason: PlacedFor
    costs_us: tuple[tuple[str, float], ...] = ()
    """Costs of all places that were open, by address."""
    is_full: bool = False
    """Whether neither it has room, nor any that is as good in what is worse than that."""

    def __str__(self) -> str:
        costs = ", ".join(f"{address} {us / 1e3:.1f} ms" for address, us in self.costs_us)
        return f"{self.address} ({self.reason}{f': {costs}' if costs else ''})"


def choose(places: Sequence[LinkFigures], wish: PlaceWish) -> Placement | None:
    """The place of a session among those that are open; None for none. Gateways that know the same choose the same."""
    steady = [each.session_count for each in places if not each.is_joining]
    most = median_low(steady) + 1 if steady else math.inf

    def rank(each: LinkFigures) -> tuple[bool, ...]:
        # What is worse than any cost, the worst first.
        lacks_cache = each.free_tokens is not None and each.free_tokens < _needed_tokens(each, wish)
        has_others = wish.numerics_id not in {"", each.numerics_id}
        return each.has_failed, each.is_failing, has_others, each.is_silent, lacks_cache

    if not places:
        return None
    ranks = [(rank(each), each) for each in places]
    best = min(found for found, _ in ranks)
    alike = [each for found, each in ranks if found == best]
    open_ones = [each for each in alike if not (each.is_joining and each.session_count >= most)] or alike
    with_room, lacks_room = [each for each in open_ones if not is_full(each, wish)], False
    if not with_room:
        elsewhere = [each for each in alike if not is_full(each, wish)]
        open_ones, lacks_room = elsewhere or open_ones, not elsewhere
    elif any(not each.waiting_tokens for each in with_room):
        # It does not wait where it could be read at once elsewhere.
        open_ones = with_room
    if len(open_ones) == 1:
        return Placement(open_ones[0].address, PlacedFor.ONLY, is_full=lacks_room)
    costs = costs_us(open_ones, wish)
    least = min(costs)
    near = [
        each for each, cost in zip(open_ones, costs, strict=True) if cost <= max(SAME_COST * least, least + SAME_US)
    ]
    # The first one where nothing names the prompt.
    chosen = max(near, key=lambda each: _weight(wish.prefix.key, each.address)) if wish.prefix.key else near[0]
    reason = PlacedFor.TIE
    if len(near) == 1:
        has_most = chosen.hit_len == max(each.hit_len for each in open_ones) > min(each.hit_len for each in open_ones)
        reason = PlacedFor.HIT if has_most else PlacedFor.LOAD
    by_address = tuple(zip((each.address for each in open_ones), costs, strict=True))
    return Placement(chosen.address, reason, by_address, lacks_room)


def is_full(place: LinkFigures, wish: PlaceWish) -> bool:
    """Whether a session would wait there for cache, or long for other prompts; False where no load is said."""
    if place.free_tokens is None:
        return False
    own = place.own_waiting_tokens
    others = max(place.waiting_tokens - own, 0)
    waiting_us = (place.prompt_token_us or 0.0) * (own + min(others, (place.owner_count - 1) * own))
    # What waits has no room yet, and will take it.
    return place.free_tokens - place.waiting_tokens < _needed_tokens(place, wish) or waiting_us > FULL_US


def _needed_tokens(place: LinkFigures, wish: PlaceWish) -> float:
    """Tokens of cache that a session takes there."""
    return wish.length - place.hit_len + wish.output


def better(here: LinkFigures, others: Sequence[LinkFigures], wish: PlaceWish) -> Placement | None:
    """A place that is better by a clear margin for a session that is `here`, and has read everything; None for none.

    It is none of the sessions that the figures count here. What waits to be read here is read soon, so it is no reason
    to leave.
    """
    open_ones = [each for each in others if each.free_tokens is None or each.free_tokens >= wish.length + wish.output]
    found = choose(open_ones, wish)
    if found is None:
        return None
    [there] = [each for each in open_ones if each.address == found.address]
    stay = replace(here, hit_len=wish.length, own_waiting_tokens=0, waiting_tokens=0)
    stay_us, go_us = costs_us([stay, there], wish)
    return found if stay_us > CLEARLY * go_us + SAME_US else None


def costs_us(places: Sequence[LinkFigures], wish: PlaceWish) -> list[float]:
    """Cost of each place, in microseconds that somebody waits."""
    prompts_us, steps_us = _alike([each.prompt_token_us for each in places]), _alike([each.step_us for each in places])
    rows_us = [each.row_us for each in places if each.row_us is not None]
    # Those of all: of one alone they are mostly chance, and a place that once looked dear would not be seen again.
    row_us = max(fmean(rows_us or [0.0]), LEAST_ROW_US)
    rounds = wish.output / max(1.0, *(each.round_tokens for each in places))
    shares = _known([each.cache_share for each in places])
    costs = []
    for each, prompt_us, step_us, share in zip(places, prompts_us, steps_us, shares, strict=True):
        own = each.own_waiting_tokens + max(wish.length - each.hit_len, 0)
        others = max(each.waiting_tokens - each.own_waiting_tokens, 0)
        read_us = prompt_us * (own + min(others, (each.owner_count - 1) * own))
        decode_us = rounds * (step_us - min(steps_us) + (each.session_count + 1) * row_us)
        full = min(share, 0.99)
        costs.append(read_us + decode_us + CACHE_US * full / (1 - full))
    return costs


def _known(values: Sequence[float | None]) -> list[float]:
    """Figures of places; what is known of some is believed of the others."""
    known = [each for each in values if each is not None]
    mean = fmean(known or [0.0])
    return [mean if each is None else each for each in values]


def _alike(values: Sequence[float | None]) -> list[float]:
    """Figures of places, where all that are hardly above the least are like it: equal services differ by chance."""
    known = _known(values)
    least = min(known)
    return [each if each > ALIKE * least else least for each in known]


def _weight(key: bytes, address: str) -> bytes:
    """Rendezvous: of equal places the one with the highest weight, so that one more or less moves only its own keys."""
    return hashlib.blake2b(key + address.encode(), digest_size=8).digest()


@dataclass(slots=True)
class OpenPlace:
    """A session in a link's book."""

    waiting: int
    """Tokens that the service has not read yet, as far as an answer has shown."""
    number: int
    prefix: PromptPrefix
    touched: tuple[int, ...]
    """By which opening each block of its prompt was there last, as far as it was expected to be cached."""
    oldest_waiting: float
    hit_len: int
    """Tokens that were expected to be cached."""


@dataclass(slots=True)
class PrefixHits:
    """How well it was known what is cached: whole blocks of prompts, in tokens."""

    expected: int = 0
    found: int = 0
    errors: Tally = field(default_factory=partial(Tally, ERROR_TOKENS))

    def add(self, expected: int, prefix_len: int) -> None:
        """Counts a prompt of which so many tokens were expected to be cached, and so many were."""
        found = prefix_len // BLOCK_TOKENS * BLOCK_TOKENS
        self.expected += expected
        self.found += found
        self.errors.add(abs(expected - found))


class LinkBook:
    """What this gateway knows of one incarnation of a service, beside what it says in frames."""

    def __init__(self, joined_s: float, cache_tokens: int = 0, block_size: int = 1) -> None:
        """`cache_tokens` is how many tokens the service's cache holds, in blocks of `block_size`."""
        self.joined_s = joined_s
        self._most_blocks = cache_tokens // BLOCK_TOKENS
        self.costs: TargetCosts | None = None
        """What its policy has learnt."""
        self.answer_us = RowCosts()
        """What an answer of a draft takes there, by how many sessions it has."""
        self.prompt_token_us = Average()
        self._sessions: dict[bytes, OpenPlace] = {}
        self.leaving: set[bytes] = set()
        """Sessions that go on elsewhere as soon as they are read there, where they count already."""
        self.pushed = KnownPrefixes(cache_tokens // max(1, min(block_size, BLOCK_TOKENS)))
        """What the service says is in its cache."""
        self._sent: OrderedDict[int, int] = OrderedDict()
        """Names of prompts that were sent, by the opening that had them last; the oldest comes first. Where the service
        says what it has, only of those that it may not have said yet."""
        self._settled: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=MAX_SETTLED)
        """Openings and names that the service has done with since it last said what it has."""
        self.num_opened = 0  # sessions, since the service was there first

    @property
    def session_count(self) -> int:
        """Sessions of this gateway that are there to stay."""
        return len(self._sessions) - len(self.leaving)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of this gateway's prompts that wait to be read."""
        return sum([each.waiting for each in self._sessions.values()])

    def hit_len(self, prefix: PromptPrefix) -> int:
        """Tokens of a prompt that should be in the service's cache."""
        names, pushed, sent = prefix.names, self.pushed.names, self._sent
        missing = (at for at, each in enumerate(names) if each not in pushed and each not in sent)
        return BLOCK_TOKENS * next(missing, len(names))

    def hear(self, news: PrefixNews) -> None:
        """Takes what the service says of its cache; raises InvalidRequest about what cannot be."""
        was_known = self.pushed.is_known
        if not self.pushed.hear(news):
            return
        if was_known:
            gone = ((number, name) for number, names in self._settled for name in names)
        else:
            waiting = {each.number for each in self._sessions.values() if each.waiting}
            gone = ((number, name) for name, number in [*self._sent.items()] if number not in waiting)
        # What later ones have sent again is still to come.
        for number, name in gone:
            if self._sent.get(name) == number:
                del self._sent[name]
        self._settled.clear()

    def opened(self, session_id: bytes, length: int, prefix: PromptPrefix) -> None:
        """A session with so many tokens was sent; its blocks are cached from now on, in place of the oldest."""
        # A service always reads the last token.
        hit_len = min(self.hit_len(prefix), (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        touched = tuple(self._sent.get(each, 0) for each in prefix.names[: hit_len // BLOCK_TOKENS])
        oldest = min((each.number for each in self._sessions.values() if each.waiting), default=math.inf)
        self.num_opened += 1
        waiting = max(length - hit_len, 1)
        self._sessions[session_id] = OpenPlace(waiting, self.num_opened, prefix, touched, oldest, hit_len)
        self._keep(prefix)

    def answered(self, session_id: bytes, length: int, prefix_len: int, compute_us: int) -> int | None:
        """A session's first answer came: so much was in the cache, and the rest took so many microseconds.

        Returns how much was expected to be there; None where nothing could be, and for any later answer.
        """
        place = self._sessions.get(session_id)
        if place is None or not place.waiting:
            return None
        place.waiting = 0
        self._settle(place.number, place.prefix)
        if length - prefix_len >= LEAST_PROMPT and compute_us > 0:
            self.prompt_token_us.add(compute_us / (length - prefix_len))
        missed = prefix_len // BLOCK_TOKENS
        if missed < len(place.touched) and place.touched[missed] < place.oldest_waiting:
            # What was there before that block is gone too; one that was not read yet could not be there.
            while self._sent and next(iter(self._sent.values())) <= place.touched[missed]:
                self._sent.popitem(last=False)
        return place.hit_len if place.prefix.names else None

    def closed(self, session_id: bytes, token_ids: Sequence[int] = ()) -> None:
        """It ended; what it said stays in the cache for the next turn, where the tokens of all of it are given."""
        place = self._sessions.pop(session_id, None)
        self.leaving.discard(session_id)
        if place is None:
            return
        if place.waiting:
            self._settle(place.number, place.prefix)
        elif place.prefix.chain and token_ids:
            whole = place.prefix.grown(token_ids)
            self._keep(whole)
            self._settle(self.num_opened, whole)

    def figures(self, address: str, wish: PlaceWish, now_s: float, others: int = 0) -> LinkFigures:
        """What is known for a session now, while so many sessions are there beside those of this gateway."""
        num_sessions, step_us, row_us = max(self.session_count + others, 0), None, None
        waiting_tokens = self.waiting_tokens
        costs = self.costs if self.costs is not None and self.costs.verify_us.known else None
        if self.answer_us.known:
            step_us, most = self.answer_us.at(num_sessions + 1), max(num_sessions, 1)
            row_us = max(self.answer_us.at(most + 1) - self.answer_us.at(most), 0.0)
        elif costs is not None:
            session_rows = max(costs.rows.mean / costs.load, 1.0)
            step_us = costs.verify_us.at((num_sessions + 1) * session_rows)
            row_us = max(step_us - costs.verify_us.at(max(num_sessions * session_rows, 1.0)), 0.0)
        return LinkFigures(
            address,
            hit_len=self.hit_len(wish.prefix),
            session_count=num_sessions,
            own_waiting_tokens=waiting_tokens,
            waiting_tokens=waiting_tokens,
            prompt_token_us=self.prompt_token_us.mean or None,
            step_us=step_us,
            row_us=row_us,
            # The mean is 0 while no round has been seen.
            round_tokens=1.0 if costs is None else max(costs.tokens.mean, 1.0),
            is_joining=now_s - self.joined_s < JOINING_S,
        )

    def _keep(self, prefix: PromptPrefix) -> None:
        # The last block first: without the first one no other is of use.
        for each in reversed(prefix.names):
            self._sent[each] = self.num_opened
            self._sent.move_to_end(each)
        while len(self._sent) > self._most_blocks:
            self._sent.popitem(last=False)

    def _settle(self, number: int, prefix: PromptPrefix) -> None:
        """What the service says next of its cache has seen the end of this opening."""
        if self.pushed.is_known:
            self._settled.append((number, prefix.names))
