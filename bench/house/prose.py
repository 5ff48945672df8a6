"""Figures of docstrings and comments: words that the project avoids, and docstrings without a noun."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence

from bench.house.source import Figure, Function, Source

# A docstring that opens with one of these has no subject: it is a riddle without its name.
RIDDLES = ("as", "its", "of", "so", "that", "the same", "those", "who", "whoever", "whom", "whose")
# Words that have a better one: each pattern with what to write in its place.
BANNED = {
    "behind": "after, below or beside",
    "laws?": "distribution",
    "nobody": "no caller, no client, nothing",
    "whoever": "the caller, the reader",
    "tells?|told|telling": "reports, says, shows; of two things, distinguishes",
}
# A first sentence below this many characters has no room for a noun and what it is.
SHORT = 15

_OPENING = re.compile(rf"(?:{'|'.join(RIDDLES)})\b", re.IGNORECASE)
_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`")
_FILLERS = {"a", "an", "and", "by", "in", "is", "it", "of", "the", "this", "to"}


def prose(sources: Sequence[Source]) -> list[Figure]:
    """Counts of riddles, of banned words, and of docstrings that are too short or only repeat a name; with places."""
    riddles, bare, words = [], [], []
    for source in sources:
        for line, name, text in docstrings(source):
            if _OPENING.match(text):
                riddles.append(f"{source.path}:{line}: {_first(text)}")
            elif is_bare(name, text):
                bare.append(f"{source.path}:{line}: {_first(text)}")
        for line, text in [*((line, text) for line, _, text in docstrings(source)), *comments(source)]:
            words += [f"{source.path}:{at}: {word}" for at, word in banned(line, text)]
    return [
        Figure("docstrings that open with a riddle", len(riddles), riddles, 0),
        Figure("docstrings too short or only a name", len(bare), bare, 0),
        Figure("banned words in docstrings and comments", len(words), words, 0),
    ]


def docstrings(source: Source) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of each docstring, those of fields below their declaration included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            for before, each in zip([None, *node.body], node.body, strict=False):
                match before, each:
                    case None, ast.Expr(ast.Constant(str(text))):
                        yield each.lineno, getattr(node, "name", ""), text
                    case ast.AnnAssign(target) | ast.Assign([target]), ast.Expr(ast.Constant(str(text))):
                        yield each.lineno, ast.unparse(target), text


def comments(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def banned(line: int, text: str) -> Iterator[tuple[int, str]]:
    """Banned words of a text that begins at a line, each with its own line. Names between backticks may be any."""
    for number, part in enumerate(_CODE.sub(lambda code: "\n" * code[0].count("\n"), text).split("\n"), line):
        yield from ((number, found[0].lower()) for found in _BANNED.finditer(part))


def is_bare(name: str, text: str) -> bool:
    """Whether a docstring's first sentence is short, or has no word that is not in the name."""
    first = _first(text)
    return len(first) < SHORT or not _stems(first) - _stems(re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name)) - {""}


def _first(text: str) -> str:
    """First sentence of a text, on one line."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def _stems(text: str) -> set[str]:
    """Words of a text in small letters, without fillers and endings."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {re.sub(r"(?:es|s|ed|ing|e)$", "", word) for word in words if word not in _FILLERS}
