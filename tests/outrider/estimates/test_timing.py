"""What an answer cost to compute."""

from outrider.estimates.timing import ComputeTimes, Meter


def test_a_meter_adds_up_what_an_answer_cost() -> None:
    """It waits until its first forward begins; times and rows are those of all forwards."""
    meter = Meter(arrived_ns=1_000_000)
    meter.add(1_250_000, 1_300_000, 7)
    meter.add(1_400_000, 1_410_000, 64)
    assert meter.times() == ComputeTimes(queue_us=250, compute_us=60, forward_count=2, row_count=71)
