"""When a request gives its targets up, by a clock of the test's own."""

import pytest

from gateway.sessions.session import RetryBudget, RoundDeadline
from outrider.errors import PeerLost

FAULT = PeerLost("The target service at here was lost")


def test_the_first_fault_begins_the_budget() -> None:
    """A round may have waited long for its answer before; only what comes after the fault counts."""
    budget = RetryBudget(30.0, now_s=0.0)
    assert budget.until_s == 30.0
    assert budget.pause_s(FAULT, now_s=100.0) == 0.0
    assert budget.until_s == 130.0


def test_pauses_grow_to_a_second_and_never_past_the_budget() -> None:
    """A target that fails at once is not asked in a tight loop."""
    budget = RetryBudget(3.0, now_s=0.0)
    pauses = [budget.pause_s(FAULT, now_s=0.0) for _ in range(8)]
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert budget.pause_s(FAULT, now_s=2.5) == 0.5


def test_the_end_of_the_budget_is_the_end_of_the_request() -> None:
    """The sentence has the last fault and the budget."""
    budget = RetryBudget(3.0, now_s=0.0)
    budget.pause_s(FAULT, now_s=0.0)
    with pytest.raises(PeerLost, match=r"was lost, and no target took the request over within 3 seconds$"):
        budget.pause_s(FAULT, now_s=3.0)


def test_a_round_deadline_follows_the_answers_within_its_bounds() -> None:
    """Twenty times what is usual, at least two seconds and at most thirty."""
    deadline = RoundDeadline()
    assert deadline.seconds() == 2.0
    for _ in range(100):
        deadline.observe(0.5)
    assert deadline.seconds() == pytest.approx(10.0, rel=0.01)
    for _ in range(100):
        deadline.observe(1000.0)
    assert deadline.seconds() == 30.0
