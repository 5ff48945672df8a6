"""The report of bench.speed says what the samples say."""

from dataclasses import replace

from bench.speed import SETTINGS, Sample, rotated, row, table

PLAIN = Sample("plain", tuple(range(11)), 2.0, 1.0, 10, 0, 0, 0, 0, 20_000)
FASTER = replace(PLAIN, setting="K = 4", seconds=1.5, rounds=4, draft_tokens=16, accepted_tokens=6, evaluated_tokens=8)


def test_a_row_compares_with_the_plain_request_beside_it() -> None:
    """Ten tokens in half the time are twice the speed, and 6 accepted of 8 evaluated tokens a rate of 0.75."""
    text = row("K = 4", [PLAIN, FASTER] * 4)
    assert text == "| K = 4 | 20 (20 to 20) | 2.00 (2.00 to 2.00) | 2.50 | 0.750 | 5.00, 0.00 |"


def test_the_table_has_a_row_for_every_setting() -> None:
    """Settings stand in their order, plain decoding first."""
    samples = [replace(PLAIN, setting=name) for name in SETTINGS] * 2
    assert [line.split(" | ")[0] for line in table(samples).splitlines()[2:]] == [f"| {name}" for name in SETTINGS]


def test_no_setting_always_follows_the_same_one() -> None:
    """Every turn begins with another setting, and none is left out."""
    names = list(SETTINGS)
    assert {rotated(names, turn)[0] for turn in range(len(names))} == set(names)
    assert all(sorted(rotated(names, turn)) == sorted(names) for turn in range(9))
