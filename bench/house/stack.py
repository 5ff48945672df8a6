"""A served stack of a checkout, and the files that one token passes in it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.house.recorder import PATIENCE_S, window, write_hook
from bench.house.source import Figure, Source

REQUEST = {
    "prompt": "Once upon a time there was a",
    "max_tokens": 24,
    "ignore_eos": True,
    "seed": 3,
    "stream": True,
    "speculation": {"draft_count": 4},
}
# What an idle stack does by the clock comes within this time.
IDLE_S = 5.0
MAX_FILES, MAX_LINES = 50, 11_000


def token_path(root: Path, sources: Sequence[Source]) -> list[Figure]:
    """Files of the services with a function that ran for one streamed request, and does not run by the clock."""
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
        Figure("files on the token path", len(passed), listed, MAX_FILES),
        Figure("lines of these files", sum(source.num_lines for source in passed), goal=MAX_LINES),
    ]


def outrider(root: Path) -> list[str]:
    """The command line of a checkout, whatever module its entry point lies in."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["outrider"].partition(":")
    return [sys.executable, "-P", "-c", f"from {module} import {function}; {function}()"]


def environment(*path: object) -> dict[str, str]:
    """The environment with folders before all others, those of its own PYTHONPATH included."""
    folders = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


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
