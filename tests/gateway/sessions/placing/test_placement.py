"""Where a session goes, by what is known of places; what a link's book remembers; and prompts' prefixes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rounds.target_costs import TargetCosts
from gateway.rounds.tuning import TUNING
from gateway.sessions import placement
from gateway.sessions.placement import (
    JOINING_S,
    MAX_SETTLED,
    NO_PREFIX,
    LinkBook,
    LinkFigures,
    PlacedFor,
    PlaceWish,
    PrefixHits,
    PromptPrefix,
    choose,
)
from outrider.errors import InvalidRequest
from outrider.estimates.prefixes import BLOCK_TOKENS, PrefixNews

A, B, C = (LinkFigures(name, prompt_token_us=25.0, step_us=8_000.0, row_us=20.0) for name in "abc")
KEYED = PromptPrefix(b"key")
WISH = PlaceWish(length=4_096, output=100.0, prefix=KEYED)

figures = st.builds(
    LinkFigures,
    address=st.sampled_from([f"10.0.0.{number}:50052" for number in range(6)]),
    numerics_id=st.sampled_from(["one", "two"]),
    hit_len=st.integers(0, 4_096),
    session_count=st.integers(0, 300),
    own_waiting_tokens=st.integers(0, 50_000),
    waiting_tokens=st.integers(0, 90_000),
    owner_count=st.integers(1, 8),
    prompt_token_us=st.none() | st.floats(0.1, 1e5),
    step_us=st.none() | st.floats(1, 1e6),
    row_us=st.none() | st.floats(0, 1e5),
    round_tokens=st.floats(0, 9),
    free_tokens=st.none() | st.integers(0, 10_000),
    cache_share=st.none() | st.floats(0, 1),
    is_joining=st.booleans(),
    is_failing=st.booleans(),
    is_silent=st.booleans(),
    has_failed=st.booleans(),
)
several = st.lists(figures, max_size=6, unique_by=lambda each: each.address)
wishes = st.builds(
    PlaceWish,
    length=st.integers(0, 8_192),
    output=st.floats(0, 4_096),
    prefix=st.builds(PromptPrefix, key=st.binary(max_size=4)),
    numerics_id=st.sampled_from(["", "one"]),
)


@pytest.mark.parametrize(
    ("places", "address", "reason"),
    [
        ([A], "a", PlacedFor.ONLY),
        ([A, replace(B, hit_len=4_096)], "b", PlacedFor.HIT),
        ([replace(A, own_waiting_tokens=500, waiting_tokens=500), B], "b", PlacedFor.LOAD),
        ([replace(A, waiting_tokens=9_000, owner_count=2), B], "b", PlacedFor.LOAD),
        ([replace(A, session_count=90), B], "b", PlacedFor.LOAD),
        ([replace(A, step_us=80_000.0), B], "b", PlacedFor.LOAD),
        # Equal machines differ by chance, and by the guesses that each has at the moment.
        ([replace(A, step_us=11_000.0, prompt_token_us=35.0), replace(B, session_count=60)], "a", PlacedFor.LOAD),
        ([A, replace(B, round_tokens=4.0, session_count=60)], "a", PlacedFor.LOAD),
        ([replace(A, cache_share=0.9), replace(B, cache_share=0.1)], "b", PlacedFor.LOAD),
        ([replace(A, free_tokens=100), replace(B, session_count=200)], "b", PlacedFor.ONLY),
        ([replace(A, free_tokens=100), replace(B, free_tokens=90, session_count=200)], "a", PlacedFor.LOAD),
        ([replace(A, has_failed=True), replace(B, is_failing=True)], "b", PlacedFor.ONLY),
        ([replace(A, is_failing=True), replace(B, session_count=200)], "b", PlacedFor.ONLY),
        ([replace(A, is_silent=True), replace(B, session_count=200, free_tokens=100)], "b", PlacedFor.ONLY),
        ([replace(A, is_silent=True), replace(B, is_failing=True)], "a", PlacedFor.ONLY),
        ([replace(A, is_silent=True), replace(B, is_silent=True, session_count=90)], "a", PlacedFor.LOAD),
        # Which has been there for long may have more.
        ([replace(A, is_joining=True, session_count=6), replace(B, session_count=5)], "b", PlacedFor.ONLY),
        ([replace(A, is_joining=True, session_count=5), replace(B, session_count=90)], "a", PlacedFor.LOAD),
        # All of a gateway that has just begun are new to it.
        ([replace(A, is_joining=True), replace(B, is_joining=True, session_count=90)], "a", PlacedFor.LOAD),
    ],
)
def test_the_place_with_the_least_waiting_is_chosen(places: list[LinkFigures], address: str, reason: PlacedFor) -> None:
    """What may not be chosen is worse than any cost."""
    chosen = choose(places, WISH)
    assert chosen is not None
    assert (chosen.address, chosen.reason) == (address, reason)
    # In whichever order they are listed.
    assert choose(places[::-1], WISH) == replace(chosen, costs_us=chosen.costs_us[::-1])


def test_equal_places_share_prompts_and_gateways_agree() -> None:
    """A key has one place whatever the order, many keys have all, and one place more takes only its own share."""
    keys = [PlaceWish(prefix=PromptPrefix(bytes([number]))) for number in range(200)]
    by_two = [choose([A, B], each) for each in keys]
    by_three = [choose([C, B, A], each) for each in keys]
    pairs = [(two.address, three.address) for two, three in zip(by_two, by_three, strict=True) if two and three]
    assert len(pairs) == 200
    assert 60 < sum(two == "a" for two, _ in pairs) < 140
    assert all(three in {two, "c"} for two, three in pairs)
    assert {each.reason for each in by_two if each} == {PlacedFor.TIE}


def test_a_choice_can_be_printed() -> None:
    """With the cost of each place."""
    assert str(choose([replace(A, hit_len=4_096), B], WISH)) == "a (hit: a 2.0 ms, b 104.4 ms)"


@given(several, wishes)
def test_no_place_is_chosen_that_may_not_be(places: list[LinkFigures], wish: PlaceWish) -> None:
    """Those that failed only for want of a better one; the same is chosen again, in any order."""
    chosen = choose(places, wish)
    if not places:
        assert chosen is None
        return
    assert chosen is not None
    place = next(each for each in places if each.address == chosen.address)
    assert place.has_failed <= all(each.has_failed for each in places)
    well = [each for each in places if each.has_failed == place.has_failed]
    assert place.is_failing <= all(each.is_failing for each in well)
    if not place.has_failed and not place.is_failing and wish.numerics_id:
        able = [each for each in well if not each.is_failing]
        assert place.numerics_id == wish.numerics_id or all(each.numerics_id != wish.numerics_id for each in able)
        # Silence is no reason for other tokens.
        same = [each for each in able if each.numerics_id == place.numerics_id]
        assert place.is_silent <= all(each.is_silent for each in same)
    assert choose(places, wish) == chosen
    if wish.prefix.key:
        backwards = choose(places[::-1], wish)
        assert backwards is not None
        assert backwards.address == chosen.address


def check_busier_loses() -> None:
    """Fails where a place with more sessions, and the same of the prompt in its cache, is chosen."""

    @given(st.integers(0, 4_096), st.integers(0, 100), st.integers(30, 200), wishes)
    def check(hit_len: int, count: int, more: int, wish: PlaceWish) -> None:
        wish = replace(wish, output=200.0, length=4_096, numerics_id="")
        busy = replace(A, hit_len=hit_len, session_count=2 * count + more)
        chosen = choose([busy, replace(B, hit_len=hit_len, session_count=count)], wish)
        assert chosen is not None
        assert chosen.address == "b"

    check()


def check_hit_loses_to_backlog() -> None:
    """Fails where a prompt waits longer for what is cached than it would take to read it elsewhere."""

    @given(st.integers(512, 4_096), st.integers(0, 40_000), st.binary(min_size=1, max_size=4))
    def check(hit_len: int, backlog: int, key: bytes) -> None:
        hit = replace(A, hit_len=hit_len, own_waiting_tokens=backlog, waiting_tokens=backlog)
        chosen = choose([hit, B], PlaceWish(4_096, 100.0, PromptPrefix(key)))
        assert chosen is not None
        # Within a twentieth of the cost of all of it both are right.
        if backlog < hit_len - 210:
            assert chosen.address == "a"
        elif backlog > hit_len + 210:
            assert chosen.address == "b"

    check()


@pytest.mark.parametrize("check", [check_busier_loses, check_hit_loses_to_backlog])
def test_load_and_hits_are_weighed_in_time(check: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a choice that only looks for hits, as others make it, would be found."""
    assert callable(check)
    check()
    monkeypatch.setattr(placement, "costs_us", lambda places, _: [float(-each.hit_len) * 1e6 for each in places])
    with pytest.raises(AssertionError):
        check()


