"""The lint of expositions itself: what is right has no findings, and every planted fault has one."""

import pytest
from support.observability import findings

GOOD = """# HELP a_requests_total Requests.
# TYPE a_requests_total counter
a_requests_total{reason="x"} 1.0
# HELP a_wait_seconds Waiting.
# TYPE a_wait_seconds histogram
a_wait_seconds_bucket{le="0.1"} 1.0
a_wait_seconds_bucket{le="+Inf"} 2.0
a_wait_seconds_count 2.0
a_wait_seconds_sum 3.0
"""


def test_what_is_right_has_no_findings() -> None:
    """A counter and a histogram as they should be."""
    assert findings(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# HELP a_requests_total Requests.\n", "", "no help"),
        ("a_requests_total", "a_requests", "ends in _total"),
        ("a_requests_total", "aRequests_total", "snake case"),
        ("a_requests_total", "vllm:requests_total", "colon"),
        ("a_wait_seconds", "a_wait_ms", "abbreviates a unit: ms"),
        ("a_wait_seconds", "a_wait_milliseconds", "no base unit"),
        ("a_wait_seconds", "a_wait_histogram", "type in its name"),
        ('reason="x"', 'le="x"', "reserved label le"),
        ('reason="x"', 'whyNot="x"', "illegal label"),
        ('a_requests_total{reason="x"} 1.0', 'a_requests_total{reason="x"} -1.0', "negative"),
        ('a_requests_total{reason="x"} 1.0\n', 'a_requests_total{reason="x"} 1.0\n' * 2, "comes 2 times"),
        ("# TYPE a_wait_seconds histogram\n", "# TYPE a_wait_seconds histogram\n" * 2, "2 lines of TYPE"),
        ("a_wait_seconds_sum 3.0\n", "", "lacks its sum"),
        ('le="+Inf"', 'le="7.0"', "last bucket"),
        ('a_wait_seconds_bucket{le="0.1"} 1.0', 'a_wait_seconds_bucket{le="0.1"} 5.0', "not cumulative"),
        ("a_wait_seconds_count 2.0", "a_wait_seconds_count 4.0", "another count"),
        ("} 1.0\n", "} one\n", "does not parse"),
    ],
)
def test_a_planted_fault_is_found(old: str, new: str, said: str) -> None:
    """Each rule can fail."""
    assert any(said in finding for finding in findings(GOOD.replace(old, new))), findings(GOOD.replace(old, new))


def test_a_gauge_has_no_name_of_a_part() -> None:
    """A gauge that ends in _count would look like a histogram's."""
    assert "is for histogram and summary" in findings("# HELP a_count A.\n# TYPE a_count gauge\na_count 1.0\n")[0]
