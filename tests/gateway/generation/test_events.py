"""Counts over rounds: what a sample cost, in all and by drafter."""

from dataclasses import asdict, replace

from support.services.markov import merged_round, round_of

from gateway.generation.events import SampleCounts, SpeculationCounts
from gateway.rounds.round import FallbackReason, Round, TokenOrigin


def a_round(accepted: int = 0, *, is_first: bool = False) -> Round:
    """A round whose guesses were all accepted; without any because there was no draft."""
    origins = [TokenOrigin.ACCEPTED] * accepted + [TokenOrigin.PLAIN]
    reason = None if accepted else FallbackReason.DRAFT_ABSENT
    counts = {"draft_count": accepted, "accepted_count": accepted, "evaluated_count": accepted}
    return round_of(range(len(origins)), origins, **counts, fallback_reason=reason, is_first=is_first)


def computed(numerics_id: str, *, is_first: bool = False) -> Round:
    """A round of a target with these numerics, which was opened again in it and had drifted."""
    found = a_round(is_first=is_first)
    found.verdict = replace(found.verdict, numerics_id=numerics_id, reopens=1, prefix_len=3)
    return found


def counted(*rounds: Round) -> SampleCounts:
    """Counts of rounds that came a hundredth of a second apart."""
    counts = SampleCounts()
    for number, committed in enumerate(rounds, start=1):
        counts.add(committed, 10_000 * number)
    return counts


def test_figures_leave_out_the_prompts_own_pass() -> None:
    """The first verdict is no round; the others are counted as the protocol says."""
    figures = counted(a_round(is_first=True), a_round(2), a_round()).speculation.figures
    assert (figures.rounds, figures.drafts, figures.fallback_rounds) == (2, 1, 1)
    assert (figures.draft_tokens, figures.accepted_tokens) == (2, 2)
    assert (figures.acceptance_rate, figures.draft_acceptance_rate, figures.mean_acceptance_length) == (1.0, 1.0, 3.0)


def test_figures_by_drafter_are_parts_of_the_whole() -> None:
    """Every row counts for the drafter that guessed it, and those of the prediction once more, as usage says them."""
    counts = counted(merged_round(), a_round(2)).speculation
    assert counts.drafters == {"model": (2, 0), "lookup": (1, 1), "prediction": (2, 1), "": (2, 2)}
    totals = tuple(map(sum, zip(*counts.drafters.values(), strict=True)))
    assert totals == (counts.draft_tokens, counts.accepted_tokens)
    assert counts.prediction_counts == (1, 1)
    assert asdict(counts.figures)["drafters"][1] == {"drafter": "lookup", "draft_tokens": 1, "accepted_tokens": 1}


def test_rounds_without_guesses_have_no_drafter() -> None:
    """Neither a round without a proposal nor the prompt's own pass names one."""
    counts = counted(a_round(is_first=True), a_round()).speculation
    assert (counts.drafters, counts.prediction_counts) == ({}, (0, 0))


def test_figures_of_nothing_are_no_division_by_zero() -> None:
    """A request of one token has figures, too."""
    figures = SpeculationCounts().figures
    assert (figures.acceptance_rate, figures.draft_acceptance_rate, figures.mean_acceptance_length) == (0.0, 0.0, 1.0)


def test_numerics_are_reported_where_they_change() -> None:
    """The first target's are no change; one that returns is counted again."""
    counts = SampleCounts()
    rounds = [computed(each, is_first=not number) for number, each in enumerate(("cpu", "cpu", "cuda", "cpu"))]
    assert [counts.add(each, 1) for each in rounds] == ["", "", "cuda", "cpu"]
    assert counts.numerics_ids == ["cpu", "cuda", "cpu"]


def test_what_a_sample_survived_is_counted_in_every_round() -> None:
    """The prompt's own pass included, which alone says what was cached and when the first token came."""
    counts = counted(computed("cpu", is_first=True), computed("cpu"))
    assert (counts.target_reopens, counts.cached_prompt_tokens, counts.first_token_us) == (2, 3, 10_000)