def prompt(*parts: int) -> list[int]:
    """Whole blocks of one token each."""
    return [token for token in parts for _ in range(BLOCK_TOKENS)]


async def test_prefixes_are_known_by_their_tokens_and_salts() -> None:
    """Equal beginnings have equal digests, and those of another salt or after another block have none in common."""
    one, two = await PromptPrefix.of(prompt(1, 2, 3), b"salt"), await PromptPrefix.of([*prompt(1, 2, 9), 5], b"salt")
    assert one.blocks[:2] == two.blocks[:2]
    assert one.blocks[2] != two.blocks[2]
    assert not {*one.chain} & {*(await PromptPrefix.of(prompt(1, 2, 3), b"other")).chain}
    assert not {*one.blocks} & {*(await PromptPrefix.of(prompt(9, 2, 3), b"salt")).blocks}
    short = await PromptPrefix.of([1, 2], b"salt")
    assert short.key not in {b"", (await PromptPrefix.of([1, 3], b"salt")).key}
    # However long it is, it is made in slices.
    long = prompt(*range(300))
    assert (await PromptPrefix.of(long, b"")).blocks == (await PromptPrefix.of([], b"")).grown(long).blocks


async def test_a_book_knows_what_was_sent_and_said() -> None:
    """A prompt is expected to be cached once it was sent, and the next turn with the answer too."""
    book, prefix = LinkBook(0.0, 4_096), await PromptPrefix.of(prompt(1, 2), b"")
    assert book.hit_len(prefix) == 0
    book.opened(b"first", 128, prefix)
    assert (book.session_count, book.waiting_tokens, book.hit_len(prefix)) == (1, 128, 128)
    book.answered(b"first", 128, 0, 12_800)
    assert (book.session_count, book.waiting_tokens, book.prompt_token_us.mean) == (1, 0, 100.0)
    said = [*prompt(1, 2, 3), 4]
    book.closed(b"first", said)
    assert book.session_count == 0
    assert book.hit_len(await PromptPrefix.of([*said, *prompt(5)], b"")) == 3 * BLOCK_TOKENS


