"""Costs of plain decoding."""

from gateway.rounds.costs import RoundCosts
from gateway.rounds.plain import PlainCosts
from gateway.rounds.round import ANY_DRAFT, Proposal, Round, TokenOrigin, Verdict
from gateway.rounds.tuning import TUNING
from outrider.estimates.row_costs import RowCosts


def test_tokens_that_are_read_several_at_a_time_take_what_their_mean_takes() -> None:
    """A busy gateway reads many at once after a long time, and none of these times is that of a token."""
    verify_us, load = RowCosts(), 16
    verify_us.begin({16: 5_000.0})
    costs = PlainCosts(verify_us, TUNING)
    times_us = [10, 10, 10, 60_000]
    for number in range(load * 40):
        verdict = Verdict(9, (), 1, None, 0, compute_us=5_000, forward_count=1, row_count=load, session_count=load)
        committed = Round(Proposal(), verdict, (1,), (TokenOrigin.PLAIN,), times_us[number % 4])
        costs.observe(committed, load, number, unasked=True)
    assert 0.8 < costs.token_us(load, load * 40) / 15_007 < 1.05


def test_a_slow_forward_is_one_sample_however_many_sessions_tell_of_it() -> None:
    """Sixteen verdicts of one slow forward move neither the table of rows nor the cost of a token by more than it."""
    costs, load = RoundCosts(TUNING), 16
    costs.begin({16: 20_000.0}, {})
    for number in range(20 * load):
        # No two forwards take just as long.
        compute_us = 60_000 if number // load == 19 else 20_000 + number // load
        verdict = Verdict(9, (), 1, None, 0, compute_us=compute_us, forward_count=1, row_count=load, session_count=load)
        committed = Round(Proposal(), verdict, (1,), (TokenOrigin.PLAIN,), compute_us + 100)
        costs.observe(committed, None, unasked=True, is_trial=False, num_sessions=load, num_drafting=0)
    assert costs.verify_us.at(load) < 25_000
    assert costs.round_us(ANY_DRAFT, 0) < 25_000
