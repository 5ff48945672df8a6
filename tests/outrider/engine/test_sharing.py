"""Rows of a step: which feeds get them, and how many rows of prompts there may be beside those that run."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.engine_cases import make_feeds

from outrider.engine.batching import MAX_STEP_TOKENS, Feed
from outrider.engine.sharing import GRACE_STEPS, MIN_PROMPT_ROWS, PROBE_STEPS, ForwardPace, share_rows
from outrider.estimates.row_costs import NUM_SAMPLES


def serve(feeds: list[Feed], grants: list[int], forward: int) -> list[Feed]:
    """What a forward of these grants leaves to be fed: those that are not finished."""
    for feed, grant in zip(feeds, grants, strict=True):
        if grant:
            feed.session.advance(min(feed.session.next_position + grant, len(feed.session)), feed.tree)
            feed.session.last_forward = forward
    return [feed for feed in feeds if feed.session.cached_len < len(feed.session)]


def test_everything_that_fits_is_granted() -> None:
    """Without scarcity each feed gets all its rows."""
    assert share_rows(make_feeds((100, 0, 0), (50, 49, 8), (7, 3, 2)), 512, 512) == [100, 9, 6]


def test_the_first_prompt_takes_what_those_who_run_leave() -> None:
    """Decoding sessions are served whole, whenever they came; a second prompt waits for the first one's end."""
    feeds = make_feeds((1000, 0, 4), (50, 49, 8), (1000, 0, 0), (60, 59, 0))
    assert share_rows(feeds, 512, 512) == [502, 9, 0, 1]
    feeds[0].session.arrival = 9
    assert share_rows(feeds, 512, 512) == [0, 9, 502, 1]
    feeds[2].session.advance(900, feeds[2].tree)
    assert share_rows(feeds, 512, 512) == [402, 9, 100, 1]


def test_rows_of_prompts_are_bounded_beside_those_who_run() -> None:
    """Whatever there is room for; with a bound of 0 no prompt is read, and everybody else is served."""
    feeds = make_feeds((1000, 0, 4), (50, 49, 8), (1000, 0, 0), (60, 59, 0))
    for bound in (0, 1, MIN_PROMPT_ROWS, 37):
        assert share_rows(feeds, 512, 512, bound) == [bound, 9, 0, 1]
    assert share_rows(make_feeds((20, 0, 0), (50, 49, 0)), 512, 512, 5) == [5, 1]


def test_a_prompt_that_ends_runs_on() -> None:
    """Its last few tokens count as a step, and not against the bound of prompts."""
    feeds = make_feeds((100, 100 - MAX_STEP_TOKENS, 0), (1000, 0, 0))
    assert share_rows(feeds, 512, 512, 5) == [MAX_STEP_TOKENS, 5]


def test_owners_of_prompts_have_equal_shares() -> None:
    """Three prompts of one owner and one of another: half for the latter, and what it leaves for the former."""
    feeds = make_feeds(*((1000, 0, 0) for _ in range(4)))
    for feed, owner in zip(feeds, "AAAB", strict=True):
        feed.session.owner = owner
    assert share_rows(feeds, 512, 512, 100) == [50, 0, 0, 50]
    feeds[0].session.advance(970, feeds[0].tree)
    assert share_rows(feeds, 512, 512, 100) == [30, 20, 0, 50]
    feeds[3].session.advance(980, feeds[3].tree)
    assert share_rows(feeds, 512, 512, 100) == [30, 50, 0, 20]


def test_owners_take_turns_where_a_row_for_each_is_too_much() -> None:
    """Ten owners and four rows a step: the one that waited longest is next, so all have been served after ten steps."""
    feeds = make_feeds(*((500, 0, 0) for _ in range(10)))
    for owner, feed in enumerate(feeds):
        feed.session.owner = owner
    for forward in range(1, 11):
        serve(feeds, share_rows(feeds, 512, 512, 4), forward)
    assert [feed.session.cached_len for feed in feeds] == [4] * 10


def test_a_tree_waits_for_its_last_token() -> None:
    """When the tree does not fit, its last committed token waits with it."""
    assert share_rows(make_feeds((30, 0, 8)), 35, 99) == [29]
    assert share_rows(make_feeds((30, 29, 8)), 8, 99) == [0]
    assert share_rows(make_feeds((30, 29, 8)), 9, 99) == [9]


