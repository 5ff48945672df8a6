"""Figures of the source itself: sizes, folders, one-use helpers, names, and the files that a token passes.

    python -m bench.house [--root DIR] [--static] [--shapes FILE] [--json FILE]

Prints a Markdown table, and below it what was counted. For the files on a token's path a stack serves the embedded
pair, and its processes note which functions run while one request is streamed; --static leaves that out. The tree under
--root needs its kernels built; it may be of any version.
"""

import argparse
import ast
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

NOT_SOURCE = ("tests/", "outrider/v1/")
LARGE_FOLDER = 20
# The classes on the way of a request and of a verdict, under the names that a checkout gives them.
SHAPES = Path("bench/shapes.json")
REQUEST = {
    "prompt": "Once upon a time there was a",
    "max_tokens": 24,
    "ignore_eos": True,
    "seed": 3,
    "stream": True,
    "speculation": {"draft_count": 4},
}
# What a request leaves to be done comes within the first time; what an idle stack does by the clock, in the second.
AFTERWARDS_S, IDLE_S, PATIENCE_S, POLL_S = 0.5, 5.0, 60.0, 0.1
SIGNAL = signal.SIGUSR2

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Figure(NamedTuple):
    """A row of the table, and what was counted."""

    name: str
    value: float
    listed: Sequence[str] = ()


class Source:
    """A file of the tree: its functions and methods, but none within another function, and all its classes."""

    def __init__(self, root: Path, path: Path) -> None:
        text = (root / path).read_text()
        packages = [folder.name for folder in path.parents if (root / folder / "__init__.py").exists()]
        self.path, self.num_lines, self.tree = str(path), text.count("\n"), ast.parse(text, str(path))
        self.module = ".".join([*packages[::-1], path.stem]).removesuffix(".__init__")
        self.classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        bodies = [self.tree.body, *(node.body for node in self.classes)]
        self.functions = [node for body in bodies for node in body if isinstance(node, Function)]

    def imported(self, modules: Set[str]) -> set[str]:
        """Which of these modules it imports, whole or something of them."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules else node.module for name in inner}
        return names & modules - {self.module}


def tracked(root: Path) -> list[Path]:
    """The files that git knows and that are there."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [Path(path) for path in listing.split("\0") if path and (root / path).exists()]


def read_sources(root: Path) -> list[Source]:
    """The hand-written Python source, without tests."""
    paths = [path for path in tracked(root) if path.suffix == ".py" and not str(path).startswith(NOT_SOURCE)]
    return [Source(root, path) for path in paths]


def sizes(root: Path, sources: Sequence[Source]) -> list[Figure]:
    """Lines, files, functions, and entries of folders."""
    lines = [source.num_lines for source in sources]
    functions = [(source.path, node) for source in sources for node in source.functions]
    longest, where = max(((node.end_lineno or 0) - node.lineno + 1, f"{path}: {node.name}") for path, node in functions)
    things = {each for path in tracked(root) for each in (path, *path.parents[:-1])}
    entries = Counter(str(each.parent) for each in things)
    large = [f"{folder}: {count}" for folder, count in entries.most_common() if count > LARGE_FOLDER]
    return [
        Figure("lines of Python source", sum(lines)),
        Figure("files of Python source", len(lines)),
        Figure("median lines of a file", statistics.median(lines)),
        Figure("lines of the longest function", longest, [where]),
        Figure("most entries in a folder", max(entries.values()), large),
    ]


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
        Figure("their share of all functions, %", round(share, 1)),
    ]


def _words(tree: ast.AST) -> Counter[str]:
    """How often each name is read, alone or as an attribute."""
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
        Figure("class names defined more than once", len(several), several),
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


def record(folder: str) -> None:
    """Notes which functions of this process run; at every SIGNAL writes them to PID.ran in the folder and forgets them.

    It notes calls and returns, of C too, so that a loop that began long ago is noted as well.
    """
    ran: set[tuple[CodeType, str]] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        ran.add((frame.f_code, frame.f_globals.get("__name__", "")))

    def write(*_: object) -> None:
        found = []
        for code, module in ran.copy():
            # What is generated, such as __init__ of a dataclass, belongs to the module that it is in.
            owner = sys.modules.get(module) if code.co_filename == "<string>" else None
            found.append((getattr(owner, "__file__", code.co_filename), code.co_qualname))
        ran.clear()
        part = Path(folder, f"{os.getpid()}.part")
        part.write_text(json.dumps(found))
        part.rename(part.with_suffix(".ran"))

    signal.signal(SIGNAL, write)
    threading.setprofile(note)
    sys.setprofile(note)


