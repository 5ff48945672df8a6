"""Figures of a small tree, the shapes of this one, and the recorder in a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.house.__main__ import SHAPES, row
from bench.house.figures import class_names, shapes, sizes, uses
from bench.house.prose import prose
from bench.house.recorder import window, write_hook
from bench.house.source import Figure, read_sources

ROOT = Path(__file__).resolve().parents[2]
FIRST = """from typing import Protocol

from pack import second


class Twice(Protocol):
    def do(self) -> None: ...


def _once() -> None:
    second.run()


def _often(n: int) -> None:
    _often(n - 1)


_once()
_often(1)
_often(2)
"""
SECOND = """class Twice:
    def _alone(self) -> None:
        pass

    def run(self) -> None:
        self._alone()
"""
PROSE = '''"""A file of prose. It is long enough.

It goes to nobody, but in `told` code and in an outlaw's words.
"""
class Row:
    """One row."""

    count: int
    """Of all answers, as they come. More follows."""

    def workers(self):
        """The same for the other workers."""
        return "nobody"

    def close_open_streams(self):
        """Closes the open stream."""

    def often(self):
        """Number of rows.

        One stands behind.
        """  # what was told
'''
PROGRAM = """import sys
from dataclasses import dataclass

@dataclass
class Line:
    text: str

def early():
    pass

def take(text):
    Line(text)

early()
for line in sys.stdin:
    take(line)
    print("taken", flush=True)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with a package, a test and a generated stub."""
    files = {"pack/__init__.py": "", "pack/first.py": FIRST, "pack/second.py": SECOND}
    left_out = {"tests/test_pack.py": "x = 1\n", "outrider/v1/pack_pb2.py": "x = 1\n", "pack/notes.md": ""}
    for name, text in {**files, **left_out}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "pack" / "untracked.py").write_text("x = 1\n")
    for command in (["init", "--quiet"], ["add", *files, *left_out]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_small_tree_has_the_figures_that_one_counts_by_hand(tree: Path) -> None:
    """Tests, stubs and untracked files are no source, but all tracked files are entries of their folder."""
    sources = read_sources(tree)
    found = {each.name: each for each in [*sizes(tree, sources), *uses(sources), *class_names(sources)]}
    assert {name: each.value for name, each in found.items()} == {
        "lines of Python source": 26,
        "files of Python source": 3,
        "median lines of a file": 6,
        "lines of the longest function": 2,
        "functions of over 60 lines": 0,
        "most methods of a class": 2,
        "classes of over 20 methods": 0,
        "most entries in a folder": 4,
        "folders of over 20 entries": 0,
        "files with exactly one importer": 1,
        "private helpers with one use": 2,
        "their share of all functions, %": 40.0,
        "class names defined more than once": 1,
        "protocols": 1,
    }
    assert found["files with exactly one importer"].listed == ["pack/second.py"]
    assert found["private helpers with one use"].listed == ["pack/first.py: _once", "pack/second.py: _alone"]
    assert found["class names defined more than once"].listed == ["Twice: pack/first.py, pack/second.py"]


def test_what_is_over_a_limit_is_listed_with_its_place(tree: Path) -> None:
    """A function of 61 lines, a class of 21 methods, a folder of 21 entries are listed; those at a limit are not."""
    limit, above = "    x = 1\n" * 59, "    x = 1\n" * 60
    methods = "".join(f"    def m{n}(self) -> None: ...\n" for n in range(20))
    large = (
        f"def at_limit():\n{limit}def over():\n{above}class Full:\n{methods}class Wide:\n{methods}    def m(): ...\n"
    )
    (tree / "pack" / "large.py").write_text(large)
    (tree / "wide").mkdir()
    for number in range(21):
        (tree / "wide" / f"{number}.txt").touch()
    subprocess.run(["git", "add", "pack/large.py", "wide"], cwd=tree, check=True)
    found = {each.name: each for each in sizes(tree, read_sources(tree))}
    assert found["folders of over 20 entries"].listed == ["wide: 21 entries"]
    assert found["functions of over 60 lines"].listed == ["pack/large.py: over, 61 lines"]
    assert found["classes of over 20 methods"].listed == ["pack/large.py: Wide, 21 methods"]


def test_a_row_says_whether_a_goal_is_met() -> None:
    """A value at its goal meets it; a figure without a goal has no word about it."""
    assert row(Figure("lines", 46_000, goal=46_000)) == "| lines | 46,000 | at most 46,000 | met |"
    assert row(Figure("share, %", 13.5, goal=10)) == "| share, % | 13.5 | at most 10 | missed |"
    assert row(Figure("protocols", 24)) == "| protocols | 24 |  |  |"


def test_prose_without_a_noun_and_banned_words_are_found_with_their_lines(tree: Path) -> None:
    """Docstrings of fields count too; names between backticks, strings and words that only contain one do not."""
    (tree / "pack" / "second.py").write_text(PROSE)
    found = {each.name: each for each in prose(read_sources(tree))}
    assert found["docstrings that open with a riddle"].listed == [
        "pack/second.py:9: Of all answers, as they come.",
        "pack/second.py:12: The same for the other workers.",
    ]
    assert found["docstrings too short or only a name"].listed == [
        "pack/second.py:6: One row.",
        "pack/second.py:16: Closes the open stream.",
    ]
    assert found["banned words in docstrings and comments"].listed == [
        "pack/second.py:3: nobody",
        "pack/second.py:21: behind",
        "pack/second.py:22: told",
    ]


def test_the_shapes_of_this_tree_are_in_its_source() -> None:
    """Each name that the table declares is defined; a place with several names counts once."""
    table = json.loads((ROOT / SHAPES).read_text())
    assert {each.name: each.value for each in shapes(ROOT, table)} == {
        what: len(names) for what, names in table.items()
    }


def test_a_shape_that_is_not_there_is_an_error(tree: Path) -> None:
    """Also one of several names at a place."""
    with pytest.raises(LookupError, match=r"pack\.first\.Gone, which the shapes name"):
        shapes(tree, {"shapes": ["pack.second.Twice | pack.first.Gone"]})


@pytest.mark.slow
def test_a_recorder_tells_what_runs_while_the_window_is_open(tmp_path: Path) -> None:
    """A function from before the window is not listed; one that dataclasses made is listed with its module's file."""
    write_hook(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command, environment = [sys.executable, str(program)], {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def body() -> None:
            asked.write("a line\n")
            asked.flush()
            assert answers.readline() == "taken\n"

        body()
        found = window(tmp_path, {"program": process.pid}, body)["program"]
        asked.close()
    names = {name for path, name in found if path == str(program)}
    assert "take" in names
    assert "early" not in names
    assert any(name.endswith("__init__") for name in names)
