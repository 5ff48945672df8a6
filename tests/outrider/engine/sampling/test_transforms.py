"""The transforms are the documented ones, in the documented order, and no row sees another one."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.noise import Purpose, noise_key
from outrider.engine.ops import Ops, choose_ops
from outrider.engine.sampling.transforms import NUCLEUS_WIDTH, RowContext, transform
from outrider.parameters import SamplingParameters

OPS: Ops = choose_ops(torch.device("cpu"), num_threads=2)
ENDS = frozenset({3, 7})
INF = math.inf

PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([0.1, 0.55, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.6, 0.0, 1.1]),
    frequency_penalty=st.sampled_from([-0.3, 0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, 59), st.sampled_from([-100.0, -1.5, 0.0, 2.25]), max_size=5),
    min_tokens=st.integers(0, 6),
)
TOKENS = st.lists(st.integers(0, 39), max_size=8)


@st.composite
def contexts(draw: st.DrawFn) -> RowContext:
    prompt = draw(st.lists(st.integers(0, 39), min_size=1, max_size=8))
    return RowContext(draw(PARAMETERS), prompt + draw(TOKENS), tuple(draw(TOKENS)), len(prompt), ENDS)


def row_of(sampling: SamplingParameters, committed: Sequence[int] = (1,), path: tuple[int, ...] = ()) -> RowContext:
    return RowContext(sampling, committed, path, 1, ENDS)


def random_logits(num_rows: int, num_tokens: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) * spread


def one(logits: Sequence[float] | Tensor, context: RowContext, vocabulary_size: int | None = None) -> list[float]:
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    scores: list[float] = transform(row, [context], vocabulary_size or row.shape[1], OPS)[0].tolist()
    return scores


def support(scores: Sequence[float]) -> set[int]:
    return {token_id for token_id, score in enumerate(scores) if score > -INF}


def distribution(scores: Sequence[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def slow(logits: Sequence[float], row: RowContext, vocabulary_size: int) -> list[float]:
    """The documented transforms, one token at a time, in double precision: the distribution of a row."""
    wanted = row.sampling
    prefix = [*row.committed, *row.path]
    output = prefix[row.prompt_len :]
    scores = {}
    for token_id, logit in enumerate(logits[:vocabulary_size]):
        score = logit + wanted.logit_bias.get(token_id, 0.0)
        if len(output) < wanted.min_tokens and token_id in row.end_token_ids:
            score = -INF
        if token_id in prefix:
            score = score / wanted.repetition_penalty if score > 0 else score * wanted.repetition_penalty
        score -= wanted.presence_penalty * (token_id in output) + wanted.frequency_penalty * output.count(token_id)
        scores[token_id] = score
    return slow_filters(scores, wanted, len(logits))


def slow_filters(scores: dict[int, float], wanted: SamplingParameters, num_tokens: int) -> list[float]:
    best = max(scores.values())
    if wanted.temperature == 0:
        winner = min(token_id for token_id, score in scores.items() if score == best)
        return [float(token_id == winner) for token_id in range(num_tokens)]
    weights = {token_id: math.exp((score - best) / wanted.temperature) for token_id, score in scores.items()}
    order = sorted((token_id for token_id in weights if weights[token_id] > 0), key=lambda i: (-weights[i], i))
    order = order[: wanted.top_k or None]
    total, mass, nucleus = math.fsum(weights[token_id] for token_id in order), 0.0, []
    for token_id in order:
        if mass < wanted.top_p * total or wanted.top_p == 1:
            nucleus.append(token_id)
        mass += weights[token_id]
    kept = [token_id for token_id in nucleus if weights[token_id] >= wanted.min_p * weights[order[0]]]
    total = math.fsum(weights[token_id] for token_id in kept)
    return [weights[token_id] / total if token_id in kept else 0.0 for token_id in range(num_tokens)]


@pytest.mark.slow
@settings(max_examples=150, derandomize=True)
@given(rows=st.lists(contexts(), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_any_parameters_give_the_documented_distribution(rows: list[RowContext], seed: int) -> None:
    """A batch of mixed rows agrees with a slow transcription of the documentation."""
    logits = random_logits(len(rows), 50, seed)
    scores = transform(logits, rows, 45, OPS)
    assert scores.dtype == torch.float32
    for row, values, result in zip(rows, logits.tolist(), scores.tolist(), strict=True):
        expected = slow(values, row, 45)
        assert support(result) == {token_id for token_id, prob in enumerate(expected) if prob > 0}
        assert distribution(result) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(rows=st.lists(contexts(), min_size=17, max_size=17), seed=st.integers(0, 10**6))
def test_a_row_is_bitwise_the_same_alone_and_among_sixteen_others(rows: list[RowContext], seed: int) -> None:
    """Row invariance: mixed parameters beside a row change not one bit of its scores, nor the token drawn."""
    logits = random_logits(17, 300, seed)
    scores = transform(logits, rows, 299, OPS)
    keys = torch.tensor([noise_key(seed, number, Purpose.TOKEN) for number in range(17)])
    drawn = OPS.draw(scores, keys)
    for number, row in enumerate(rows):
        alone = transform(logits[number : number + 1].clone(), [row], 299, OPS)
        assert torch.equal(alone[0], scores[number])
        assert OPS.draw(alone, keys[number : number + 1])[0] == drawn[number]


def test_wide_rows_are_invariant_too() -> None:
    """A peaked and a flat row share a batch: the nucleus of one is searched further because of the other."""
    logits = torch.cat((random_logits(8, 5000, 1, spread=6.0), random_logits(9, 5000, 2, spread=0.01)))
    rows = [row_of(SamplingParameters(top_p=0.95, top_k=4000 * (number % 2), temperature=0.9)) for number in range(17)]
    scores = transform(logits, rows, 5000, OPS)
    for number, row in enumerate(rows):
        assert torch.equal(transform(logits[number : number + 1].clone(), [row], 5000, OPS)[0], scores[number])


def test_neutral_parameters_cost_nothing() -> None:
    """Rows that need nothing are returned as they are, without a copy, and so are those beside rows that do."""
    logits = random_logits(2, 20, 4)
    neutral, penalised = row_of(SamplingParameters()), row_of(SamplingParameters(repetition_penalty=1.5))
    assert transform(logits, [neutral, neutral], 20, OPS) is logits
    assert torch.equal(transform(logits, [neutral, penalised], 20, OPS)[0], logits[0])


def test_the_logits_are_not_changed() -> None:
    """The caller keeps the raw logits, which log-probabilities are made of."""
    logits = random_logits(1, 20, 5)
    before = logits.clone()
    wanted = SamplingParameters(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, logit_bias={2: 1.0}, min_tokens=3)
    transform(logits, [row_of(wanted)], 10, OPS)
    assert torch.equal(logits, before)


def test_ids_past_the_vocabulary_are_never_in_the_support() -> None:
    """Padding of the logits is masked for neutral rows, greedy rows and biased ids alike."""
    logits = [0.0, 1.0, 2.0, 9.0, 9.0]
    assert one(logits, row_of(SamplingParameters()), 3) == [0.0, 1.0, 2.0, -INF, -INF]
    assert support(one(logits, row_of(SamplingParameters(temperature=0)), 3)) == {2}
    assert support(one(logits, row_of(SamplingParameters(logit_bias={4: 100.0}, top_k=4)), 3)) == {0, 1, 2}


def test_temperature_zero_is_one_hot_on_the_lowest_of_equal_logits() -> None:
    """Greedy decoding is a distribution with one token, score 0, and ties go to the lowest id."""
    scores = one([1.0, 5.0, 2.0, 5.0], row_of(SamplingParameters(temperature=0, top_k=2, top_p=0.5, min_p=0.5)))
    assert scores == [-INF, 0.0, -INF, -INF]


def test_temperature_zero_follows_the_penalties() -> None:
    """The largest logit is looked for after biases and penalties."""
    wanted = SamplingParameters(temperature=0, presence_penalty=2.0)
    assert support(one([1.0, 5.0, 4.0, 0.0], row_of(wanted, [0, 1]))) == {2}


def test_top_k_keeps_the_lowest_ids_of_equal_tokens() -> None:
    """Exactly k tokens stay, whatever ties there are at the border."""
    assert support(one([1.0, 3.0, 1.0, 1.0, 2.0], row_of(SamplingParameters(top_k=3)))) == {0, 1, 4}
    assert support(one([0.0] * 5, row_of(SamplingParameters(top_k=2)))) == {0, 1}


def test_top_p_keeps_the_token_that_crosses_and_the_lowest_ids() -> None:
    """The smallest set that reaches the mass: 0.5 + 0.25 reach 0.75, and equal tokens enter by id."""
    logits = [math.log(share) for share in (0.125, 0.5, 0.125, 0.25)]
    assert support(one(logits, row_of(SamplingParameters(top_p=0.7)))) == {1, 3}
    assert support(one(logits, row_of(SamplingParameters(top_p=0.8)))) == {0, 1, 3}
    assert support(one([0.0] * 8, row_of(SamplingParameters(top_p=0.25)))) == {0, 1}
    assert support(one(logits, row_of(SamplingParameters(top_p=1e-9)))) == {1}


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    """After top-k of 2 the most probable token holds two thirds, and alone reaches 0.6."""
    logits = [math.log(share) for share in (0.125, 0.5, 0.125, 0.25)]
    assert support(one(logits, row_of(SamplingParameters(top_p=0.6)))) == {1, 3}
    assert support(one(logits, row_of(SamplingParameters(top_p=0.6, top_k=2)))) == {1}


@pytest.mark.parametrize("num_tokens", [NUCLEUS_WIDTH - 1, NUCLEUS_WIDTH, NUCLEUS_WIDTH + 1, 20 * NUCLEUS_WIDTH])
def test_a_wide_nucleus_is_found_whole(num_tokens: int) -> None:
    """A flat distribution keeps nine tenths of its tokens, the lowest ids, also past the first search."""
    kept = support(one([0.0] * num_tokens, row_of(SamplingParameters(top_p=0.9))))
    assert kept == set(range(math.ceil(0.9 * num_tokens)))


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    """Tokens of at least a quarter of the best one stay; min_p 1 keeps the best and its equals."""
    logits = [0.0, math.log(0.3), math.log(0.2), 0.0]
    assert support(one(logits, row_of(SamplingParameters(min_p=0.25)))) == {0, 1, 3}
    assert support(one(logits, row_of(SamplingParameters(min_p=1.0)))) == {0, 3}


@pytest.mark.parametrize(
    "wanted",
    [
        SamplingParameters(temperature=1e-320),
        SamplingParameters(temperature=1e-12, top_k=3, top_p=0.9, min_p=0.1),
        SamplingParameters(repetition_penalty=1e-320),
        SamplingParameters(repetition_penalty=1e-320, temperature=1e-300, frequency_penalty=-2.0),
        SamplingParameters(repetition_penalty=100.0, logit_bias={1: 100.0, 2: -100.0}, temperature=100.0),
    ],
)
def test_no_legal_parameter_overflows(wanted: SamplingParameters) -> None:
    """The smallest and largest legal values leave scores that can be drawn from."""
    scores = transform(random_logits(1, 30, 6) * 30, [row_of(wanted, [1, 2, 5, 9])], 30, OPS)
    assert torch.isfinite(scores.amax())
    assert not scores.isnan().any()
    assert torch.isfinite(scores[0, OPS.draw(scores, torch.tensor([5]))]).all()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_broken_row_is_refused_and_not_drawn_from(temperature: float, top_p: float) -> None:
    """Logits that are NaN raise ValueError at the latest at the draw, under every transform."""
    row = row_of(SamplingParameters(temperature=temperature, top_p=top_p))
    with pytest.raises(ValueError, match="finite"):
        OPS.draw(transform(torch.full((1, 8), math.nan), [row], 8, OPS), torch.tensor([1]))


def test_the_number_of_rows_must_agree() -> None:
    """A context too few is the caller's bug, and raises ValueError."""
    with pytest.raises(ValueError, match="1 contexts for 2 rows"):
        transform(torch.zeros(2, 4), [row_of(SamplingParameters())], 4, OPS)


def test_no_rows_are_no_work() -> None:
    """An empty batch comes back empty."""
    assert transform(torch.zeros(0, 4), [], 3, OPS).shape == (0, 4)


def test_a_wrong_order_would_be_found() -> None:
    """Top-p before temperature keeps another support than the documented order does, so the tests can see it."""
    logits, wanted = random_logits(1, 50, 8), SamplingParameters(temperature=0.3, top_p=0.9)
    right = transform(logits, [row_of(wanted)], 50, OPS)
    first = transform(logits, [row_of(wanted.model_copy(update={"temperature": 1.0}))], 50, OPS)
    wrong = transform(first, [row_of(SamplingParameters(temperature=0.3))], 50, OPS)
    assert support(right[0].tolist()) != support(wrong[0].tolist())
