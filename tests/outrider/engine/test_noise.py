"""The noise is the published function, the same everywhere, and good enough that neighbouring draws are independent."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from support.models.engine_cases import numpy_gumbel

from outrider.engine import noise
from outrider.engine.noise import GAMMA, Purpose, noise_key, round_key

VECTORS = json.loads(Path(__file__).with_name("noise_vectors.json").read_text())
DRAWS = VECTORS["draws"]
WIDEST = 1 + max(token["token_id"] for draw in DRAWS for token in draw["tokens"])
# 512 seeds x 8 positions x 4 purposes x 64 ids.
SHAPE = (512, 8, 4, 64)

Words = npt.NDArray[np.uint64]
Hash = Callable[[int, int, int], int]


def unsigned(keys: list[int]) -> Words:
    return np.array(keys, dtype=np.int64).view(np.uint64)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE: equality of the noise on CPU and GPU is not tested on this machine")
    return torch.device(request.param)


def test_keys_are_those_of_the_vectors() -> None:
    """The pure Python key is exact for ordinary, negative and extreme seeds."""
    for draw in DRAWS:
        assert noise_key(draw["seed"], draw["position"], Purpose(draw["purpose"])) == draw["key"]


def test_keys_of_rounds_are_those_of_the_vectors() -> None:
    """Seeds as extreme, and positions at the beginning of a round and after it."""
    for each in VECTORS["rounds"]:
        purpose = Purpose(each["purpose"])
        assert round_key(each["seed"], each["base_len"], each["position"], purpose) == each["key"]


def test_torch_meets_the_vectors(device: torch.device) -> None:
    """Words and uniforms are exact, Gumbel values within 2 units, on every device."""
    keys = torch.tensor([draw["key"] for draw in DRAWS], device=device)
    words = noise.hash_words(keys, WIDEST).cpu().numpy().view(np.uint64)
    check_vectors(words, noise.uniforms(keys, WIDEST).cpu().numpy(), noise.gumbel(keys, WIDEST).cpu().numpy())


def test_numpy_meets_the_vectors() -> None:
    """The numpy twins meet the same vectors."""
    keys = unsigned([draw["key"] for draw in DRAWS])
    words, uniforms = noise.numpy_hash_words(keys, WIDEST), noise.numpy_uniforms(keys, WIDEST)
    check_vectors(words, uniforms, numpy_gumbel(keys, WIDEST))


def check_vectors(words: Words, uniforms: noise.Floats, gumbel: noise.Floats) -> None:
    for row, draw in enumerate(DRAWS):
        for token in draw["tokens"]:
            token_id, expected = token["token_id"], float.fromhex(token["gumbel"])
            assert int(words[row, token_id]) == int(token["word"], 16)
            assert uniforms[row, token_id] == float.fromhex(token["uniform"])
            assert abs(gumbel[row, token_id] - expected) <= 2 * unit(np.float64(expected))


def unit(values: npt.ArrayLike) -> noise.Floats:
    """A unit in the last place of the values, or of 1 where they are smaller."""
    return np.spacing(np.maximum(np.abs(values), 1.0))


def test_words_are_the_published_splitmix64_sequence() -> None:
    """Key 0 yields the reference outputs of splitmix64 with seed 0, so the finaliser is the real one."""
    words = noise.numpy_hash_words(np.zeros(1, dtype=np.uint64), 3)[0]
    assert [f"{word:016x}" for word in words.tolist()] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]


def test_torch_and_numpy_agree_on_random_keys(device: torch.device) -> None:
    """The signed arithmetic of torch has the bits of the unsigned arithmetic of numpy, sign bit included."""
    keys = torch.randint(-(2**63), 2**63 - 1, (64,), generator=torch.Generator().manual_seed(3))
    unsigned_keys, on_device = keys.numpy().view(np.uint64), keys.to(device)
    words = noise.hash_words(on_device, 1000).cpu().numpy().view(np.uint64)
    assert np.array_equal(words, noise.numpy_hash_words(unsigned_keys, 1000))
    assert np.array_equal(noise.uniforms(on_device, 1000).cpu().numpy(), noise.numpy_uniforms(unsigned_keys, 1000))
    gumbel = numpy_gumbel(unsigned_keys, 1000)
    assert np.all(np.abs(noise.gumbel(on_device, 1000).cpu().numpy() - gumbel) <= 2 * unit(gumbel))


@pytest.mark.parametrize("count", [1, noise.FEW_DRAWS - 1, noise.FEW_DRAWS, 200])
def test_token_keys_are_those_of_each_draw(count: int) -> None:
    """Whether few or many are made at once, with seeds and positions of any size."""
    seeds = [-5, 0, 2**63, 2**64 - 1, 77] * 40
    positions = [0, 1, 4095, 2**31 - 1, 7, 12, 100] * 30
    expected = [noise_key(seeds[draw], positions[draw], Purpose.TOKEN) for draw in range(count)]
    assert noise.token_keys(seeds[:count], positions[:count]).tolist() == expected


@pytest.mark.parametrize("count", [0, 1, 32, 33, 500])
def test_first_uniforms_are_those_of_id_0(count: int) -> None:
    """However many are asked for at once, and with whichever arithmetic."""
    keys = [noise_key(seed, 3, Purpose.ACCEPTANCE) for seed in range(count)]
    expected = noise.uniforms(torch.tensor(keys, dtype=torch.int64), 1)[:, 0].numpy()
    assert np.array_equal(noise.first_uniforms(keys), expected)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Words and uniforms of a key are the same alone, in a batch, and for a wider vocabulary."""
    keys = torch.tensor([noise_key(5, position, Purpose.TOKEN) for position in range(9)])
    batch = noise.uniforms(keys, 300)
    assert all(torch.equal(batch[row, :77], noise.uniforms(keys[row : row + 1], 77)[0]) for row in range(9))