async def test_a_book_forgets_what_a_target_has_forgotten() -> None:
    """What a verdict does not find, and all that was there before it, is gone; no book holds more than the cache."""
    book = LinkBook(0.0, 256)
    prefixes = [await PromptPrefix.of(prompt(number, number), b"") for number in range(4)]
    for number, prefix in enumerate(prefixes[:3]):
        book.opened(bytes([number]), 128, prefix)
        book.answered(bytes([number]), 128, 0, 0)
    # Of four blocks that it holds two are of each of the last ones.
    assert [book.hit_len(each) for each in prefixes] == [0, 128, 128, 0]
    book.opened(b"again", 128, prefixes[2])
    book.answered(b"again", 128, 0, 0)
    assert [book.hit_len(each) for each in prefixes] == [0, 0, 128, 0]
    book.opened(b"third", 128, prefixes[3])
    book.opened(b"fourth", 128, prefixes[0])
    assert [book.hit_len(each) for each in prefixes] == [128, 0, 0, 128]


async def test_a_prompt_that_was_not_read_yet_is_no_sign_of_forgetting() -> None:
    """Siblings that are sent together do not find each other's blocks, and nothing is forgotten for that."""
    book, prefix, other = (
        LinkBook(0.0, 4_096),
        await PromptPrefix.of(prompt(1), b""),
        await PromptPrefix.of(prompt(2), b""),
    )
    book.opened(b"other", 64, other)
    book.answered(b"other", 64, 0, 0)
    book.opened(b"one", 64, prefix)
    book.opened(b"two", 64, prefix)
    book.answered(b"one", 64, 0, 0)
    book.answered(b"two", 64, 0, 0)
    assert book.hit_len(other) == 64


