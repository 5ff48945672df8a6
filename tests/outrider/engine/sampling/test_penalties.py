"""Biases, minimum length and penalties change the tokens they name, by the amounts documented."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.engine.sampling.transforms import RowContext, edit, is_edited
from outrider.parameters import SamplingParameters

ENDS = frozenset({3, 7})


def row_of(sampling: SamplingParameters, committed: Sequence[int] = (1,), path: tuple[int, ...] = ()) -> RowContext:
    return RowContext(sampling, committed, path, 1, ENDS)


def one(logits: Sequence[float], context: RowContext) -> list[float]:
    scores: list[float] = edit(torch.tensor([logits]), [context])[0].tolist()
    return scores


def support(scores: Sequence[float]) -> set[int]:
    return {token_id for token_id, score in enumerate(scores) if score > -math.inf}


@pytest.mark.parametrize(("output_len", "is_held_back"), [(0, True), (1, True), (2, False), (3, False)])
@pytest.mark.parametrize("path_len", [0, 1, 2])
def test_end_tokens_wait_for_min_tokens(output_len: int, is_held_back: bool, path_len: int) -> None:
    """With min_tokens 2 the third output token may be an end; draft tokens before the row count as output."""
    path = (5,) * min(path_len, output_len)
    committed = [1, 2, *[5] * (output_len - len(path))]
    row = RowContext(SamplingParameters(min_tokens=2), committed, path, 2, ENDS)
    assert support(one([0.0] * 9, row)) == (set(range(9)) - ENDS if is_held_back else set(range(9)))


def test_a_bias_does_not_free_an_end_token() -> None:
    """Minimum length wins over a positive bias on the same token."""
    wanted = SamplingParameters(min_tokens=1, logit_bias={3: 100.0})
    assert 3 not in support(one([0.0] * 9, row_of(wanted)))


def test_repetition_penalty_reads_prompt_and_output_once() -> None:
    """Positive logits are divided and negative ones multiplied, once, however often the token occurred."""
    row = RowContext(SamplingParameters(repetition_penalty=2.0), [0, 1, 1, 2], (3, 3), 2, ENDS)
    scores = one([4.0, -4.0, 2.0, -1.0, 4.0], row)
    assert scores == [-2.0, -12.0, -3.0, -6.0, 0.0]


def test_presence_and_frequency_read_the_output_only() -> None:
    """Prompt tokens are free; output tokens, those of the path included, pay once and once an occurrence."""
    wanted = SamplingParameters(presence_penalty=1.0, frequency_penalty=0.25)
    row = RowContext(wanted, [0, 0, 1, 2], (2, 2), 2, ENDS)
    assert one([0.0] * 4, row) == [0.0, -1.25, -1.75, 0.0]


def test_rows_of_one_session_differ_by_their_paths() -> None:
    """Rows that share the committed tokens are counted once, and each adds its own path only."""
    committed = [0, 1]
    wanted = SamplingParameters(frequency_penalty=1.0)
    rows = [RowContext(wanted, committed, path, 1, ENDS) for path in ((), (2,), (3,), (2, 2))]
    scores = edit(torch.zeros(4, 4), rows)
    assert scores.tolist() == [
        [0.0, -1.0, 0.0, 0.0],
        [0.0, -1.0, -1.0, 0.0],
        [0.0, -1.0, 0.0, -1.0],
        [0.0, -1.0, -2.0, 0.0],
    ]


def test_a_path_is_part_of_the_prefix() -> None:
    """A draft token on the path counts exactly as if it had been committed: what makes a tree row plain decoding."""
    wanted = SamplingParameters(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=4)
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(9))
    on_path = RowContext(wanted, [1, 2], (5, 5, 9), 1, ENDS)
    committed = replace(on_path, committed=[1, 2, 5, 5, 9], path=())
    assert torch.equal(edit(logits, [on_path]), edit(logits, [committed]))


def test_ids_without_a_logit_are_dropped() -> None:
    """Biased, banned or repeated ids past the width of the logits change nothing and raise nothing."""
    wanted = SamplingParameters(logit_bias={9: 5.0}, min_tokens=9, repetition_penalty=1.2)
    assert one([0.0, 1.0], row_of(wanted, [8, 9], (9,))) == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (SamplingParameters(), False),
        (SamplingParameters(temperature=0.5, top_k=3, top_p=0.5, min_p=0.5), False),
        (SamplingParameters(min_tokens=1), False),
        (SamplingParameters(min_tokens=2), True),
        (SamplingParameters(logit_bias={1: 0.5}), True),
        (SamplingParameters(presence_penalty=0.5), True),
        (SamplingParameters(frequency_penalty=-0.5), True),
        (SamplingParameters(repetition_penalty=0.9), True),
    ],
)
def test_only_rows_that_change_are_edited(wanted: SamplingParameters, expected: bool) -> None:
    """With one output token so far, min_tokens 1 is reached and costs nothing."""
    assert is_edited(row_of(wanted, [1, 2])) is expected