def test_no_feed_starves() -> None:
    """The longest wait is first: a wide tree among many steps is served within two forwards, a prompt as well."""
    feeds = make_feeds((5, 4, 60), (900, 0, 0), *((5, 4, 0) for _ in range(200)))
    served = [0] * len(feeds)
    for forward in range(1, 5):
        for index, grant in enumerate(share_rows(feeds, 100, 100, 50)):
            if grant:
                served[index] += 1
                feeds[index].session.last_forward = forward
    assert min(served) >= 1


def test_wanted_prefixes_are_bounded_and_others_are_not() -> None:
    """Logits of 40 rows are granted besides: a prompt and a part of one; who wants none of its prefix is served."""
    feeds = make_feeds((30, 0, 2), (50, 0, 0), (100, 0, 0), (9, 8, 4), prefixed={0, 1, 3})
    assert share_rows(feeds, 512, 40) == [32, 11, 100, 5]
    assert share_rows(feeds[:2], 512, 78) == [32, 50]


def test_a_wanted_prefix_leaves_room_for_the_root_and_the_tree() -> None:
    """Whatever the bound, tokens are drawn after them; a prefix that is too long comes in parts."""
    assert share_rows(make_feeds((9, 8, 5), prefixed={0}), 512, 1) == [6]
    assert share_rows(make_feeds((9, 7, 5), prefixed={0}), 512, 1) == [7]
    assert share_rows(make_feeds((9, 6, 5), prefixed={0}), 512, 1) == [1]


def test_wanted_prefixes_are_read_in_the_order_of_arrival() -> None:
    """Sessions that share the bound end one after the other, and all do."""
    feeds, ended = make_feeds((20, 0, 0), (20, 0, 0), (20, 0, 0), prefixed={0, 1, 2}), []
    waiting = list(feeds)
    for forward in range(1, 20):
        before = waiting
        waiting = serve(waiting, share_rows(waiting, 512, 8), forward)
        ended += [feeds.index(feed) for feed in before if feed not in waiting]
    assert ended == [0, 1, 2]


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9), st.sampled_from("ABC"), st.booleans()), max_size=12),
    st.lists(st.integers(0, 40), min_size=1),
    st.integers(12, 64),
    st.integers(1, 64),
)
def test_everybody_comes_to_an_end(
    sizes: list[tuple[int, int, str, bool]], bounds: list[int], max_rows: int, max_prefix_rows: int
) -> None:
    """Whatever comes, in whatever steps it is read: bounds hold, runners are served, prompts of one owner in order."""
    waiting = make_feeds(
        *((length, 0, num_rows) for length, num_rows, _, _ in sizes),
        prefixed={number for number, size in enumerate(sizes) if size[3]},
    )
    for feed, size in zip(waiting, sizes, strict=True):
        feed.session.owner = size[2]
    total = sum(feed.num_committed + len(feed.tree) for feed in waiting)
    forward = 0
    while waiting:
        forward += 1
        # Every other step has rows of prompts, as those have that measure nothing.
        bound = MIN_PROMPT_ROWS + bounds[forward % len(bounds)] if forward % 2 else 0
        grants = share_rows(waiting, max_rows, max_prefix_rows, bound)
        pairs = list(zip(waiting, grants, strict=True))
        assert sum(grants) <= max_rows
        assert sum(feed.num_prefix(grant) for feed, grant in pairs) <= max_prefix_rows
        assert sum(grant for feed, grant in pairs if feed.is_prompt) <= bound
        for first, second in ((a, b) for at, a in enumerate(pairs) for b in pairs[at + 1 :]):
            both = first[0].is_prompt and second[0].is_prompt and first[0].session.owner == second[0].session.owner
            if both and second[1] and not first[0].wants_prefix:
                # All but a tree that does not fit, and the token that it continues.
                assert first[1] >= first[0].num_committed - bool(first[0].tree)
        running = [feed for feed in waiting if not feed.is_prompt]
        if sum(feed.num_committed + len(feed.tree) for feed in running) + 3 * MIN_PROMPT_ROWS <= max_rows:
            assert all(grant == feed.num_committed + len(feed.tree) for feed, grant in pairs if feed in running) or any(
                feed.wants_prefix for feed in waiting
            )
        waiting = serve(waiting, grants, forward)
        assert forward <= 4 * total + 4


