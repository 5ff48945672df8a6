"""Figures of the source itself: sizes, folders, one-use helpers, names, and the files that a token passes.

    python -m bench.house [--root DIR] [--static] [--shapes FILE] [--json FILE]

Prints a Markdown table, and below it what was counted. The files on a token's path are measured: a stack serves the
embedded pair, and its processes note whose functions run while one request is streamed; --static leaves that out.
The tree under --root needs its kernels built. Nothing of it is imported here, so that it may be of any version.
"""

import argparse
import ast
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

NOT_SOURCE = ("tests/", "outrider/v1/")
LARGE_FOLDER = 20
# Classes, and functions that make JSON, on the way through the stack; those with | between them stand at one place.
SHAPES: dict[str, list[str]] = {
    "shapes of a request": [
        "gateway.rest.completion_request.CompletionRequest | gateway.rest.chat_request.ChatRequest"
        " | gateway.rest.api_body.GenerateBody | outrider.v1.generation_service_pb2.GenerateRequest",
        "gateway.rest.answering.Order",
        "gateway.requests.GenerationAsk",
        "gateway.requests.GenerationPlan",
        "outrider.parameters.SessionSpec",
        "outrider.v1.types_pb2.OpenSession",
        "outrider.engine.drawing.Ask",
        "outrider.engine.penalties.RowContext",
    ],
    "shapes of a verdict": [
        "target_service.acceptance.Walk",
        "target_service.acceptance.Verdict",
        "target_service.sessions.Answer",
        "outrider.v1.target_service_pb2.Verdict",
        "gateway.rounds.Verdict",
        "gateway.rounds.Round",
        "gateway.generation.RoundEvent",
        "outrider.v1.generation_service_pb2.Round | gateway.rest.api_events.round_view",
        "outrider.client.events.Round",
    ],
    "token trees": ["outrider.engine.tree.TokenTree", "gateway.rounds.Proposal", "outrider.wire_proposal.Tree"],
}
REQUEST = {"prompt": "Once upon a time there was a", "max_tokens": 24, "ignore_eos": True, "seed": 3, "stream": True}
SPECULATION = {"speculation": {"draft_count": 4}}
# What a request leaves to be done comes within the first time; what an idle stack does by the clock, in the second.
AFTERWARDS_S, IDLE_S, PATIENCE_S, POLL_S = 0.5, 5.0, 60.0, 0.01
# A sitecustomize, for all processes but the children of one.
HOOK = "import os, runpy\nif os.getppid() != {}:\n    runpy.run_path({!r})['Recorder']({!r}).install()\n"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table, and what was counted."""

    name: str
    value: float
    listed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the tree."""

    path: str
    module: str
    num_lines: int
    tree: ast.Module

    @property
    def functions(self) -> list[Function]:
        """Functions of the module and methods, but none within another function."""
        bodies = [self.tree.body, *(node.body for node in self.classes)]
        return [node for body in bodies for node in body if isinstance(node, Function)]

    @property
    def classes(self) -> list[ast.ClassDef]:
        """All classes, wherever they are."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    def imported(self, modules: Mapping[str, object]) -> set[str]:
        """Which of these modules it imports, whole or something of them."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules else node.module for name in inner}
        return names & set(modules) - {self.module}


