"""The load generator: its blocks, its figures under vLLM's names, its table."""

import io
import statistics

import numpy as np
import pytest

from bench.load import Asked, Block, Burst, LoadPlan
from bench.load_figures import equal_answers, figures, percentile, times_s
from bench.load_report import tell

# Two bursts of 1 and 3 tokens behind 0.1 s, and one of 5 tokens.
FIRST = Asked(True, 0, 0.5, 4, (1, 2, 3, 4), (Burst(0.1, 1), Burst(0.4, 3)), ((4, 3, 2), (4, 4, 4)))
SECOND = Asked(True, 1, 0.3, 6, (1, 2, 3, 4, 5), (Burst(0.2, 5),), ())
FAILED = Asked(True, 2, 0.1, error="all places are taken")
VLLM = {
    *("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("output_throughput", "total_token_throughput", "max_concurrency"),
    *(f"{name}_{kind}_ms" for name in ("mean", "median", "std", "p99") for kind in ("ttft", "tpot", "itl", "e2el")),
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_pos"),
}


def plan(requests: int = 10, streams: int = 2, turns: int = 3) -> LoadPlan:
    return LoadPlan(requests, streams, tokens=8, turns=turns, temperature=0.8, seed=0)


def test_settings_take_turns_and_ask_the_same() -> None:
    """The order changes every turn, and each setting has every request once."""
    blocks = list(plan().blocks())
    assert [setting for setting, _ in blocks] == [True, False, False, True, True, False]
    for setting in (True, False):
        assert [number for each, part in blocks for number in part if each is setting] == list(range(10))


@pytest.mark.parametrize(("requests", "streams", "turns"), [(1, 4, 4), (3, 2, 9), (8, 8, 4)])
def test_no_block_has_fewer_requests_than_streams(requests: int, streams: int, turns: int) -> None:
    """But for a run that has fewer in all."""
    sizes = [len(part) for _, part in plan(requests, streams, turns).blocks()]
    assert sum(sizes) == 2 * requests
    assert min(sizes) >= min(streams, requests)


def test_figures_by_hand() -> None:
    """Every time and count of two answers and a failure in two blocks."""
    found = figures([Block(True, 1.5, (FIRST,)), Block(True, 0.5, (SECOND, FAILED))], streams=2)
    assert set(found) >= VLLM
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["request_throughput"], found["output_throughput"], found["total_input_tokens"]) == (1.0, 4.5, 10)
    assert found["mean_ttft_ms"] == pytest.approx(150)
    assert found["mean_e2el_ms"] == pytest.approx(400)
    assert found["median_itl_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == pytest.approx(100)
    assert found["std_ttft_ms"] == pytest.approx(statistics.pstdev([100, 200]))
    assert (found["num_drafts"], found["num_draft_tokens"], found["num_accepted_tokens"]) == (2, 8, 6)
    assert found["accepted_per_pos"] == [2, 2, 1, 1]
    assert found["acceptance_rate"] == pytest.approx(6 / 7)
    assert found["mean_acceptance_length"] == 4.0


def test_nothing_answered_has_no_times() -> None:
    """Rather than zeros."""
    found = figures([Block(True, 1.0, (FAILED,))], streams=1)
    assert (found["completed"], found["mean_ttft_ms"], found["acceptance_rate"]) == (0, None, None)


def test_one_burst_has_no_time_between_bursts() -> None:
    """It would be a division by nothing."""
    assert times_s("itl", [SECOND]) == times_s("tpot", [SECOND]) == []
    assert times_s("ttft", [SECOND]) == [0.2]


def test_percentiles_are_numpy_s() -> None:
    """The library that vLLM computes them with."""
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    assert percentile(values, 0.99) == pytest.approx(float(np.percentile(values, 99)))
    assert percentile([2.0], 0.99) == 2.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_answers_are_compared_request_by_request() -> None:
    """Those that failed on one side are not."""
    other = Asked(False, 0, 0.5, 4, (1, 2, 3, 9))
    same = Asked(False, 1, 0.5, 6, (1, 2, 3, 4, 5))
    blocks = [Block(True, 1, (FIRST, SECOND, FAILED)), Block(False, 1, (other, same, Asked(False, 2, 1)))]
    assert equal_answers(blocks) == (1, 2)


def test_the_table_needs_no_more_than_80_columns() -> None:
    """With both settings, one of which has no drafts."""
    results = {"speculative": figures([Block(True, 1.0, (FIRST,))], 1)}
    results["plain"] = figures([Block(False, 2.0, (Asked(False, 0, 0.5, 4, FIRST.token_ids, (Burst(0.1, 4),)),))], 1)
    output = io.StringIO()
    tell({**results, "equal_answers": 1, "compared_answers": 1}, output)
    assert max(map(len, output.getvalue().splitlines())) <= 80
    assert "2.00 times the tokens/s" in output.getvalue()
    assert "1 of 1 answers are the same" in output.getvalue()