class Device:
    """Steps that take as long as a formula of (rows of prompts, others) says, and the pace that is learnt from them."""

    def __init__(self, law: Callable[[int, int], float], most_steps: float = 1.0) -> None:
        self.law = law
        self.now_s = 0.0
        self.pace = ForwardPace(lambda: self.now_s, most_steps)

    def step(self, feeds: list[Feed], max_rows: int = 512) -> tuple[int, float]:
        """Rows of prompts in a step, of which every feed wants more than there are, and its seconds."""
        limit = self.pace.begin(feeds, max_rows)
        grants = share_rows(feeds, max_rows, max_rows, limit)
        num_prompt = sum(grant for feed, grant in zip(feeds, grants, strict=True) if feed.is_prompt)
        seconds = self.law(num_prompt, sum(grants) - num_prompt)
        self.now_s += seconds
        self.pace.end(grants)
        return num_prompt, seconds


# Milliseconds: weights, then a little for each row.
def cpu(num_prompt: int, num_others: int) -> float:
    return 10 + 1.0 * num_prompt + 0.5 * num_others


def accelerator(num_prompt: int, num_others: int) -> float:
    return max(6, 0.02 * (num_prompt + num_others))


def runners() -> list[Feed]:
    return make_feeds(*((50, 49, 0) for _ in range(8)))


def prompts() -> list[Feed]:
    return make_feeds((3000, 0, 0), (3000, 0, 0))


def test_a_prompt_alone_takes_the_whole_step() -> None:
    """No other session runs, so none has a pace to keep."""
    device = Device(cpu)
    assert [device.step(prompts())[0] for _ in range(3)] == [512] * 3


def test_a_step_with_rows_of_prompts_takes_half_as_long_again() -> None:
    """On a device where a row costs a millisecond, beside 14 ms for those who run: seven rows."""
    device, feeds = Device(cpu), runners()
    device.step(feeds)
    steps = [device.step([*feeds, *prompts()]) for _ in range(100)]
    assert all(seconds <= 21 for _, seconds in steps)
    assert {num_rows for num_rows, _ in steps[5:]} == {7, 0}


def test_sessions_that_come_in_turns_do_not_make_rows_of_prompts_look_dear() -> None:
    """Steps of two and of six sessions, of 20 and 40 ms: each half as long again, with rows of a millisecond."""
    device = Device(lambda num_prompt, num_others: 10 + 1.0 * num_prompt + 5.0 * num_others)
    groups, read = runners(), list[tuple[int, int]]()
    for number in range(200):
        feeds = groups[2:] if number % 3 else groups[:2]
        device.step(feeds)
        read.append((len(feeds), device.step([*feeds, *prompts()])[0]))
    assert all(abs(num_rows - {2: 10, 6: 20}[sessions]) <= 1 for sessions, num_rows in read[10:])


@pytest.mark.parametrize("others", [6, 7])
def test_a_slow_step_with_rows_that_were_not_seen_changes_little(others: int) -> None:
    """A session more or less than in all steps before, when a busy machine takes half a second for it."""
    device, feeds = Device(cpu), runners()[: 13 - others]
    for _ in range(2 * PROBE_STEPS):
        device.step([*feeds, *prompts()])
    device.law = lambda num_prompt, num_others: 500.0
    device.step(runners()[:others])
    device.law = cpu
    steps = [device.step([*runners()[:others], *prompts()]) for _ in range(2 * PROBE_STEPS)]
    assert all(seconds <= 1.75 * cpu(0, others) for _, seconds in steps)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_another_load_is_followed_where_each_step_has_other_rows(factor: float) -> None:
    """As fast as where all have the same: within some measurements."""
    device, groups = Device(cpu), runners()
    turns = [groups[: 2 + 5 * number % 7] for number in range(200)]
    for feeds in turns:
        device.step([*feeds, *prompts()])
    device.law = lambda num_prompt, num_others: factor * (10 + 0.5 * num_others) + num_prompt
    for feeds in turns[: (NUM_SAMPLES + 1) * (PROBE_STEPS + 1)]:
        device.step([*feeds, *prompts()])
    for feeds in turns[:20]:
        read, seconds = device.step([*feeds, *prompts()])
        assert read in {0, MIN_PROMPT_ROWS} or 1.3 <= seconds / (seconds - read) <= 1.7


