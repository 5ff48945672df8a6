"""S, acceptance by position and a round's parts, on numbers that can be followed by hand."""

from dataclasses import replace

import pytest
from support.runs import summary

from outrider.cli.bench.rounds.samples import RoundSample
from outrider.cli.bench.rounds.summary import Costs, acceptance_rate, parts, tokens_per_round

COSTS = Costs(verify_ms={1: 10.0, 3: 11.0, 5: 12.0}, c=0.05, target_ping=0.1, draft_ping=0.2)
ROUND = RoundSample(
    num_tokens=3,
    draft_count=4,
    accepted_count=2,
    evaluated_count=3,
    round_us=20_000,
    draft_queue_us=100,
    draft_compute_us=2_000,
    draft_wait_us=3_000,
    verify_queue_us=200,
    verify_compute_us=12_000,
    verify_wait_us=14_000,
    draft_bytes=90,
    verify_bytes=110,
)
PLAIN = replace(ROUND, num_tokens=1, draft_count=0, accepted_count=0, evaluated_count=0)


def test_symbols_are_in_target_steps() -> None:
    """A step of 10 ms is the unit of the draft's 0.5 ms, of both pings and of what four further rows add."""
    found = summary().costs(0.0)
    assert (found.c, found.target_ping, found.draft_ping) == (0.05, 0.02, 0.02)
    assert COSTS.v(4) == pytest.approx(0.05)


@pytest.mark.parametrize(("draft_count", "cost"), [(0, 1.0), (4, 1.7), (3, 1.6), (6, 1.9), (2, 1.5)])
def test_a_round_costs_what_the_formula_says(draft_count: int, cost: float) -> None:
    """1 + vK + cK + R_t + R_d, with v on the line through what was measured; a plain round comes unasked."""
    assert COSTS.round_cost(draft_count) == pytest.approx(cost)


def test_s_is_the_formula_when_all_rounds_have_the_same_draft_count() -> None:
    """tau 3 (1 + 0.1) / 1.7."""
    assert COSTS.speedup([ROUND, ROUND]) == pytest.approx(3 * 1.1 / 1.7)


def test_a_plain_round_counts_with_its_own_cost() -> None:
    """A request's last round has no proposal, and is neither forgotten nor counted as a speculative one."""
    assert COSTS.speedup([ROUND, PLAIN]) == pytest.approx(4 * 1.1 / 2.7)
    assert tokens_per_round([ROUND, PLAIN]) == 2.0
    with pytest.raises(ValueError, match="rounds"):
        COSTS.speedup([])


def test_acceptance_counts_only_what_was_evaluated() -> None:
    """Of three rounds with twelve draft tokens six were evaluated."""
    rounds = [ROUND, replace(ROUND, accepted_count=0, evaluated_count=1), replace(ROUND, evaluated_count=2)]
    assert acceptance_rate(rounds) == pytest.approx(4 / 6)
    assert acceptance_rate([PLAIN]) is None


def test_parts_add_up_to_the_round() -> None:
    """Queues, computes, ways and the gateway's own time are the whole, and the overhead is all but the computes."""
    found = parts(ROUND)
    assert (found["draft way"], found["verify way"], found["gateway"]) == pytest.approx((0.9, 1.8, 3.0))
    overhead = sum(found[name] for name in ("draft queue", "draft way", "verify queue", "verify way", "gateway"))
    assert found["overhead"] == pytest.approx(overhead)
    assert found["overhead"] + found["draft compute"] + found["verify compute"] == pytest.approx(20.0)
