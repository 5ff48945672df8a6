"""docs/options.md is what the settings of the three processes declare."""

from dataclasses import dataclass
from typing import Annotated

from bench.options_page import PAGE, WIDTH, entries, page
from outrider.process.options import Setting, addresses, within
from outrider.process.run import LogLevel


@dataclass(frozen=True)
class Settings:
    """Options of every kind, and a field that is none."""

    peer: Annotated[str, Setting("Who is asked.", addresses(several=True))]
    max_places: Annotated[int | None, Setting("Places.", within(1, 9), default="all")] = None
    name: Annotated[str, Setting("What it is called.")] = ""
    level: Annotated[LogLevel, Setting("What is logged.")] = LogLevel.INFO
    deaf: Annotated[bool, Setting("Hears nothing.")] = False
    eager: Annotated[bool, Setting("Begins at once.")] = True
    patience: Annotated[float, Setting("How long to wait.", within(0))] = 1.0
    inner: int = 7


def test_the_page_is_what_is_declared() -> None:
    """`make options` writes it again."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_an_option_is_an_entry() -> None:
    """With its flag, its variable, its default, its range and its sentence."""
    assert entries(Settings).splitlines() == [
        "- `--peer` (`OUTRIDER_PEER`; required; HOST:PORT, dns:NAME:PORT or file:PATH, or several with commas):",
        "  Who is asked.",
        "- `--max-places` (`OUTRIDER_MAX_PLACES`; default all; in [1, 9]):",
        "  Places.",
        "- `--name` (`OUTRIDER_NAME`; default empty):",
        "  What it is called.",
        "- `--level` (`OUTRIDER_LEVEL`; default `info`; one of debug, info, warning, error):",
        "  What is logged.",
        "- `--deaf` (`OUTRIDER_DEAF`; default off):",
        "  Hears nothing.",
        "- `--eager`, `--no-eager` (`OUTRIDER_EAGER`; default on):",
        "  Begins at once.",
        "- `--patience` (`OUTRIDER_PATIENCE`; default `1.0`; at least 0):",
        "  How long to wait.",
    ]


@dataclass(frozen=True)
class Wordy:
    """An option of which neither part fits into a line."""

    source: Annotated[str, Setting("word " * 30 + "end.", default="word " * 30 + "end")] = ""


def test_long_entries_are_wrapped() -> None:
    """At words, and below the flag that they belong to."""
    first, *rest = entries(Wordy).splitlines()
    assert first.startswith("- `--source` (`OUTRIDER_SOURCE`; default word word")
    assert all(line.startswith("  ") for line in rest)
    assert max(map(len, [first, *rest])) <= WIDTH
    assert " ".join([first, *rest]).count("word") == 60