def test_gumbel_is_finite_at_both_ends_of_the_uniforms() -> None:
    """The smallest and the largest uniform lie inside (0, 1), so that no token ever gets infinite noise."""
    ends = np.array([0.5, 2.0**52 - 0.5]) * noise.UNIFORM_STEP
    assert ends[0] > 0
    assert ends[1] < 1
    assert np.isfinite(-np.log(-np.log(ends))).all()


def test_gumbel_follows_its_distribution() -> None:
    """Kolmogorov and Smirnov's test against the standard Gumbel distribution, with a fixed seed."""
    keys = unsigned([noise_key(11, position, Purpose.TOKEN) for position in range(200)])
    assert stats.kstest(numpy_gumbel(keys, 500).ravel(), stats.gumbel_r.cdf).pvalue > 1e-3


def words_of(hash_key: Hash, mix_token: Callable[[Words, int], Words]) -> Words:
    seeds, positions, purposes, num_tokens = SHAPE
    grid = [(seed, position, purpose) for seed in range(seeds) for position in range(positions) for purpose in range(4)]
    keys = np.array([hash_key(*point) % 2**64 for point in grid], dtype=np.uint64)
    return mix_token(keys, num_tokens).reshape(seeds, positions, purposes, num_tokens)


def faults(words: Words) -> list[str]:
    """Names of the tests of independence that a grid of words fails; each is passed by chance with 1 - 1e-5 or more."""
    found = [] if len(np.unique(words)) == words.size else ["repeated words"]
    if chance(np.bincount((words >> np.uint64(56)).ravel().astype(int), minlength=256)) < 1e-5:
        found.append("bytes")
    for axis, name in enumerate(("seed", "position", "purpose", "token")):
        size = words.shape[axis]
        first, second = words.take(range(size - 1), axis).ravel(), words.take(range(1, size), axis).ravel()
        found += [f"{name}: {fault}" for fault in neighbour_faults(first, second)]
    return found