async def test_what_a_target_says_of_its_cache_counts_instead_of_what_was_sent() -> None:
    """Prompts of others too; and what it has dropped is not expected, however lately it was sent."""
    book = LinkBook(0.0, 4_096, 16)
    own, others = await PromptPrefix.of(prompt(1, 2), b""), await PromptPrefix.of(prompt(3, 4, 5), b"")
    book.opened(b"own", 129, own)
    book.answered(b"own", 129, 0, 0)
    assert (book.hit_len(own), book.hit_len(others)) == (128, 0)
    book.hear(PrefixNews(0, others.names, has_more=True))
    assert (book.hit_len(own), book.hit_len(others)) == (128, 0)
    book.hear(PrefixNews(1, own.names[:1]))
    assert (book.hit_len(own), book.hit_len(others)) == (64, 192)
    book.hear(PrefixNews(2, own.names[1:], others.names[2:]))
    assert (book.hit_len(own), book.hit_len(others)) == (128, 128)
    with pytest.raises(InvalidRequest):
        book.hear(PrefixNews(7))
    # As if it had never said anything.
    assert (book.hit_len(own), book.hit_len(others)) == (0, 0)
    book.opened(b"again", 129, own)
    assert book.hit_len(own) == 128


async def test_what_was_sent_is_expected_until_the_target_has_said_what_became_of_it() -> None:
    """A prompt that waits, so that its siblings follow it; after its answer, and after its end, until the next word."""
    book = LinkBook(0.0, 4_096, 16)
    one, two = await PromptPrefix.of(prompt(1, 2), b""), await PromptPrefix.of(prompt(3), b"")
    book.opened(b"before", 129, one)
    book.hear(PrefixNews(0))
    assert book.hit_len(one) == 128
    book.opened(b"two", 65, two)
    book.answered(b"two", 65, 0, 0)
    assert book.hit_len(two) == 64
    book.opened(b"two again", 65, two)
    book.hear(PrefixNews(1))
    # The target has not kept it, but it will read it once more.
    assert (book.hit_len(one), book.hit_len(two)) == (128, 64)
    book.answered(b"two again", 65, 0, 0)
    book.closed(b"before")
    book.hear(PrefixNews(2))
    assert (book.hit_len(one), book.hit_len(two)) == (0, 0)
    whole = await PromptPrefix.of(prompt(3, 4), b"")
    book.closed(b"two again", prompt(3, 4))
    assert book.hit_len(whole) == 128
    book.hear(PrefixNews(3, whole.names[:1]))
    assert book.hit_len(whole) == 64


async def test_a_target_that_never_ends_what_it_says_does_not_fill_the_book() -> None:
    """Openings are forgotten, the oldest first; what they had sent counts for as long as there is room for it."""
    book, prefix = LinkBook(0.0, 4_096, 16), await PromptPrefix.of(prompt(1), b"")
    book.hear(PrefixNews(0))
    book.hear(PrefixNews(1, prefix.names, has_more=True))
    for number in range(2 * MAX_SETTLED):
        book.opened(number.to_bytes(4, "big"), 65, prefix)
        book.closed(number.to_bytes(4, "big"))
    assert len(book._settled) == MAX_SETTLED
    book.hear(PrefixNews(2, prefix.names))
    assert book.hit_len(prefix) == 64


