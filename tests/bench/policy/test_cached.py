"""bench.policy.cached: its lines, and that what it measures is what is served."""

from bench.policy.cached import change, choice, snapshot


def test_the_report_has_all_costs_of_a_small_cache() -> None:
    """A cache of 64 names takes 8 bytes for each and little more; and each message has what changed."""
    costs = [*snapshot(range(256), 1), *change(range(256), 3, 2), *choice(1)]
    assert all(cost.value >= 0 for cost in costs)
    sizes = {cost.what: (cost.value, cost.unit) for cost in costs if cost.unit != "us"}
    whole, more, nothing = sizes.values()
    assert (8 * 64 < whole[0] < 8 * 64 + 16, whole[1]) == (True, "in 1")
    assert 20 * 8 * 6 < more[0] < 20 * (8 * 6 + 16)
    assert nothing[0] < 8
    assert str(costs[0]).endswith(" us")