def write_hook(folder: Path) -> None:
    """Lets Python processes that have the folder on their path be recorded."""
    hook = f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r})['record']({str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(hook)


def window(folder: Path, pids: Mapping[str, int], body: Callable[[], None]) -> dict[str, set[tuple[str, str]]]:
    """Files and functions that ran in each recorded process while the body did, and just after it."""
    told(folder, pids)
    body()
    time.sleep(AFTERWARDS_S)
    return told(folder, pids)


def told(folder: Path, pids: Mapping[str, int]) -> dict[str, set[tuple[str, str]]]:
    """What ran in each recorded process since it was asked before. Raises TimeoutError."""
    found: dict[str, set[tuple[str, str]]] = {}
    for role, pid in pids.items():
        os.kill(pid, SIGNAL)
        file, asked_s = folder / f"{pid}.ran", time.monotonic()
        while not file.exists():
            if time.monotonic() > asked_s + PATIENCE_S:
                raise TimeoutError(f"{role} has not told what ran, after {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        found[role] = {(path, name) for path, name in json.loads(file.read_text())}
        file.unlink()
    return found


def token_path(root: Path, sources: Sequence[Source]) -> list[Figure]:
    """The files of the services with a function that ran for one streamed request, and does not run by the clock."""
    roles: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as name:
        write_hook(Path(name))
        with serving(root, [], name) as served:
            stream_answer(served["rest"])  # to warm up
            ran = window(Path(name), served["pids"], lambda: stream_answer(served["rest"]))
            idle = window(Path(name), served["pids"], lambda: time.sleep(IDLE_S))
    for role, places in ran.items():
        for path, _ in places - idle[role]:
            roles[os.path.relpath(os.path.realpath(path), root)].add(role)
    passed = [source for source in sources if source.path in roles]
    listed = [f"{each.path}: {each.num_lines} lines; {', '.join(sorted(roles[each.path]))}" for each in passed]
    return [
        Figure("files on the token path", len(passed), listed),
        Figure("lines of these files", sum(source.num_lines for source in passed)),
    ]


def outrider(root: Path) -> list[str]:
    """The command line of a checkout, whatever module its entry point lies in."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["outrider"].partition(":")
    return [sys.executable, "-P", "-c", f"from {module} import {function}; {function}()"]


def environment(*path: object) -> dict[str, str]:
    """The environment with folders before everything that is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}


@contextmanager
def serving(root: Path, options: Sequence[str], *path: str) -> Iterator[dict[str, Any]]:
    """Runs a checkout's `outrider up` on free ports; yields what it says when everything serves."""
    ports = [word for what in ("", "rest-", "target-", "draft-") for word in (f"--{what}port", "0")]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*outrider(root), "up", "--json", *ports, *options],
            env=environment(*path, root),
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            events = (json.loads(line) for line in process.stdout or ())
            event = next((event for event in events if event["event"] == "serving"), None)
            if event is None:
                raise RuntimeError(f"the stack of {root} did not start; standard error says why")
            yield event
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def stream_answer(rest: str) -> None:
    """Streams one answer to its end. Raises RuntimeError when it does not come, or comes without drafts."""
    request = urllib.request.Request(
        f"http://{rest}/v1/completions", json.dumps(REQUEST).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        answer = reply.read().decode()
    if not answer.rstrip().endswith("[DONE]") or not re.search(r'"num_draft_tokens": *[1-9]', answer):
        raise RuntimeError(f"the answer has no end or no drafts: {answer[-500:]}")


def main() -> None:
    """Measures, and prints."""
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(prog="python -m bench.house", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=here, help="the checkout to measure")
    parser.add_argument("--static", action="store_true", help="start nothing")
    parser.add_argument("--shapes", type=Path, help="names of its classes; by default its bench/shapes.json")
    parser.add_argument("--json", type=Path, help="where the same goes as JSON")
    options = parser.parse_args()
    root = options.root.resolve()
    sources = read_sources(root)
    figures = [*sizes(root, sources), *uses(sources), *class_names(sources)]
    table = options.shapes or root / SHAPES
    if table.exists() or options.shapes:
        figures += shapes(root, json.loads(table.read_text()))
    if not options.static:
        figures += token_path(root, sources)
    print("| figure | value |\n| --- | --- |", *(f"| {each.name} | {each.value:g} |" for each in figures), sep="\n")
    for each in figures:
        if each.listed:
            print(f"\n{each.name}:\n", *(f"- {line}" for line in each.listed), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
