"""`python -m bench.pair`: its grid, figures of blocks made by hand, equal answers, and the smallest grid, served."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from support.command_line import scripted_gateway

from bench.pair.__main__ import PairOptions, plan_of
from bench.pair.campaign import PairRun, check
from bench.pair.report import TableCell, cells_of, render
from bench.pair.settings import GuessSetting, SettingKind, settings_of
from outrider.cli.bench.common import TokensDiffer
from outrider.cli.bench.load.driver import Block, Burst, Clocks, Driver, LoadAnswer, LoadPlan
from outrider.errors import InvalidRequest

PLAIN, SLOW, FAST = (
    GuessSetting(SettingKind.PLAIN),
    GuessSetting(SettingKind.REMOTE, 2),
    GuessSetting(SettingKind.REMOTE, 3),
)
AHEAD = GuessSetting(SettingKind.RUN_AHEAD, 3, 32)
LOAD = LoadPlan(
    streams=(1,), draft_counts=(), temperatures=(0.0,), tokens=16, requests=2, turns=1, connections=1, seed=0
)


def run(setting: GuessSetting, tokens: int, turn: int = 0, *, streams: int = 1, stretch: float = 1.0) -> PairRun:
    """Ten seconds of a target that computes for six of them, with a message of so many tokens each second.

    Branches of each third one were late, and the others hits; behind the first message there are three and six.
    """
    bursts = [Burst(1.0 + number, tokens, 3, 3, 2, "hit" if number % 3 else "late") for number in range(10)]
    answers = [LoadAnswer(0, 0.0, [1, 2], bursts)]
    clocks = [Clocks(at_s, {"gateway": at_s * 0.25, "client": at_s * 0.5}, {"target": at_s * 0.6}) for at_s in (0, 10)]
    block = Block(0.0, streams, setting.name, turn, clocks[0], clocks[1], answers)
    return PairRun("8b", 1.0, setting, stretch, block)


def test_settings_are_kinds_with_counts_and_branches() -> None:
    """Only run-ahead has options of the gateway."""
    found = settings_of(SettingKind, (2, 3), (16,))
    auto = settings_of(SettingKind, (None,), (16,))
    names = ["plain, no guesses", "remote, K = 2", "remote, K = 3", "hosted, K = 2", "hosted, K = 3"]
    ahead = ["run-ahead, K = 2, B = 16", "run-ahead, K = 3, B = 16"]
    assert [each.name for each in found] == names + ahead
    assert [each.speculation.drafter for each in found[:5]] == ["", "model", "model", "hosted", "hosted"]
    assert [each.speculation.enabled for each in found[:2]] == [False, True]
    assert (AHEAD.gateway_flags, FAST.gateway_flags) == ({"--branches": 32}, {})
    assert AHEAD.speculation == FAST.speculation
    assert [each.name for each in auto] == [
        "plain, no guesses",
        "remote, auto",
        "hosted, auto",
        "run-ahead, auto, B = 16",
    ]
    assert [(each.speculation.draft_count, each.speculation.drafter) for each in auto[1:3]] == [
        (None, "model"),
        (None, "hosted"),
    ]


def test_options_make_a_grid() -> None:
    """What is no way to serve, no pair or no number is refused by its option."""
    plan = plan_of(
        PairOptions(pairs="70b", delays="0,0.5", streams="1,64", settings="plain,remote", stretch_per_stream=0.125)
    )
    assert (plan.pairs, plan.delays_ms, plan.streams) == (("70b",), (0.0, 0.5), (1, 64))
    assert [plan.stretch("70b", each) for each in (1, 8, 64)] == [1.0, 1.0, 8.0]
    assert plan.stretch("200m", 64) == 1.0
    assert [each.count for each in plan_of(PairOptions(settings="plain,remote", draft_counts="auto,3")).settings] == [
        0,
        3,
        None,
    ]
    for options, words in (
        (PairOptions(settings="remote"), "--settings is 'remote'"),
        (PairOptions(settings="plain,fast"), "--settings is 'plain,fast'"),
        (PairOptions(pairs="9b"), "--pairs is '9b'"),
        (PairOptions(delays="-1"), "--delays is '-1'"),
        (PairOptions(branches="0"), "--branches is '0'"),
        (PairOptions(draft_counts="auto,0"), "--draft-counts is '0'"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            plan_of(options)


def test_figures_are_of_devices_that_are_not_stretched() -> None:
    """Two tokens a second of each stream, four tenths of each second idle, and CPUs as they are."""
    assert run(PLAIN, 2, streams=4).tokens_per_s == pytest.approx(8.0)
    assert run(PLAIN, 2, streams=4, stretch=16).tokens_per_s == pytest.approx(128.0)
    assert run(PLAIN, 2).idle_ms == pytest.approx(400.0)
    assert run(PLAIN, 2, stretch=16).idle_ms == pytest.approx(25.0)
    assert [run(AHEAD, 2).came(what) for what in ("hit", "late", "miss")] == pytest.approx([2 / 3, 1 / 3, 0])
    assert run(PLAIN, 2, stretch=16).cpus == {"gateway": 0.25, "client": 0.5}


def test_run_ahead_is_held_against_the_best_other() -> None:
    """The fastest setting of each kind by its median, and ratios of the same turn; nothing without run-ahead."""
    runs = [run(PLAIN, 2), run(SLOW, 3), run(FAST, 4), run(AHEAD, 6), run(PLAIN, 20, 1), run(SLOW, 30, 1)]
    cell = TableCell("8b", 1.0, 1, [*runs, run(FAST, 40, 1), run(AHEAD, 80, 1)], 16)
    assert cell.best == {SettingKind.PLAIN: PLAIN, SettingKind.REMOTE: FAST, SettingKind.RUN_AHEAD: AHEAD}
    ratio = cell.ratio(SettingKind.RUN_AHEAD, SettingKind.PLAIN, SettingKind.REMOTE)
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.high) == (1.625, 1.75, 1.875)
    assert replace(cell, runs=runs[:3]).ratio(SettingKind.RUN_AHEAD, SettingKind.PLAIN) is None
    assert cell.predicted(PLAIN) == pytest.approx(1 / 0.00633, rel=0.01)


def test_a_report_says_that_it_is_simulated() -> None:
    """With a row for each load in every table, and ratios where something ran ahead."""
    plan = plan_of(PairOptions(pairs="8b", delays="1", streams="1", settings="plain,remote", draft_counts="2,3"))
    report = render(plan, [run(PLAIN, 2), run(SLOW, 3), run(FAST, 4)])
    assert report.count("| 8b | 1 ms | 1 |") == 3
    assert "| 4 (4 to 4), K = 3 |" in report
    assert "SIMULATED" in report
    assert "over the best other" not in report
    ahead = render(plan, [run(PLAIN, 2), run(FAST, 4), run(AHEAD, 6), run(replace(AHEAD, branches=8), 5)])
    assert "| 6 (6 to 6), K = 3, B = 32 | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) |" in ahead
    assert re.search(
        r"K = 3, B = 8 \| \d+ \| 0.0\d \| 5.00 \| 400.00 \| 0.67 of 0.\d\d \| 0.33 \| 0.75 \(client 0.50\) \|", ahead
    )
    both = render(replace(plan, pairs=("8b", "200m")), [run(PLAIN, 2), replace(run(PLAIN, 2), pair="200m")])
    assert "SIMULATED are the devices of 8b, and" in both
    assert "Nothing of 200m is simulated" in both
    assert "| 200m | 1 ms | 1 | plain, no guesses | - | - | 2.00 |" in both
    assert [cell.streams for cell in cells_of(replace(plan, streams=(1, 4)), [])] == [1, 4]


async def test_answers_that_are_not_plain_s_are_refused() -> None:
    """Whichever of them it is: an error about its number and its setting, in place of all figures."""
    async with scripted_gateway() as gateway:
        driver = Driver(LOAD, gateway.address, {}, settings={FAST.name: FAST.speculation}, numbers=count())
        async with driver.connected():
            block = await driver.block(0.0, 1, FAST.name, 0)
            await check(driver, [block])
            assert block.plain == {each.number: each.token_ids for each in block.answers}
            block.answers[-1].token_ids[-1] += 1
            with pytest.raises(TokensDiffer, match="under remote, K = 3") as refusal:
                await check(driver, [block])
    assert refusal.value.exit_code == 70


@pytest.mark.slow
def test_the_smallest_grid(tmp_path: Path) -> None:
    """A pair whose devices take little time, with a delay: each kind in each table, and shares that are no figures."""
    save = tmp_path / "pair.json"
    grid = ("--pairs", "8b", "--delays", "0.25", "--streams", "2", "--draft-counts", "3", "--turns", "1")
    command = (sys.executable, "-m", "bench.pair", *grid, "--tokens", "16", "--save", str(save))
    done = subprocess.run(command, capture_output=True, check=False, timeout=240, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## 8b SIMULATED: ")
    assert re.findall(r"\| ([a-z-]+), tokens/s", done.stdout) == [*SettingKind, "formula"]
    assert done.stdout.count("| 8b | 0.25 ms | 2 |") == 1 + len(SettingKind)
    assert save.stat().st_size > 1000
