"""Figures of the source that are met stay so: bench.house's own functions, over the checkout and over a planted one."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.house.figures import MAX_ENTRIES, MAX_FUNCTION_LINES, MAX_METHODS, MAX_SHARED_NAMES, class_names, sizes
from bench.house.prose import prose
from bench.house.source import Figure, read_sources

ROOT = Path(__file__).resolve().parents[2]
HELD = (
    f"folders of over {MAX_ENTRIES} entries",
    f"functions of over {MAX_FUNCTION_LINES} lines",
    f"classes of over {MAX_METHODS} methods",
    "class names defined more than once",
    "docstrings that open with a riddle",
    "docstrings too short or only a name",
    "banned words in docstrings and comments",
)
LONG = "\n".join(["def long() -> None:", *["    print()"] * MAX_FUNCTION_LINES])
WIDE = "\n".join(["class Wide:", *[f"    def take_{number}(self) -> None: ..." for number in range(MAX_METHODS + 1)]])
NAMES = "\n".join(f"class Name{number}: ..." for number in range(MAX_SHARED_NAMES + 1))


def figures_of(root: Path) -> Mapping[str, Figure]:
    """Figures of a checkout by their names, but for those of uses and of a token's path."""
    sources = read_sources(root)
    return {each.name: each for each in (*sizes(root, sources), *class_names(sources), *prose(sources))}


@pytest.fixture(scope="module")
def figures() -> Mapping[str, Figure]:
    return figures_of(ROOT)


@pytest.mark.parametrize("name", HELD)
def test_a_figure_that_is_met_stays_met(figures: Mapping[str, Figure], name: str) -> None:
    """What is above the goal is listed: split it, rename it, or write it in other words."""
    figure = figures[name]
    assert figure.verdict == "met", [*figure.listed]


def test_each_violation_is_found(tmp_path: Path) -> None:
    """One more than a goal allows of everything, in a checkout that has nothing else."""
    texts = {
        "long.py": LONG,
        "wide.py": WIDE,
        "names.py": NAMES,
        "more/names.py": NAMES,
        "words.py": '"""Of all answers."""\ndef told() -> None:\n    """Told."""  # Nobody is behind it.\n',
        **{f"full/file_{number}.py": "" for number in range(MAX_ENTRIES + 1)},
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text + "\n", encoding="utf-8")
    for words in (("init", "--quiet"), ("add", "--all")):
        subprocess.run(("git", *words), cwd=tmp_path, check=True)
    found = figures_of(tmp_path)
    assert {name: [found[name].verdict, found[name].listed[:1]] for name in HELD} == {
        HELD[0]: ["missed", ["full: 21 entries"]],
        HELD[1]: ["missed", ["long.py: long, 61 lines"]],
        HELD[2]: ["missed", ["wide.py: Wide, 21 methods"]],
        HELD[3]: ["missed", ["Name0: more/names.py, names.py"]],
        HELD[4]: ["missed", ["words.py:1: Of all answers."]],
        HELD[5]: ["missed", ["words.py:3: Told."]],
        HELD[6]: ["missed", ["words.py:3: told"]],
    }
