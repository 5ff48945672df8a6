"""Where transformers has the same transform, the support and the distribution are the same."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from outrider.engine.ops import choose_ops
from outrider.engine.sampling.transforms import RowContext, transform
from outrider.parameters import SamplingParameters

OPS = choose_ops(torch.device("cpu"), num_threads=2)
PROMPT, OUTPUT = [4, 9, 9, 17], [5, 5, 9, 21]
ENDS = (0, 33)

Warper = Callable[..., Tensor]
CASES: dict[str, tuple[SamplingParameters, Callable[[], Warper]]] = {
    "repetition": (SamplingParameters(repetition_penalty=1.4), lambda: hf.RepetitionPenaltyLogitsProcessor(1.4)),
    "min_tokens": (
        SamplingParameters(min_tokens=5),
        lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, list(ENDS)),
    ),
    "min_tokens_reached": (
        SamplingParameters(min_tokens=4),
        lambda: hf.MinLengthLogitsProcessor(len(PROMPT) + 4, list(ENDS)),
    ),
    "temperature": (SamplingParameters(temperature=0.6), lambda: hf.TemperatureLogitsWarper(0.6)),
    "top_k": (SamplingParameters(top_k=12), lambda: hf.TopKLogitsWarper(12)),
    "top_p": (SamplingParameters(top_p=0.8), lambda: hf.TopPLogitsWarper(0.8)),
    "min_p": (SamplingParameters(min_p=0.07), lambda: hf.MinPLogitsWarper(0.07)),
    "bias": (
        SamplingParameters(logit_bias={2: 3.5, 40: -100.0}),
        lambda: hf.SequenceBiasLogitsProcessor([[[2], 3.5], [[40], -100.0]]),
    ),
}


def ours(logits: Tensor, wanted: SamplingParameters) -> Tensor:
    """Distributions [R, V] float64; half of the output stands on the path, which must make no difference."""
    row = RowContext(wanted, PROMPT + OUTPUT[:2], tuple(OUTPUT[2:]), len(PROMPT), frozenset(ENDS))
    return transform(logits, [row] * len(logits), logits.shape[1], OPS).double().softmax(dim=-1)


def theirs(logits: Tensor, warpers: list[Warper]) -> Tensor:
    """Distributions [R, V] of transformers, in float64 so that its own rounding does not count."""
    scores, input_ids = logits.double(), torch.tensor([PROMPT + OUTPUT] * len(logits))
    for warper in warpers:
        scores = warper(input_ids, scores)
    return scores.softmax(dim=-1)


def check(logits: Tensor, wanted: SamplingParameters, warpers: list[Warper]) -> None:
    result, expected = ours(logits, wanted), theirs(logits, warpers)
    assert torch.equal(result > 0, expected > 0)
    assert (result - expected).abs().max() < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_each_transform_agrees_with_transformers(name: str) -> None:
    """One transform at a time, eight random rows."""
    wanted, make = CASES[name]
    check(torch.randn(8, 200, generator=torch.Generator().manual_seed(1)) * 3, wanted, [make()])


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    repetition_penalty=st.floats(0.5, 2.0),
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(1, 150),
    top_p=st.floats(0.05, 0.99),
    min_p=st.floats(0.001, 0.5),
)
def test_chains_of_transforms_agree_with_transformers(
    seed: int, repetition_penalty: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """All of them together, in the order that both document."""
    wanted = SamplingParameters(
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        min_tokens=9,
        logit_bias={2: 3.5, 40: -2.0},
    )
    warpers: list[Warper] = [
        hf.SequenceBiasLogitsProcessor([[[2], 3.5], [[40], -2.0]]),
        hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, list(ENDS)),
        hf.RepetitionPenaltyLogitsProcessor(repetition_penalty),
        hf.TemperatureLogitsWarper(temperature),
        hf.TopKLogitsWarper(top_k),
        hf.TopPLogitsWarper(top_p),
        hf.MinPLogitsWarper(min_p),
    ]
    check(torch.randn(2, 150, generator=torch.Generator().manual_seed(seed)) * 3, wanted, warpers)
