"""`outrider bench`: what its child is told, and what is refused before anything is measured. Measures nothing."""

import sys
from pathlib import Path

import pytest

from outrider.cli.bench import command, parse_temperatures, writable
from outrider.errors import InvalidRequest


def test_the_child_gets_the_options_that_were_given() -> None:
    """What has no value is left out, so that the child's own default holds, and flags have none; -P guards imports."""
    given = {"--target": "sized:200m", "--draft": None, "--seed": -3, "--json": True, "--quick": False}
    given["--save"] = Path("a.json")
    expected = ("-P", "-m", "bench.rounds", "--target=sized:200m", "--seed=-3", "--json", "--save=a.json")
    assert command("bench.rounds", given) == (sys.executable, *expected)


def test_temperatures_stand_between_commas() -> None:
    """Each counts once, in their order."""
    assert parse_temperatures("0.8,0,0.80") == (0.8, 0.0)


@pytest.mark.parametrize("text", ["", "warm", "0;1", "-1", "nan", "101"])
def test_what_is_no_temperature_is_refused(text: str) -> None:
    """Names the option and the range."""
    with pytest.raises(InvalidRequest, match=r"--temperatures is .* must be numbers in \[0, 100\]"):
        parse_temperatures(text)


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Not after the minutes of a run."""
    check = writable("--save")
    assert check(tmp_path / "samples.json") == tmp_path / "samples.json"
    assert check(None) is None
    for place in (tmp_path, tmp_path / "absent" / "samples.json"):
        with pytest.raises(InvalidRequest, match="--save"):
            check(place)
