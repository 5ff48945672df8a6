"""The documents' links, read from their text: every file and heading that one points to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*.md")])
LINK = re.compile(r"\]\((?!https?://)(?P<file>[^)#\s]*)(#(?P<anchor>[^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Headings as links name them: small letters, hyphens for spaces, no other signs."""
    headings = HEADING.findall(document.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(document: Path) -> list[str]:
    """Links that lead nowhere."""
    found = []
    for link in LINK.finditer(document.read_text()):
        place = document.parent / link["file"] if link["file"] else document
        if not place.exists() or (link["anchor"] and link["anchor"] not in anchors(place)):
            found.append(link[0])
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Also those to a heading of another document."""
    assert broken(document) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    """A missing file, a missing heading, and none that is there."""
    document = tmp_path / "a.md"
    document.write_text("# One `two`\n[x](#one-two) [x](a.md#three) [x](b.md) [x](https://a.example/b.md)\n")
    assert broken(document) == ["](a.md#three)", "](b.md)"]


def test_every_decision_is_listed() -> None:
    """The page of all decisions has each once, and each stands in the folder of a theme."""
    folder = ROOT / "docs" / "decisions"
    listed = [link["file"] for link in LINK.finditer((folder / "README.md").read_text())]
    assert sorted(listed) == sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.md"))
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["README.md"]