def test_a_clock_that_stands_still_does_not_matter() -> None:
    """Prompts are read as if rows cost nothing."""
    device, feeds = Device(lambda num_prompt, num_others: 0.0), runners()
    steps = [device.step([*feeds, *prompts()])[0] for _ in range(100)]
    assert max(steps) > 400


def test_where_rows_are_cheap_chunks_are_large() -> None:
    """On an accelerator 450 rows take 9 ms, half as long again as the 6 ms of the weights: chunks are around that."""
    device, feeds = Device(accelerator), runners()
    device.step(feeds)
    steps = [device.step([*feeds, *prompts()]) for _ in range(100)]
    late = [seconds for num_rows, seconds in steps[-48:] if num_rows]
    assert sum(late) / len(late) == pytest.approx(9.0, rel=0.05)
    assert min(num_rows for num_rows, _ in steps[-48:] if num_rows) > 300


def test_the_first_step_beside_others_measures_them() -> None:
    """What a step takes without prompts has to be known first, and is measured again and again."""
    device, feeds = Device(cpu), [*runners(), *prompts()]
    read = [device.step(feeds)[0] for _ in range(2 * PROBE_STEPS + 3)]
    assert [number for number, num_rows in enumerate(read) if not num_rows] == [0, PROBE_STEPS + 1, 2 * PROBE_STEPS + 2]


@pytest.mark.parametrize(("others_s", "num_rows"), [(0.0, 7), (70.0, 42), (1000.0, 112)])
def test_a_draft_reads_more_where_its_sessions_wait_for_the_target(others_s: float, num_rows: int) -> None:
    """A round with 14 ms of it and 70 of the target is half as long again as well; it has 16 such steps at most."""
    device, feeds = Device(cpu, most_steps=16), runners()
    device.step(feeds)
    for _ in range(2 * PROBE_STEPS):
        read, _ = device.step([*feeds, *prompts()])
        device.now_s += others_s
    assert read == pytest.approx(num_rows, abs=1)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_another_load_is_followed(factor: float) -> None:
    """Fewer or more who run: within some measurements the chunk is what their step allows."""
    device, feeds = Device(cpu), [*runners(), *prompts()]
    for _ in range(100):
        device.step(feeds)
    device.law = lambda num_prompt, num_others: factor * (10 + 0.5 * num_others) + num_prompt
    steps = [device.step(feeds) for _ in range((NUM_SAMPLES + 1) * (PROBE_STEPS + 1))]
    assert steps[-1][0] == max(int(factor * 7), MIN_PROMPT_ROWS)


def test_a_step_that_a_busy_machine_made_slow_changes_nothing() -> None:
    """Medians count; with the mean the chunk would be ten times as large, or one row."""
    device, feeds = Device(cpu), runners()
    for _ in range(NUM_SAMPLES):
        device.step(feeds)
    for slow in (feeds, [*feeds, *prompts()]):
        for _ in range(20):
            device.step([*feeds, *prompts()])
        device.law = lambda num_prompt, num_others: 500.0
        device.step(slow)
        device.law = cpu
        assert device.step([*feeds, *prompts()]) == (7, 21.0)


def test_reading_goes_on_whatever_is_measured() -> None:
    """A device where a row costs more than all who run: a few rows a step."""
    device, feeds = Device(lambda num_prompt, _: 1 + 50 * num_prompt), [*runners(), *prompts()]
    read = [device.step(feeds)[0] for _ in range(3 * PROBE_STEPS)]
    assert set(read) == {MIN_PROMPT_ROWS, 0}


def test_who_waits_for_its_draft_is_running_until_it_ends() -> None:
    """Chunks stay small for as long as its next step may come; a session that ended is not waited for."""
    for ends in (False, True):
        device, feeds = Device(cpu), runners()
        device.step(feeds)
        for _ in range(10):
            device.step([*feeds, *prompts()])
        if ends:
            for feed in feeds:
                feed.session.free()
        read = [device.step(prompts())[0] for _ in range(GRACE_STEPS + 1)]
        assert read == [512] * len(read) if ends else read == [7] * (GRACE_STEPS - 1) + [512] * 2
