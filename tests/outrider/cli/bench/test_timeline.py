"""`outrider bench timeline`: spans from the times of rounds, their lanes, and both for a pair that is served."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest

from outrider.cli.bench.timeline import Doing, Lane, TimelineOptions, TimeSpan, drawn, picture, spans_of
from outrider.client import RoundFacts
from outrider.errors import InvalidRequest

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "bench", "timeline")
IN_TURNS = RoundFacts(
    draft_wait_us=500,
    draft_queue_us=20,
    draft_compute_us=400,
    verify_wait_us=900,
    verify_queue_us=50,
    verify_compute_us=750,
    round_us=1450,
)
UNASKED = RoundFacts(verify_wait_us=300, verify_queue_us=100, verify_compute_us=700, round_us=310)
HOSTED = RoundFacts(
    draft_compute_us=200, verify_wait_us=1000, verify_compute_us=600, verify_queue_us=100, round_us=1010
)
AHEAD = RoundFacts(branches="hit", draft_compute_us=200, verify_wait_us=600, verify_compute_us=700, round_us=620)


def test_a_round_in_turns_fills_its_waits() -> None:
    """A way, queue, computing, the way back; then the same of the target."""
    assert list(spans_of(IN_TURNS, 1000)) == [
        TimeSpan(Lane.WIRE, Doing.WAY, 1000, 1040),
        TimeSpan(Lane.DRAFT, Doing.QUEUE, 1040, 1060),
        TimeSpan(Lane.DRAFT, Doing.COMPUTE, 1060, 1460),
        TimeSpan(Lane.WIRE, Doing.WAY, 1460, 1500),
        TimeSpan(Lane.WIRE, Doing.WAY, 1500, 1550),
        TimeSpan(Lane.TARGET, Doing.QUEUE, 1550, 1600),
        TimeSpan(Lane.TARGET, Doing.COMPUTE, 1600, 2350),
        TimeSpan(Lane.WIRE, Doing.WAY, 2350, 2400),
    ]


def test_what_took_longer_than_its_wait_began_before() -> None:
    """An unasked verdict ends with the wait for it, and so do guesses that were made ahead, with none."""
    assert list(spans_of(UNASKED, 1000)) == [
        TimeSpan(Lane.TARGET, Doing.QUEUE, 500, 600),
        TimeSpan(Lane.TARGET, Doing.COMPUTE, 600, 1300),
    ]
    assert list(spans_of(AHEAD, 1000)) == [
        TimeSpan(Lane.DRAFT, Doing.COMPUTE, 800, 1000),
        TimeSpan(Lane.TARGET, Doing.COMPUTE, 900, 1600),
    ]


def test_guesses_of_the_target_s_process_are_in_its_wait() -> None:
    """They come before the verdict, between the same two ways."""
    assert list(spans_of(HOSTED, 0)) == [
        TimeSpan(Lane.WIRE, Doing.WAY, 0, 50),
        TimeSpan(Lane.DRAFT, Doing.COMPUTE, 50, 250),
        TimeSpan(Lane.TARGET, Doing.QUEUE, 250, 350),
        TimeSpan(Lane.TARGET, Doing.COMPUTE, 350, 950),
        TimeSpan(Lane.WIRE, Doing.WAY, 950, 1000),
    ]


def test_rounds_follow_one_another_behind_those_that_are_left_out() -> None:
    """By their own lengths; an answer that is over by then is a refusal."""
    rounds = [(3, IN_TURNS), (1, UNASKED), (2, IN_TURNS), (4, UNASKED)]
    assert [(each.number, each.start_us, each.tokens) for each in drawn(rounds, 1, 2)] == [(2, 0, 1), (3, 310, 2)]
    assert len(drawn(rounds, 1, 9)) == 3
    with pytest.raises(InvalidRequest, match="--skip is 4, but must be less than the 4 rounds of the answer"):
        drawn(rounds, 4, 2)


def test_lanes_show_what_was_done_when() -> None:
    """A round in turns and an unasked one behind it, a column for each 50 us."""
    assert picture("K = 2", drawn([(3, IN_TURNS), (1, UNASKED)], 0, 2), 40, 50.0).splitlines() == [
        "K = 2: 4 tokens in 2 rounds of 1.8 ms together",
        "  round |1                           |2",
        "  draft ░████████",
        "   wire ─        ──                ─",
        " target            ░███████████████████████",
        " tokens |3                           |1",
    ]


def test_a_round_says_what_came_of_branches() -> None:
    """Beside its number, where any were asked for."""
    lines = picture("K = 2", drawn([(3, IN_TURNS), (1, AHEAD)], 0, 2), 40, 50.0).splitlines()
    assert lines[1] == "  round |1                           |2 hit"


def test_requests_are_long_enough_for_all_rounds() -> None:
    """Also when every guess is kept; what no gateway takes is refused."""
    assert TimelineOptions(draft_counts="0,3", skip=2, rounds=5).max_tokens == 8 * 4
    assert TimelineOptions(draft_counts="0", skip=2, rounds=5).max_tokens == 8
    with pytest.raises(InvalidRequest, match="many"):
        _ = TimelineOptions(draft_counts="many").settings


@pytest.mark.slow
def test_timelines_of_a_pair_that_is_served() -> None:
    """Plain and in turns, by JSON: lanes of those that took part, each span after the one before."""
    models = ("--target", "sim:h100-8b@stretch=0.1", "--draft", "sim:h100-1b@stretch=0.1")
    done = subprocess.run(
        [*COMMAND, *models, "--draft-counts", "0,3", "--rounds", "5", "--json"],
        capture_output=True,
        check=True,
        timeout=120,
        text=True,
    )
    plain, turns = json.loads(done.stdout)["timelines"]
    assert (plain["setting"], turns["setting"]) == ("plain", "K = 3")
    assert [len(each["rounds"]) for each in (plain, turns)] == [5, 5]
    for lane, shown in ((["target"], plain), (["draft", "target"], turns)):
        for each in shown["rounds"]:
            spans = [span for span in each["spans"] if span["doing"] == "compute"]
            assert [span["lane"] for span in spans] == lane
            assert all(one["end_us"] <= two["start_us"] for one, two in pairwise(each["spans"]))