def tracked(root: Path) -> list[Path]:
    """The files that git knows and that are there."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [Path(path) for path in listing.split("\0") if path and (root / path).exists()]


def read_sources(root: Path) -> list[Source]:
    """The hand-written Python source, without tests."""
    found = []
    for path in tracked(root):
        if path.suffix == ".py" and not str(path).startswith(NOT_SOURCE):
            text = (root / path).read_text()
            packages = [folder.name for folder in path.parents if (root / folder / "__init__.py").exists()]
            module = ".".join([*packages[::-1], path.stem]).removesuffix(".__init__")
            found.append(Source(str(path), module, text.count("\n"), ast.parse(text, str(path))))
    return found


def sizes(root: Path, sources: Sequence[Source]) -> list[Figure]:
    """Lines, files, functions, and entries of folders."""
    lines = [source.num_lines for source in sources]
    functions = [(source.path, node) for source in sources for node in source.functions]
    longest, where = max(((node.end_lineno or 0) - node.lineno + 1, f"{path}: {node.name}") for path, node in functions)
    things = {each for path in tracked(root) for each in (path, *path.parents[:-1])}
    entries = Counter(str(each.parent) for each in things)
    return [
        Figure("lines of Python source", sum(lines)),
        Figure("files of Python source", len(lines)),
        Figure("median lines of a file", statistics.median(lines)),
        Figure("lines of the longest function", longest, [where]),
        Figure(
            "most entries in a folder",
            max(entries.values()),
            [f"{folder}: {count}" for folder, count in entries.most_common() if count > LARGE_FOLDER],
        ),
    ]


def uses(sources: Sequence[Source]) -> list[Figure]:
    """Files that one other file imports; private functions and methods used once, their own bodies aside."""
    modules = {source.module: source for source in sources}
    importers: dict[str, list[Source]] = defaultdict(list)
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
    nodes = list(ast.walk(tree))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return Counter([*names, *(node.attr for node in nodes if isinstance(node, ast.Attribute))])


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
    """The declared shapes, counted. Raises LookupError about a name that the source does not define."""
    for name in (name for names in table.values() for place in names for name in place.split(" | ")):
        module, _, last = name.rpartition(".")
        base = root / module.replace(".", "/")
        # Of a generated module only the stub says what it defines.
        files = [base.with_suffix(".pyi"), base.with_suffix(".py"), base / "__init__.py"]
        trees = [ast.parse(path.read_text()) for path in files if path.exists()]
        if not any(getattr(node, "name", None) == last for tree in trees for node in tree.body):
            raise LookupError(f"{name}, which the shapes name, is not defined in {root}")
    return [Figure(what, len(names), names) for what, names in table.items()]


class Recorder:
    """Notes the code that runs while a file `open` is in a folder. Leaves it there whenever that file comes or goes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._is_open = False
        self._seen: dict[CodeType, tuple[str, str]] = {}

    def install(self) -> None:
        """Watches this thread, and all that are started after it."""
        threading.Thread(target=self._obey, daemon=True).start()
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Takes a call or a return, in C too, so that a loop that runs since long ago is noted as well."""
        code = frame.f_code
        if self._is_open and code not in self._seen:
            # What is generated, such as __init__ of a dataclass, belongs to the module that it is in.
            module = sys.modules.get(frame.f_globals.get("__name__", "")) if code.co_filename == "<string>" else None
            self._seen[code] = (getattr(module, "__file__", code.co_filename), code.co_qualname)

    def _obey(self) -> None:
        part = self._folder / f"{os.getpid()}.part"
        while True:
            time.sleep(POLL_S)
            if (self._folder / "open").exists() != self._is_open:
                seen, self._seen = self._seen, {}
                self._is_open = not self._is_open
                part.write_text(json.dumps(list(seen.values())))
                part.rename(part.with_suffix(".seen"))


def write_hook(folder: Path, parent: int) -> None:
    """Lets Python processes that have the folder on their path be recorded, unless that parent started them."""
    (folder / "sitecustomize.py").write_text(HOOK.format(parent, str(Path(__file__).resolve()), str(folder)))


def token_path(root: Path, sources: Sequence[Source]) -> list[Figure]:
    """The files of the services with a function that ran for one streamed request, and does not run by the clock."""
    roles: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as name, _serving(root, Path(name)) as served:
        # The first is to warm up; it also ends in full before the stack counts as idle.
        bodies = (lambda: _stream(served["rest"]), lambda: time.sleep(IDLE_S), lambda: _stream(served["rest"]))
        _, idle, ran = (window(Path(name), served["pids"], body) for body in bodies)
    for role, places in ran.items():
        for path, _ in places - idle[role]:
            roles[os.path.relpath(os.path.realpath(path), root)].add(role)
    passed = [source for source in sources if source.path in roles]
    listed = [f"{each.path}: {each.num_lines} lines; {', '.join(sorted(roles[each.path]))}" for each in passed]
    return [
        Figure("files on the token path", len(passed), listed),
        Figure("lines of these files", sum(source.num_lines for source in passed)),
    ]


@contextmanager
def _serving(root: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Runs `outrider up` with recorders in the services; yields what it says when everything serves."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["outrider"].partition(":")
    # The launcher is this process's child, and the services are the launcher's.
    write_hook(folder, os.getpid())
    ports = [word for what in ("", "rest-", "target-", "draft-") for word in (f"--{what}port", "0")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {module} import {function}; {function}()", "up", "--json", *ports],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        events = (json.loads(line) for line in process.stdout or ())
        serving = next((event for event in events if event["event"] == "serving"), None)
        if serving is None:
            raise RuntimeError("the stack did not start; standard error says why")
        yield serving
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def window(folder: Path, pids: Mapping[str, int], body: Callable[[], None]) -> dict[str, set[tuple[str, str]]]:
    """Files and functions that ran in each service meanwhile."""
    (folder / "open").touch()
    _seen(folder, pids)
    body()
    time.sleep(AFTERWARDS_S)
    (folder / "open").unlink()
    return _seen(folder, pids)


def _seen(folder: Path, pids: Mapping[str, int]) -> dict[str, set[tuple[str, str]]]:
    """What the recorders left, when all of them have."""
    files = {role: folder / f"{pid}.seen" for role, pid in pids.items()}
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files.values()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not every service has told what ran, after {PATIENCE_S:g} s")
        time.sleep(POLL_S)
    found = {role: {(path, name) for path, name in json.loads(file.read_text())} for role, file in files.items()}
    for file in files.values():
        file.unlink()
    return found


def _stream(rest: str) -> None:
    """Streams one answer to its end. Raises RuntimeError when it does not come, or came without guesses."""
    connection = http.client.HTTPConnection(rest, timeout=PATIENCE_S)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(REQUEST | SPECULATION), headers)
    answer = connection.getresponse().read().decode()
    connection.close()
    chunks = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    last = json.loads(chunks[-1])
    if not answer.rstrip().endswith("[DONE]") or not last["metrics"]["speculative_decoding"]["num_draft_tokens"]:
        raise RuntimeError(f"the answer has no end or no drafts: {answer[-500:]}")


def main() -> None:
    """Measures, and prints."""
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(prog="python -m bench.house", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=here, help="the checkout to measure")
    parser.add_argument("--static", action="store_true", help="start nothing")
    parser.add_argument("--shapes", type=Path, help="JSON like SHAPES: those of another checkout")
    parser.add_argument("--json", type=Path, help="where the same goes as JSON")
    options = parser.parse_args()
    root = options.root.resolve()
    sources = read_sources(root)
    figures = [*sizes(root, sources), *uses(sources), *class_names(sources)]
    if options.shapes or root == here:
        figures += shapes(root, json.loads(options.shapes.read_text()) if options.shapes else SHAPES)
    if not options.static:
        figures += token_path(root, sources)
    print("| figure | value |\n| --- | --- |", *(f"| {each.name} | {each.value:g} |" for each in figures), sep="\n")
    for each in figures:
        if each.listed:
            print(f"\n{each.name}:\n", *(f"- {line}" for line in each.listed), sep="\n")
    if not (options.shapes or root == here):
        print("\nThe shapes of a request and of a verdict are those of another checkout; name its own with --shapes.")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
