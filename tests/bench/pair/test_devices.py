"""Simulated pairs and the formulas for them, worked out by hand and by drawing."""

import random

import pytest

from bench.pair.devices import ACCEPTANCE, DevicePair, PairLoad, hit_rate, hosted, models_of, plain, remote, run_ahead
from outrider.errors import InvalidRequest
from outrider.model_files.model_names import embedded_model, parse, parse_simulated


def load(streams: int = 1, one_way_s: float = 0.0, name: str = "8b") -> PairLoad:
    """A pair with texts of 100 tokens."""
    return PairLoad(DevicePair.named(name), streams, 100, one_way_s)


def test_pairs_are_models_that_services_take() -> None:
    """By their names, stretched or not; in their own time both are the same."""
    pair = DevicePair.named("70b", stretch=4)
    assert parse_simulated(pair.target.name) == pair.target
    assert parse_simulated(pair.draft.name) == pair.draft
    assert pair.target.name == "sim:h100-70b@rows=0.13,stretch=4"
    assert pair.real == DevicePair.named("70b")
    assert pair.target.step_s(7, 100, 700) == pytest.approx(4 * pair.real.target.step_s(7, 100, 700))
    with pytest.raises(InvalidRequest, match="--pairs is '9b', but must be of 8b, 70b, 200m, 200m-10m"):
        DevicePair.named("9b")


def test_pairs_that_compute_have_no_stretch() -> None:
    """A target with the embedded draft, or with one of about a twentieth of its numbers."""
    assert models_of("200m", 4.0) == ("sized:200m", embedded_model("draft"))
    target, draft = models_of("200m-10m", 1.0)
    sizes = [each.shape.parameter_count for each in map(parse, (target, draft)) if each]
    assert 15 < sizes[0] / sizes[1] < 25
    assert models_of("8b", 4.0)[0] == "sim:h100-8b@rows=0.13,stretch=4"


def test_a_hit_is_an_outcome_among_the_branches() -> None:
    """Two guesses: outcomes drawn one by one fall among the likeliest four as often as the sum says."""
    chances = {(kept, rank): 0.75**kept * ACCEPTANCE[rank] for kept in range(3) for rank in range(kept < 2, 8)}
    likeliest = sorted(chances, key=chances.__getitem__, reverse=True)[:4]
    generator, hits, draws = random.Random(3), 0, 50_000
    for _ in range(draws):
        kept, rank = 0, 0
        while (rank := generator.choices(range(9), (*ACCEPTANCE, 1 - sum(ACCEPTANCE)))[0]) == 0 and kept < 2:
            kept += 1
        hits += (kept, rank) in likeliest
    assert hits / draws == pytest.approx(hit_rate(ACCEPTANCE, 2, 4), abs=0.01)


def test_more_branches_hit_more_and_never_all() -> None:
    """Thirty-two reach three quarters up to seven guesses."""
    rates = [hit_rate(ACCEPTANCE, 7, branches) for branches in (1, 8, 32, 1000)]
    assert rates == sorted(rates)
    assert 0.75 < rates[2] <= rates[3] <= sum(ACCEPTANCE)


def test_formulas_by_hand() -> None:
    """One stream of 8B and two guesses: plain, in turns, with four ways of a millisecond, and on one device."""
    here, there = load(), load(one_way_s=0.001)
    tokens = 1 + 0.75 + 0.75**2
    verdict_s, guess_s = here.target_s(3), here.draft_s(1)
    assert plain(here, 0, 0) == pytest.approx(1 / here.target_s(1))
    assert remote(here, 2, 0) == hosted(here, 2, 0) == pytest.approx(tokens / (verdict_s + 2 * guess_s))
    assert remote(there, 2, 0) == pytest.approx(tokens / (verdict_s + 2 * guess_s + 0.004))
    assert hosted(there, 2, 0) == hosted(here, 2, 0)


def test_run_ahead_is_between_the_turns_and_all_hidden() -> None:
    """More than in turns where the target is long, and never more than a verdict after another, all of them whole."""
    for one_way_s in (0.0, 0.001):
        large = load(one_way_s=one_way_s, name="70b")
        for count in (2, 5):
            hidden = large.tokens(count) / large.target_s(count + 1)
            assert remote(large, count, 32) < run_ahead(large, count, 32) < hidden
