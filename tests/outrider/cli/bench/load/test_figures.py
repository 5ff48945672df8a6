"""Figures of blocks made by hand: windows, ratios of neighbours, costs, equal answers, tables and the plot."""

from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from outrider.cli.bench.common import AUTO, PLAIN, TREE, fixed
from outrider.cli.bench.load.driver import CLIENT, Block, Burst, Clocks, LoadAnswer
from outrider.cli.bench.load.report import plot, render
from outrider.cli.bench.load.summary import LoadFigures, percentile, summarize

MODELS = {"gateway": "sim:h100-8b", "target": "sim:h100-8b", "draft": "sim:h100-1b"}
SHARES = {CLIENT: 0.1, "gateway": 0.2, "target": 0.5}


def block(setting: str, turn: int, tokens: int, *, token_ids: Sequence[int] = (1, 2), streams: int = 1) -> Block:
    """Ten seconds from the hundredth on, with five bursts in it, one before, and one of a request from before."""
    bursts = [Burst(99.0 + 2 * number, tokens, 4, 3, 2) for number in range(6)]
    answers = [LoadAnswer(0, 98.0, list(token_ids), bursts), LoadAnswer(1, 100.5, [7], [Burst(111.0, tokens, 4, 4, 4)])]
    began, ended = (
        Clocks(at_s, {name: at_s * share for name, share in SHARES.items()}, {"target": at_s * 0.75})
        for at_s in (100.0, 110.0)
    )
    return Block(0.8, streams, setting, turn, began, ended, answers)


def figures(*blocks: Block) -> dict[str, LoadFigures]:
    """Figures of the settings under one load."""
    return {each.setting: each for each in summarize(blocks)}


def test_only_the_window_counts() -> None:
    """Five of seven bursts, gaps that end within, and the first tokens of requests that began within."""
    found = block(AUTO, 0, 2)
    assert [burst.at_s for burst in found.bursts] == [101.0, 103.0, 105.0, 107.0, 109.0]
    assert found.tokens_per_s == pytest.approx(1.0)
    assert found.gaps_s == [2.0] * 5
    assert found.first_tokens_s == [pytest.approx(10.5)]


def test_ratios_are_those_of_the_same_turn() -> None:
    """A turn that was slow for both changes none; 2 and 3 times as fast have 2.5 as their median."""
    turns = [block(PLAIN, 0, 2), block(AUTO, 0, 4), block(AUTO, 1, 30), block(PLAIN, 1, 10)]
    over = figures(*turns)[AUTO].over_plain
    assert (over.low, over.median, over.high, over.count) == (2.0, 2.5, 3.0, 2)
    assert figures(*turns)[PLAIN].over_plain.low == 1.0


def test_the_best_fixed_setting_may_be_plain() -> None:
    """Auto is held against the fastest of the others, and is none of them."""
    blocks = [block(PLAIN, 0, 4), block(fixed(2), 0, 2), block(AUTO, 0, 3)]
    assert figures(*blocks)[AUTO].over_best_fixed.median == pytest.approx(0.75)
    assert figures(*blocks, block(fixed(4), 0, 6))[AUTO].over_best_fixed.median == pytest.approx(0.5)


def test_the_best_chain_is_no_tree() -> None:
    """A tree that is the best fixed setting is held against the best of the others."""
    blocks = [block(PLAIN, 0, 2), block(fixed(4), 0, 4), block(f"{TREE} of 8, 4 deep", 0, 6), block(AUTO, 0, 3)]
    found = figures(*blocks)
    assert found[f"{TREE} of 8, 4 deep"].over_best_chain.median == pytest.approx(1.5)
    assert (found[AUTO].over_best_chain.median, found[AUTO].over_best_fixed.median) == (0.75, 0.5)


def test_what_a_round_costs() -> None:
    """Seconds of each process over five rounds in ten seconds, and the share in which a device computed."""
    found = figures(block(PLAIN, 0, 1), block(PLAIN, 1, 1))[PLAIN]
    assert found.cpu_per_round_s == {name: pytest.approx(2 * share) for name, share in SHARES.items()}
    assert found.device_busy == {"target": pytest.approx(0.75)}
    assert (found.rounds_per_s.median, found.tokens_per_round, found.drafted_per_round) == (0.5, 1.0, 4.0)
    assert found.acceptance_rate == pytest.approx(2 / 3)


def test_answers_that_were_asked_for_again_are_compared() -> None:
    """One that differs in a token or ends early is not equal; of the others nothing is known."""
    plain = [block(PLAIN, turn, 1) for turn in (0, 1)]
    for token_ids, equal in (((1, 2), 2), ((1, 3), 1), ((1,), 1)):
        blocks = [
            replace(block(AUTO, 0, 1, token_ids=token_ids), plain={0: [1, 2], 1: [7]}),
            block(AUTO, 1, 1, token_ids=(9,)),
        ]
        found = figures(*plain, *blocks)[AUTO]
        assert (found.equal_answers, found.compared_answers) == (equal, 2)
    assert figures(*plain, *blocks)[PLAIN].compared_answers == 0


def test_each_load_has_its_own_plain() -> None:
    """Four streams are not held against one."""
    blocks = [
        block(setting, 0, tokens, streams=streams)
        for streams, setting, tokens in ((1, PLAIN, 1), (1, AUTO, 2), (4, PLAIN, 10), (4, AUTO, 10))
    ]
    found = {(each.streams, each.setting): each.over_plain.median for each in summarize(blocks)}
    assert found == {(1, PLAIN): 1.0, (1, AUTO): 2.0, (4, PLAIN): 1.0, (4, AUTO): 1.0}


def test_percentiles_are_values_that_were_seen() -> None:
    """The nearest rank; of few values the 99th is the largest."""
    assert percentile(range(1, 201), 0.99) == 198
    assert percentile([3.0, 1.0], 0.99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.99)


def test_the_report_by_hand() -> None:
    """Three tables, and one sentence about answers and the client."""
    blocks = [block(PLAIN, 0, 2), replace(block(AUTO, 0, 4, token_ids=(1, 9)), plain={0: [1, 2], 1: [7]})]
    told = render(summarize(blocks), blocks)
    assert "### Temperature 0.8" in told
    assert (
        "| 1 | auto | 2 (2 to 2) | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | 0 (0 to 0) | 4.00 "
        "| 4.00 | 0.67 |" in told
    )
    assert "| 1 | auto | 2000.0 (2000.0 to 2000.0) | 2000.0 | 1.00 (1.00 to 1.00) | 10500.0 (" in told
    assert "| 1 | auto | 200000 | 400000 | 1000000 | 75% |" in told
    assert "1 of 2 answers that were asked for again are plain's; under the rule match on a CPU all must be. " in told
    assert "The client took at most 10%" in told


def test_the_plot_says_that_it_is_simulated() -> None:
    """And has a panel for each temperature, with a line for each setting but plain."""
    warm = [block(PLAIN, 0, 2), block(AUTO, 0, 4), block(fixed(2), 0, 3)]
    cold = [replace(each, temperature=0.0) for each in warm]
    drawn = plot(summarize([*warm, *cold]), MODELS)
    words = ["".join(each.itertext()) for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith("text")]
    assert words[0] == "SIMULATED: sim:h100-8b with sim:h100-1b"
    assert {"temperature 0.8", "temperature 0", AUTO, fixed(2), "streams"} <= set(words)
    assert PLAIN not in words
    assert "SIMULATED" not in plot(summarize(warm), {"target": "target", "draft": "draft"})