async def test_a_first_answer_shows_what_was_expected() -> None:
    """Whole blocks but for the last token, which is always read; later answers show nothing, and errors are counted."""
    book, prefix, hits = LinkBook(0.0, 4_096, 16), await PromptPrefix.of(prompt(1, 2), b""), PrefixHits()
    book.hear(PrefixNews(0, prefix.names))
    for session_id, length, found in ((b"a", 128, 112), (b"b", 140, 128), (b"c", 140, 32)):
        book.opened(session_id, length, prefix)
        expected = book.answered(session_id, length, found, 0)
        assert expected is not None
        hits.add(expected, found)
        assert book.answered(session_id, length, 0, 0) is None
    book.opened(b"short", 60, await PromptPrefix.of(prompt(1)[:60], b""))
    assert book.answered(b"short", 60, 0, 0) is None
    assert (hits.expected, hits.found, hits.errors.total) == (64 + 128 + 128, 64 + 128, 128.0)
    assert dict(hits.errors.buckets)["64.0"] == 2
    assert dict(hits.errors.buckets)["256.0"] == 3


def test_figures_are_those_of_the_policy_at_the_load_of_the_book() -> None:
    """Before it has learnt anything they are unknown; others' sessions count as well."""
    book, wish = LinkBook(100.0), PlaceWish()
    found = book.figures("a", wish, 100.0 + JOINING_S)
    assert (found.step_us, found.row_us, found.prompt_token_us, found.is_joining) == (None, None, None, False)
    book.costs = TargetCosts(TUNING)
    book.costs.verify_us.begin({rows: 1_000.0 + 50 * rows for rows in (1, 16)})
    for number in range(3):
        book.opened(bytes([number]), 10, NO_PREFIX)
    found = book.figures("a", wish, 100.0, others=2)
    assert found.is_joining
    assert found.session_count == 5
    assert found.step_us == pytest.approx(1_300.0)
    assert found.row_us == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("said", "is_full"),
    [
        ({}, False),
        ({"free_tokens": 4_196}, False),
        ({"free_tokens": 4_195}, True),
        ({"free_tokens": 196, "hit_len": 4_000}, False),
        # What waits has no blocks yet.
        ({"free_tokens": 5_000, "waiting_tokens": 900, "owner_count": 2}, True),
        # At 25 us each more than a second; those of others are read by turns with ours.
        ({"free_tokens": 90_000, "waiting_tokens": 40_001, "own_waiting_tokens": 40_001}, True),
        ({"free_tokens": 90_000, "waiting_tokens": 40_001, "own_waiting_tokens": 20_000, "owner_count": 2}, False),
        ({"free_tokens": 90_000, "waiting_tokens": 40_001, "own_waiting_tokens": 20_001, "owner_count": 2}, True),
        ({"free_tokens": 90_000, "waiting_tokens": 80_000, "owner_count": 2}, False),
        # A service that says no load may have room.
        ({"waiting_tokens": 90_000, "own_waiting_tokens": 90_000}, False),
    ],
)
def test_a_session_waits_only_where_all_places_are_full(said: dict[str, int], is_full: bool) -> None:
    """Another one that could read it at once is better whatever it costs; where all are full the choice says so."""
    place, dear = replace(A, **said), replace(B, free_tokens=90_000, session_count=2_000, step_us=80_000.0)
    chosen, alone = choose([place, dear], WISH), choose([place], WISH)
    assert chosen is not None
    assert alone is not None
    assert (chosen.address, chosen.is_full) == ("b" if is_full else "a", False)
    assert (alone.address, alone.is_full) == ("a", is_full)
    # Where something waits everywhere, costs decide among all whose caches are not held by sessions.
    busy = choose([place, replace(dear, waiting_tokens=1, owner_count=2)], WISH)
    assert busy is not None
    lacks_cache = said.get("free_tokens", 90_000) < 4_196 - said.get("hit_len", 0)
    assert (busy.address, busy.is_full) == ("b" if lacks_cache else "a", False)
