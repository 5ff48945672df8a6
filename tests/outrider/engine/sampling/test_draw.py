"""Draws from probabilities, and the scores after many rows at once."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from support.basics import spec_of
from support.models.tiny_models import TARGET
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.noise import Purpose, noise_key
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import (
    UNDRAWN,
    DrawInput,
    before_argmax,
    draw_from,
    row_contexts,
    rows_of,
    scores_behind,
)
from outrider.engine.sampling.transforms import transform
from outrider.parameters import SamplingParameters
from outrider.token_tree import TokenTree


def keys_of(count: int) -> Tensor:
    return torch.tensor([noise_key(seed, 9, Purpose.RESIDUAL) for seed in range(count)])


def test_draws_follow_distributions_that_need_not_add_up_to_1() -> None:
    """Chi-square over 20,000 keys; a token without a probability is never drawn."""
    distribution = torch.tensor([0.0, 0.03, 0.0, 0.2, 0.07, 0.0], dtype=torch.float64)
    drawn = draw_from(distribution.expand(20_000, -1), keys_of(20_000))
    counts = np.bincount(drawn.numpy(), minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    expected = distribution.numpy()[[1, 3, 4]] / 0.3 * 20_000
    assert stats.chisquare(counts[[1, 3, 4]], expected).pvalue > 1e-4


@pytest.mark.parametrize("scale", [1.0, 1e-300, 0.7])
def test_the_ends_of_the_uniforms_are_tokens(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """The first and the last with a probability, whatever the products round to; an empty distribution has none."""
    ends = np.array([2.0**-53, 1 - 2.0**-53, 0.5])
    monkeypatch.setattr("outrider.engine.sampling.draw.first_uniforms", lambda _: ends)
    probs = torch.tensor([[0.0, 0.1, 0.2, 0.7, 0.0]], dtype=torch.float64).repeat(3, 1) * scale
    probs[2] = 0
    assert draw_from(probs, keys_of(3)).tolist() == [1, 3, UNDRAWN]


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    """Alone and in a batch, on a wide distribution."""
    probs = torch.rand(9, 5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64) ** 9
    together = draw_from(probs, keys_of(9)).tolist()
    assert [draw_from(probs[row : row + 1].clone(), keys_of(9)[row : row + 1]).item() for row in range(9)] == together


def test_rows_that_lie_side_by_side_are_not_copied() -> None:
    """Those of all sessions, of some in order, and of others."""
    logits = torch.arange(20.0).view(10, 2)
    assert rows_of(logits, [range(3), range(3, 10)]) is logits
    part = rows_of(logits, [range(2, 4), range(4, 5)])
    assert part.data_ptr() == logits[2].data_ptr()
    assert torch.equal(part, logits[2:5])
    assert torch.equal(rows_of(logits, [range(4, 5), range(2)]), logits[[4, 0, 1]])


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner.load(str(TARGET), num_threads=2, kv_tokens=1024)


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.7, 0.7), (0.0, 0.0), (1e-40, 1e-40), (0.7, 1.0)])
@pytest.mark.parametrize("extra", [{}, {"top_k": 5}, {"presence_penalty": 0.3}])
def test_scores_are_those_of_the_transforms(
    runner: ModelRunner, temperatures: tuple[float, ...], extra: dict[str, float]
) -> None:
    """Bit for bit, by the shorter way for a temperature that all share and by the longer one."""
    tree = TokenTree((9, 8), (0, 1))
    specs = [spec_of((5, 6, 7), 60, eos=(), temperature=each, **extra) for each in temperatures]
    inputs = [DrawInput(Feed(runner.open(spec.token_ids, 2), tree), spec) for spec in specs]
    logits = torch.randn(6, runner.vocabulary_size, generator=torch.Generator().manual_seed(1)) * 5
    contexts = [context for draw_input in inputs for context in row_contexts(draw_input)]
    expected = transform(logits, contexts, runner.vocabulary_size, runner.ops)
    assert torch.equal(scores_behind(runner, logits, inputs), expected)


def test_before_it_collapses_a_row_has_its_edits_and_no_cuts(runner: ModelRunner) -> None:
    """At temperature 0 only; anything else is left as it is."""
    warm = spec_of((5, 6, 7), 60, temperature=0.4, top_k=3)
    draw_input = DrawInput(Feed(runner.open(warm.token_ids, 3)), warm)
    assert before_argmax(draw_input) is draw_input
    sampling = SamplingParameters(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5, logit_bias={9: 4.0})
    cold = DrawInput(draw_input.feed, replace(warm, sampling=sampling))
    assert before_argmax(cold).spec.sampling == SamplingParameters(temperature=1.0, logit_bias={9: 4.0})
    logits = torch.randn(1, runner.vocabulary_size, generator=torch.Generator().manual_seed(1))
    scores = scores_behind(runner, logits, [before_argmax(cold)])
    assert scores.isfinite().all()
    assert math.isclose(scores[0, 9] - scores[0, 8], logits[0, 9] + 4 - logits[0, 8], abs_tol=1e-5)
