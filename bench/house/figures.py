"""Figures of a checkout's structure: sizes, folders, one-use helpers, names, and declared shapes."""

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.house.source import Figure, Function, Source, tracked

MAX_LINES, MAX_FILES, MAX_ENTRIES = 46_000, 300, 20
MAX_FUNCTION_LINES, MAX_METHODS = 60, 20
MAX_HELPERS_PERCENT, MAX_SHARED_NAMES = 10, 4


def sizes(root: Path, sources: Sequence[Source]) -> list[Figure]:
    """Lines, files, functions, classes, and entries of folders."""
    lines = [source.num_lines for source in sources]
    functions = {
        f"{source.path}: {node.name}, {count} lines": count
        for source in sources
        for node in source.functions
        if (count := (node.end_lineno or 0) - node.lineno + 1)
    }
    methods = {
        f"{source.path}: {node.name}, {count} methods": count
        for source in sources
        for node in source.classes
        if (count := sum(isinstance(each, Function) for each in node.body))
    }
    things = {each for path in tracked(root) for each in (path, *path.parents[:-1])}
    entries = Counter(str(each.parent) for each in things)
    large = [f"{folder}: {count} entries" for folder, count in entries.most_common() if count > MAX_ENTRIES]
    long, wide = _above(functions, MAX_FUNCTION_LINES), _above(methods, MAX_METHODS)
    return [
        Figure("lines of Python source", sum(lines), goal=MAX_LINES),
        Figure("files of Python source", len(lines), goal=MAX_FILES),
        Figure("median lines of a file", statistics.median(lines)),
        Figure("most entries in a folder", max(entries.values())),
        Figure(f"folders of over {MAX_ENTRIES} entries", len(large), large, 0),
        Figure("lines of the longest function", max(functions.values())),
        Figure(f"functions of over {MAX_FUNCTION_LINES} lines", len(long), long, 0),
        Figure("most methods of a class", max(methods.values(), default=0)),
        Figure(f"classes of over {MAX_METHODS} methods", len(wide), wide, 0),
    ]


def _above(counts: Mapping[str, int], limit: int) -> list[str]:
    """Names whose count is above a limit, the largest first."""
    return [name for name, count in Counter(counts).most_common() if count > limit]


def uses(sources: Sequence[Source]) -> list[Figure]:
    """Files that one other file imports; private functions and methods used once, their own bodies aside."""
    importers: dict[str, list[Source]] = defaultdict(list)
    modules = {source.module for source in sources}
    for source in sources:
        for module in source.imported(modules):
            importers[module].append(source)
    single = [source.path for source in sources if len(importers[source.module]) == 1]
    words = {source.module: _words(source.tree) for source in sources}
    own = {source.module: {node.name for node in source.functions} for source in sources}
    helpers: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.functions:
            if node.name.startswith("_") and not node.name.startswith("__"):
                others = [each.module for each in importers[source.module] if node.name not in own[each.module]]
                count = sum(words[module][node.name] for module in (source.module, *others))
                if count - _words(node)[node.name] == 1:
                    helpers[source.path].append(node.name)
    count = sum(map(len, helpers.values()))
    share = 100 * count / sum(len(source.functions) for source in sources)
    return [
        Figure("files with exactly one importer", len(single), single),
        Figure("private helpers with one use", count, [f"{path}: {', '.join(each)}" for path, each in helpers.items()]),
        Figure("their share of all functions, %", round(share, 1), goal=MAX_HELPERS_PERCENT),
    ]


def _words(tree: ast.AST) -> Counter[str]:
    """Number of times that each name is read, alone or as an attribute."""
    names = (getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(tree))
    return Counter(name for name in names if name)


def class_names(sources: Sequence[Source]) -> list[Figure]:
    """Names that several classes have, and the protocols."""
    places: dict[str, list[str]] = defaultdict(list)
    protocols: list[str] = []
    for source in sources:
        for node in source.classes:
            places[node.name].append(source.path)
            bases = {ast.unparse(base).partition("[")[0].removeprefix("typing.") for base in node.bases}
            protocols += [f"{source.path}: {node.name}"] if "Protocol" in bases else []
    several = [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]
    return [
        Figure("class names defined more than once", len(several), several, MAX_SHARED_NAMES),
        Figure("protocols", len(protocols), protocols),
    ]


def shapes(root: Path, table: Mapping[str, Sequence[str]]) -> list[Figure]:
    """The declared classes of each kind, counted; those with | between them stand at one place.

    Raises LookupError about a name that the source does not define.
    """
    for name in (name for names in table.values() for place in names for name in place.split(" | ")):
        module, _, last = name.rpartition(".")
        base = root / module.replace(".", "/")
        # Of a generated module only the stub says what it defines.
        files = [base.with_suffix(".pyi"), base.with_suffix(".py"), base / "__init__.py"]
        trees = [ast.parse(path.read_text()) for path in files if path.exists()]
        if not any(getattr(node, "name", None) == last for tree in trees for node in tree.body):
            raise LookupError(f"{name}, which the shapes name, is not defined in {root}")
    return [Figure(what, len(names), names) for what, names in table.items()]
