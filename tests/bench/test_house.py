"""The figures of a small tree, the shapes of this one, and the recorder in a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.house import SHAPES, class_names, read_sources, shapes, sizes, uses, window, write_hook

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
        "most entries in a folder": 4,
        "files with exactly one importer": 1,
        "private helpers with one use": 2,
        "their share of all functions, %": 40.0,
        "class names defined more than once": 1,
        "protocols": 1,
    }
    assert found["files with exactly one importer"].listed == ["pack/second.py"]
    assert found["private helpers with one use"].listed == ["pack/first.py: _once", "pack/second.py: _alone"]
    assert found["class names defined more than once"].listed == ["Twice: pack/first.py, pack/second.py"]


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


def test_a_recorder_tells_what_runs_while_the_window_is_open(tmp_path: Path) -> None:
    """A function from before the window is not told; the one that dataclasses made is told with its module's file."""
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
