"""Medians of fixed numbers with quartiles and intervals, and how they are shown; what measurements share."""

import random
from pathlib import Path

import pytest
import typer

from outrider.cli.bench.common import (
    AUTO,
    PLAIN,
    fixed,
    interval,
    markdown,
    parse_temperatures,
    rotated,
    settings_of,
    spread,
    without_key,
    writable,
)
from outrider.client import Speculation
from outrider.errors import InvalidRequest


def test_quartiles_lie_within_the_values() -> None:
    """Five values have their second, third and fourth as quartiles, in whatever order they come."""
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert found.show(".1f", 2) == "6.0 (4.0 to 8.0)"


def test_one_value_is_its_own_quartiles() -> None:
    """A quick run may have a single sample."""
    assert spread([7.0]).show(".0f") == "7 (7 to 7)"
    assert spread(iter([1.0, 3.0])).median == 2.0


def test_no_values_have_no_median() -> None:
    """A figure that was not measured is an error, never a zero."""
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_a_table_is_markdown() -> None:
    """A header, a rule, and one line a row."""
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_temperatures_stand_between_commas() -> None:
    """Each counts once, in their order."""
    assert parse_temperatures("0.8,0,0.80") == (0.8, 0.0)


def test_a_key_that_was_typed_is_not_kept() -> None:
    """In neither way of typing it; all other words are."""
    words = [
        "python",
        "-m",
        "a.module",
        "--api-key",
        "sk-secret",
        "--address",
        "a:1",
        "--api-key=sk-secret",
    ]
    kept = [*words[:4], "...", *words[5:7], "--api-key=..."]
    assert without_key(words) == kept


@pytest.mark.parametrize("text", ["", "warm", "0;1", "-1", "nan", "101"])
def test_what_is_no_temperature_is_refused(text: str) -> None:
    """Names the option and the range."""
    with pytest.raises(InvalidRequest, match=r"--temperatures is .* must be numbers in \[0, 100\]"):
        parse_temperatures(text)


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Not after the minutes of a run."""
    option = typer.core.TyperOption(param_decls=["--save"], type_descriptor=None)
    assert writable(option, tmp_path / "samples.json") == tmp_path / "samples.json"
    assert writable(option, None) is None
    for place in (tmp_path, tmp_path / "absent" / "samples.json"):
        with pytest.raises(InvalidRequest, match="--save"):
            writable(option, place)


@pytest.mark.slow
def test_an_interval_is_where_the_median_would_be_again() -> None:
    """Of a hundred samples of ten, most have one that holds the median of the source; it narrows with their number."""
    generator = random.Random(3)
    samples = [[generator.gauss(1.0, 0.1) for _ in range(10)] for _ in range(100)]
    found = [interval(sample) for sample in samples]
    assert sum(each.low <= 1.0 <= each.high for each in found) >= 90
    whole = interval(value for sample in samples for value in sample)
    assert whole.low < whole.median < whole.high
    assert whole.high - whole.low < min(each.high - each.low for each in found)
    assert interval([2.0, 2.0]).show(".0f") == "2 (2 to 2)"


def test_settings_have_the_names_of_reports() -> None:
    """Plain is no setting of K, and auto names none."""
    settings = settings_of((0, 4, None))
    assert list(settings) == [PLAIN, fixed(4), AUTO]
    assert settings[PLAIN] == Speculation(enabled=False)
    assert (settings[fixed(4)].draft_count, settings[AUTO]) == (4, Speculation())


def test_settings_come_in_another_order_each_turn() -> None:
    """Each goes first once, and has both of the others after it."""
    orders = ["".join(rotated("abc", turn)) for turn in range(3)]
    assert orders == ["abc", "acb", "cab"]
