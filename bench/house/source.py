"""Hand-written Python source of a checkout, parsed, and the shape of a figure about it."""

import ast
import subprocess
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

# Tests and generated code are not counted.
NOT_SOURCE = ("tests/", "outrider/v1/")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Figure(NamedTuple):
    """A row of the table, what was counted, and the most that the value may be."""

    name: str
    value: float
    listed: Sequence[str] = ()
    goal: float | None = None

    @property
    def verdict(self) -> str:
        """A word for the table: whether the goal is met, if the figure has one."""
        return "" if self.goal is None else "met" if self.value <= self.goal else "missed"


class Source:
    """A file of the tree: its functions and methods, but none within another function, and all its classes."""

    def __init__(self, root: Path, path: Path) -> None:
        self.text = (root / path).read_text()
        packages = [folder.name for folder in path.parents if (root / folder / "__init__.py").exists()]
        self.path, self.num_lines, self.tree = str(path), self.text.count("\n"), ast.parse(self.text, str(path))
        self.module = ".".join([*packages[::-1], path.stem]).removesuffix(".__init__")
        self.classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        bodies = [self.tree.body, *(node.body for node in self.classes)]
        self.functions = [node for body in bodies for node in body if isinstance(node, Function)]

    def imported(self, modules: Set[str]) -> set[str]:
        """Modules, of the given ones, that the file imports, whole or in part."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules else node.module for name in inner}
        return names & modules - {self.module}


def tracked(root: Path) -> list[Path]:
    """Files that git knows and that are there."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [Path(path) for path in listing.split("\0") if path and (root / path).exists()]


def read_sources(root: Path) -> list[Source]:
    """Hand-written Python files of a checkout, without tests."""
    paths = [path for path in tracked(root) if path.suffix == ".py" and not str(path).startswith(NOT_SOURCE)]
    return [Source(root, path) for path in paths]
