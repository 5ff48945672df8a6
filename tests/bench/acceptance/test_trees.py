"""The measurement of trees counts what it says, and on the embedded pair the values promise what is kept."""

from pathlib import Path

import pytest
import torch
from support.basics import check_empty
from support.models.tiny_models import TARGET, TRAINED
from tokenizers import Tokenizer

from bench.acceptance.__main__ import conclude
from bench.acceptance.runs import AcceptancePlan, ModelPair
from bench.acceptance.trees import Proposed, TreeCounts, kept_rows, measure_trees, render_trees
from outrider.cli.bench.common import OPENINGS
from outrider.drafters.hosted import HostedModel
from outrider.engine.runner import ModelRunner
from outrider.estimates.timing import ComputeTimes
from outrider.token_tree import TokenTree

pytestmark = pytest.mark.slow

PLAN = AcceptancePlan(temperatures=(0.0, 1.0), text_len=64, stride=3)
SIZES = (4, 8)


@pytest.fixture(scope="module")
def counts() -> list[TreeCounts]:
    """One run for all tests."""
    torch.set_num_threads(1)
    target, draft = (ModelRunner.load(str(folder), kv_tokens=32768) for folder in (TARGET, TRAINED))
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(opening).ids for opening in OPENINGS[:24]]
    found = measure_trees(ModelPair(target, HostedModel(draft)), PLAN, prompts, SIZES, lambda _: None)
    for runner in (target, draft):
        check_empty(runner.pool)
    return found


@pytest.mark.parametrize("temperature", PLAN.temperatures)
@pytest.mark.parametrize("num_rows", SIZES)
def test_values_promise_what_is_kept(counts: list[TreeCounts], temperature: float, num_rows: int) -> None:
    """Within 10 %: tokens a round, counted along the target's texts, against one and the sum of the values."""
    own = [each.tree for each in counts if (each.temperature, each.num_rows) == (temperature, num_rows)]
    rounds = sum(each.rounds for each in own)
    assert rounds == 24 * len(range(0, PLAN.text_len - num_rows, PLAN.stride))
    counted = 1 + sum(each.accepted for each in own) / rounds
    assert 1 + sum(each.promised for each in own) / rounds == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("temperature", PLAN.temperatures)
@pytest.mark.parametrize("num_rows", SIZES)
def test_a_tree_keeps_more_than_a_chain(counts: list[TreeCounts], temperature: float, num_rows: int) -> None:
    """In the same places, of as many guesses."""
    own = [each for each in counts if (each.temperature, each.num_rows) == (temperature, num_rows)]
    assert sum(each.tree.accepted for each in own) > sum(each.chain.accepted for each in own)


def test_the_path_of_the_text_is_what_is_kept() -> None:
    """Followed by hand, down a second child and to the end of the tree."""
    tree = TokenTree((5, 6, 7, 8), (0, 0, 2, 3))
    assert [list(kept_rows(tree, text)) for text in ([6, 7, 8, 9], [6, 8], [9], [5, 7])] == [[2, 3, 4], [2], [], [1]]
    proposed = Proposed()
    proposed.add(tree, 3, ComputeTimes(compute_us=600, forward_count=3))
    assert (proposed.tokens_per_round, proposed.depths, proposed.promised) == (4.0, 3, 0)
    assert (proposed.forwards, proposed.step_us) == (3, [200.0])


def test_the_report_has_every_size(
    counts: list[TreeCounts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each, and all counts in the file."""
    target, draft = (ModelRunner.load(str(folder), kv_tokens=64) for folder in (TARGET, TRAINED))
    conclude(ModelPair(target, HostedModel(draft)), PLAN, counts, render_trees(counts), tmp_path / "counts.json")
    text = capsys.readouterr().out
    for temperature in ("0", "1"):
        for num_rows in SIZES:
            assert f"\n| {temperature} | {num_rows} | " in text
    assert (tmp_path / "counts.json").stat().st_size > 1000
