"""The measurement of acceptance counts what it says, and on the embedded pair the rules stand in their order."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.basics import check_empty
from support.models.tiny_models import TARGET, TRAINED
from tokenizers import Tokenizer

from bench.acceptance.__main__ import conclude
from bench.acceptance.report import AcceptanceSummary, Estimate, mean, render, share
from bench.acceptance.runs import AcceptancePlan, ModelPair, Readers, RuleCounts, measure
from outrider.cli.bench.common import OPENINGS
from outrider.drafters.hosted import HostedModel
from outrider.engine.runner import ModelRunner
from outrider.parameters import Acceptance, Rule

pytestmark = pytest.mark.slow

PLAN = AcceptancePlan(temperatures=(0.7, 1.0), text_len=48, stride=6, top_ns=(8, 64))


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    target, draft = (ModelRunner.load(str(folder), kv_tokens=32768) for folder in (TARGET, TRAINED))
    return ModelPair(target, HostedModel(draft))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [tokenizer.encode(opening).ids for opening in OPENINGS[:24]]


@pytest.fixture(scope="module")
def summary(pair: ModelPair, prompts: list[list[int]]) -> AcceptanceSummary:
    """One run for all tests."""
    torch.set_num_threads(1)
    return AcceptanceSummary(PLAN, measure(pair, PLAN, prompts, lambda _: None))


@pytest.mark.parametrize("temperature", PLAN.temperatures)
@pytest.mark.parametrize(("better", "worse"), [("block", "ratio"), ("ratio", "match"), ("lenient 0.5", "block")])
def test_the_rules_stand_in_their_order(
    summary: AcceptanceSummary, better: str, worse: str, temperature: float
) -> None:
    """Tokens a round in the same places: block >= ratio >= match, and lenient above all, within 3 standard errors."""
    gain = summary.gain(temperature, better, worse)
    assert 0 < gain.error < 0.3
    assert gain.value > -3 * gain.error


@pytest.mark.parametrize("temperature", PLAN.temperatures)
def test_a_wrong_order_would_be_found(summary: AcceptanceSummary, temperature: float) -> None:
    """A few rounds distinguish the rule that favours the draft from the exact ones by more than 3 standard errors."""
    for exact in ("match", "ratio", "block"):
        gain = summary.gain(temperature, exact, "lenient 0.5")
        assert gain.value < -3 * gain.error


@pytest.mark.parametrize("temperature", PLAN.temperatures)
def test_a_longer_distribution_takes_more_bytes(summary: AcceptanceSummary, temperature: float) -> None:
    """The larger hop of a round stays within two kilobytes at 64 tokens."""
    assert summary.hop_bytes(temperature, 8)[0] < summary.hop_bytes(temperature, 64)[0] <= 2048


def test_a_round_is_taken_back(pair: ModelPair, prompts: list[list[int]]) -> None:
    """The same round twice is the same, whatever came between, and nothing is held in the end."""
    readers = Readers(pair, prompts[:3], 1.0, text_len=12)
    readers.go_to(4)
    before = readers.round(Acceptance(rule=Rule.RATIO), 5, 64)
    readers.round(Acceptance(), 3, 64)
    readers.go_to(9)
    readers.round(Acceptance(rule=Rule.BLOCK), 5, 8)
    readers.go_to(4)
    assert readers.round(Acceptance(rule=Rule.RATIO), 5, 64) == before
    assert readers.lengths == [len(prompt) + 4 for prompt in prompts[:3]]
    readers.close()
    for runner in (pair.target, pair.draft.runner):
        check_empty(runner.pool)


def test_errors_are_those_of_independent_texts() -> None:
    """Followed by hand: two texts, and a single one whose error is unknown."""
    assert mean([1.0, 3.0]) == Estimate(2.0, 1.0)
    assert mean([2.0]) == Estimate(2.0, math.inf)
    # Rate 6 / 12; the rests are 1 and -1, with mean 0 +- 1, over 6 evaluated a text.
    assert share([4, 2], [6, 6]) == Estimate(0.5, pytest.approx(1 / 6))


def test_figures_follow_from_counts() -> None:
    """Tokens a round count the target's own; a gain compares text by text."""
    counts = [("ratio", 0, 10, 12), ("ratio", 1, 20, 24), ("match", 0, 8, 12), ("match", 1, 18, 24)]
    tallies = [
        RuleCounts(
            1.0, rule, 64, prompt, rounds=10, accepted=accepted, evaluated=evaluated, hop_bytes=900, most_hop_bytes=95
        )
        for rule, prompt, accepted, evaluated in counts
    ]
    found = AcceptanceSummary(AcceptancePlan(temperatures=(1.0,)), tallies)
    assert found.length(1.0, "ratio", 64) == Estimate(2.5, pytest.approx(0.5))
    assert found.rate(1.0, "match", 64).value == pytest.approx(26 / 36)
    assert found.gain(1.0, "ratio", "match") == Estimate(pytest.approx(0.2), pytest.approx(0.0, abs=1e-9))
    assert found.hop_bytes(1.0, 64) == (90.0, 95)


def test_the_report_has_every_rule_and_the_file_every_count(
    pair: ModelPair, summary: AcceptanceSummary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is Markdown, the file can be read again."""
    file = tmp_path / "counts.json"
    conclude(pair, PLAN, summary.counts, render(summary), file)
    text = capsys.readouterr().out
    assert render(summary) in text
    for rule in ("match", "ratio", "block", "lenient 0.5", "typical 0.09 0.3"):
        assert f"\n| {rule} | " in text
    assert "The rule ratio by top-N" in text
    document = json.loads(file.read_text())
    assert len(document["counts"]) == len(summary.counts) == 2 * 24 * 6