def neighbour_faults(first: Words, second: Words) -> list[str]:
    found, count = [], len(first)
    flips = np.array([((first ^ second) >> np.uint64(bit) & np.uint64(1)).sum() for bit in range(64)])
    ones = np.array([(first >> np.uint64(bit) & np.uint64(1)).sum() for bit in range(64)])
    # 128 bits are looked at: 6 standard deviations are passed by chance less than once in a million.
    if np.abs(ones - count / 2).max() > 3 * np.sqrt(count):
        found.append("bit balance")
    if np.abs(flips - count / 2).max() > 3 * np.sqrt(count):
        found.append("bit flips")
    pairs = (first >> np.uint64(60)) * np.uint64(16) + (second >> np.uint64(60))
    if chance(np.bincount(pairs.astype(int), minlength=256)) < 1e-5:
        found.append("pairs")
    correlation = np.corrcoef(first.astype(np.float64), second.astype(np.float64))[0, 1]
    if abs(correlation) * np.sqrt(count) > 5:
        found.append("correlation")
    return found


def chance(counts: npt.NDArray[np.int64]) -> float:
    """The smaller tail of the chi-square statistic: a hash may also be too even."""
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    distribution = stats.chi2(len(counts) - 1)
    return float(min(distribution.sf(statistic), distribution.cdf(statistic)))


@pytest.mark.slow
def test_neighbouring_draws_are_independent() -> None:
    """Consecutive seeds, positions, purposes and ids pass tests of bits, pairs and correlation; no word repeats."""
    real = words_of(lambda seed, position, purpose: noise_key(seed, position, Purpose(purpose)), noise.numpy_hash_words)
    assert faults(real) == []


def words_of_rounds(hash_key: Hash) -> Words:
    """The first axis is the round instead of the seed."""
    return words_of(hash_key, noise.numpy_hash_words)


def of_round(base_len: int, position: int, purpose: int) -> int:
    return round_key(77, base_len, position, Purpose(purpose))


@pytest.mark.slow
def test_rounds_are_independent() -> None:
    """Consecutive rounds, the positions and purposes in them and the ids after pass the same tests."""
    assert faults(words_of_rounds(of_round)) == []


@pytest.mark.slow
def test_rounds_share_nothing_with_plain_draws() -> None:
    """No word of a round is one of a plain draw with the same seed, and no key of a round is such a word."""
    rounds = words_of_rounds(of_round)
    plain = words_of(lambda _, position, purpose: noise_key(77, position, Purpose(purpose)), noise.numpy_hash_words)
    keys = [of_round(*point) % 2**64 for point in np.ndindex(512, 8, 4)]
    assert not np.isin(plain, rounds).any()
    assert not np.isin(plain, np.array(keys, dtype=np.uint64)).any()


def of_lane(lane: int, position: int, purpose: int) -> int:
    return round_key(77, 5, position, Purpose(purpose), lane)


@pytest.mark.slow
def test_lanes_are_independent() -> None:
    """The rows of a tree at one depth draw as if each were in a round of its own."""
    assert faults(words_of_rounds(of_lane)) == []


@pytest.mark.slow
def test_a_forgotten_lane_is_found() -> None:
    """Siblings that are drawn with one key repeat each other, and the test says so."""
    assert "repeated words" in faults(words_of_rounds(lambda _, *place: of_lane(0, *place)))


@pytest.mark.slow
def test_a_key_without_the_round_is_found() -> None:
    """The draft's noise of a position must not come back in a later round."""
    found = faults(words_of_rounds(lambda _, position, purpose: noise_key(77, position, Purpose(purpose))))
    assert "repeated words" in found


@pytest.mark.slow
def test_an_additive_key_is_found() -> None:
    """A key that adds its parts lets (seed + 1, position) repeat (seed, position + 1), and the test says so."""

    def additive(seed: int, position: int, purpose: int) -> int:
        return GAMMA * (seed + position + purpose)

    assert "repeated words" in faults(words_of(additive, noise.numpy_hash_words))


@pytest.mark.slow
def test_a_weyl_sequence_is_found() -> None:
    """Words without the finaliser are even and distinct, but consecutive ids are correlated, and the test says so."""

    def weyl(keys: Words, num_tokens: int) -> Words:
        return keys[:, None] + np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(GAMMA)

    found = faults(words_of(lambda seed, position, purpose: noise_key(seed, position, Purpose(purpose)), weyl))
    assert "token: correlation" in found
    assert "seed: correlation" not in found
