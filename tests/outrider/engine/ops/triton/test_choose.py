"""Tokens that the kernels for CUDA choose: those of the CPU's kernels, and ids below 0 for faults."""

from pathlib import Path

import pytest
import torch
from support.devices.kernels import KernelOps, altered
from support.models.engine_cases import keys_of, native
from torch import Tensor

from outrider.engine.ops import triton_ops
from outrider.engine.ops.triton import choose

TEMPERATURES = torch.tensor([0.0, 1.0, 0.7, 0.05, 3.0, 0.0], dtype=torch.float64)


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces as short as these vocabularies ask, so that there are several."""
    monkeypatch.setattr(choose, "PIECE", 64)
    monkeypatch.setattr(choose, "BLOCK", 32)


small_pieces = pytest.mark.usefixtures("_small_pieces")


def rows_of(num_tokens: int, width: int, steepness: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that are NaN past the vocabulary, temperatures, and keys."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(TEMPERATURES), width, generator=generator) * steepness
    logits[:, num_tokens:] = torch.nan
    return logits, TEMPERATURES, keys_of(len(TEMPERATURES), generator)


def assert_like_the_cpu(logits: Tensor, temperatures: Tensor, keys: Tensor, num_tokens: int) -> None:
    expected = native().choose(logits, temperatures, keys, num_tokens)
    assert KernelOps().choose(logits, temperatures, keys, num_tokens).tolist() == expected.tolist()


@small_pieces
@pytest.mark.parametrize("steepness", [0.0, 4.0, 60.0])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200])
def test_choices_are_those_of_the_cpu(num_tokens: int, steepness: float) -> None:
    """At every temperature, of flat rows, whose scores are all ties, and of steep ones, whose pieces may be skipped."""
    assert_like_the_cpu(*rows_of(num_tokens, num_tokens + 3, steepness, num_tokens), num_tokens)


@pytest.mark.slow
def test_choices_of_whole_pieces_are_those_of_the_cpu() -> None:
    """As a card has them: one piece, and a bit of another."""
    assert_like_the_cpu(*rows_of(5003, 5003, 4.0, 1), 5003)


@small_pieces
@pytest.mark.parametrize("places", [(7, 7), (3, 64), (70, 299), (0, 200)])
def test_the_lowest_of_equal_tokens_wins(places: tuple[int, int]) -> None:
    """In one block, in two of them, and in other pieces."""
    logits, _, keys = rows_of(300, 300, 1.0, 5)
    logits[:, list(places)] = 9.0
    chosen = KernelOps().choose(logits, torch.zeros(len(logits), dtype=torch.float64), keys, 300)
    assert chosen.tolist() == [min(places)] * len(logits)


@small_pieces
def test_tokens_at_minus_infinity_are_never_chosen() -> None:
    """All but two of them in each row, which lie in other pieces; whole pieces have none."""
    logits, temperatures, keys = rows_of(300, 300, 4.0, 6)
    left = torch.randint(300, (len(logits), 2), generator=torch.Generator().manual_seed(1))
    masked = torch.full_like(logits, -torch.inf).scatter(1, left, logits.gather(1, left))
    assert_like_the_cpu(masked, temperatures, keys, 300)
    chosen = KernelOps().choose(masked, temperatures, keys, 300)
    assert bool((left == chosen[:, None]).any(1).all())


def assert_faults_are_told(place: int = 100) -> None:
    """A row's fault is its own, whatever its temperature; one past the vocabulary is none."""
    logits, _, keys = rows_of(300, 303, 4.0, 7)
    for temperature in (0.0, 1.0, 0.7):
        temperatures = torch.full((len(logits),), temperature, dtype=torch.float64)
        faulty = logits.clone()
        faulty[0, place], faulty[1, place], faulty[2, :300] = torch.nan, torch.inf, -torch.inf
        faulty[4, :300] = -torch.inf
        faulty[4, place] = torch.nan
        chosen = KernelOps().choose(faulty, temperatures, keys, 300)
        fine = torch.tensor([3, 5])
        expected = native().choose(logits[fine], temperatures[fine], keys[fine], 300)
        assert chosen.tolist() == [-2, -2, -1, int(expected[0]), -2, int(expected[1])]


@small_pieces
@pytest.mark.parametrize("place", [0, 299])
def test_faults_are_ids_below_zero(place: int) -> None:
    """NaN and infinity are -2 wherever they are, a row of nothing but -inf is -1, and other rows are as ever."""
    assert_faults_are_told(place)


def check_all() -> None:
    """Faults, choices of every kind of row, and ties."""
    assert_faults_are_told()
    for seed in range(3):
        assert_like_the_cpu(*rows_of(200, 203, (0.1, 0.0, 4.0)[seed], seed), 200)
    test_the_lowest_of_equal_tokens_wins((3, 64))


@small_pieces
def test_the_check_passes_without_a_fault() -> None:
    """What the planted ones are compared with."""
    check_all()


@small_pieces
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # NaN passes for a small number.
        ('(~(values < float("inf")))', '(values == float("inf"))'),
        # The last of equal tokens.
        ("(other_token < token)", "(other_token > token)"),
        # Tokens of no piece count.
        ('mask=ids < num_tokens, other=float("-inf")', 'mask=ids < row_stride, other=float("-inf")'),
        # The noise of a place in its piece.
        ("gumbel(key, ids)", "gumbel(key, ids - piece * PIECE)"),
        # A piece is skipped that noise would have lifted.
        ("if most > -NOISE_RANGE:", "if most > -1.0:"),
    ],
    ids=["NaN", "ties", "padding", "noise", "skipped pieces"],
)
def test_planted_faults_are_found(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is an easy slip in these kernels."""
    changed = altered(choose, old, new, tmp_path)
    changed.PIECE, changed.BLOCK = 64, 32  # type: ignore[attr-defined]
    monkeypatch.setattr(triton_ops, "choose", changed)
    with pytest.raises(AssertionError):
        check_all()
