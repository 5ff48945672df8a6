"""docs/options.md is what the settings of the three processes declare."""

from dataclasses import dataclass
from typing import Annotated

from options_page import PAGE, page, table
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


def test_an_option_is_a_row() -> None:
    """With its flag, its variable, its default, its range and its sentence."""
    assert table(Settings).splitlines()[2:] == [
        "| `--peer` | `OUTRIDER_PEER` | required | HOST:PORT, or several with commas | Who is asked. |",
        "| `--max-places` | `OUTRIDER_MAX_PLACES` | all | in [1, 9] | Places. |",
        "| `--name` | `OUTRIDER_NAME` | empty |  | What it is called. |",
        "| `--level` | `OUTRIDER_LEVEL` | `info` | debug, info, warning, error | What is logged. |",
        "| `--deaf` | `OUTRIDER_DEAF` | off |  | Hears nothing. |",
        "| `--eager`, `--no-eager` | `OUTRIDER_EAGER` | on |  | Begins at once. |",
        "| `--patience` | `OUTRIDER_PATIENCE` | `1.0` | at least 0 | How long to wait. |",
    ]
