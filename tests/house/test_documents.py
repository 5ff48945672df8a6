"""The form of the documents: lines that fit, and nouns of docs/structures.md that the code has."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINE = 160
LEFT_OUT = {"build", "dist"}
NOUN = re.compile(r"`(?P<name>\w+)` in `(?P<file>[\w/]+\.py)`")


def documents(root: Path) -> list[Path]:
    """All Markdown of a repository, but for what is built and what is in hidden folders."""
    found = []
    for path in sorted(root.rglob("*.md")):
        folders = path.relative_to(root).parts[:-1]
        if not any(folder in LEFT_OUT or folder.startswith(".") for folder in folders):
            found.append(path)
    return found


def long_lines(document: Path) -> list[int]:
    """Numbers of the lines that are too long, rows of tables and code included."""
    lines = document.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, start=1) if len(line) > MAX_LINE]


def missing_nouns(root: Path, page: str) -> list[str]:
    """Classes that a page of structures names and the file beside them does not have."""
    missing = []
    for noun in NOUN.finditer(page):
        path = root / noun["file"]
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        if not re.search(rf"^class {noun['name']}\b", source, re.MULTILINE):
            missing.append(noun["name"])
    return missing


@pytest.mark.parametrize("document", documents(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_fit(document: Path) -> None:
    """Also those of tables, for which a list, or a note below, has room."""
    assert long_lines(document) == []


def test_long_lines_are_found(tmp_path: Path) -> None:
    """Prose, a table's row and code; characters count, not bytes; what is built does not."""
    (tmp_path / "build").mkdir()
    (tmp_path / ".venv").mkdir()
    document = tmp_path / "a.md"
    row = "| " + "x" * 157 + " |"
    document.write_text(f"{'x' * 161}\n{'ä' * 160}\n{row}\n{row[1:]}\n```\n{'x' * 161}\n```\n", encoding="utf-8")
    for folder in ("build", ".venv"):
        (tmp_path / folder / "b.md").write_text("x" * 161)
    assert documents(tmp_path) == [document]
    assert long_lines(document) == [1, 3, 6]


def test_structures_exist() -> None:
    """Each class stands in the file beside it, and nearly every line names one."""
    page = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
    assert len(NOUN.findall(page)) > 40
    assert missing_nouns(ROOT, page) == []


def test_missing_structures_are_found(tmp_path: Path) -> None:
    """A class that moved, and a file that is gone."""
    (tmp_path / "a.py").write_text("class Fence:\n    ...\n")
    assert missing_nouns(tmp_path, "`Fence` in `a.py`, `Epoch` in `a.py`, `Link` in `b.py`") == ["Epoch", "Link"]
