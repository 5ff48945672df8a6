"""A run's folder: its settings, its checkpoint, what its stages made. A killed run finds it whole, whenever it died.

Every file is written beside its place and moved there, so it is the old one or the new one and never half of one.
`training.json` marks a folder as a run's own; `training/` is what the run needs to go on; `target` and `draft` are the
pair, moved there whole.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidRequest

SAVE_S = 30.0


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file or folder under another name, and moves it to its own, where no folder may be yet."""
    beside = _beside(path)
    if beside.is_dir():
        shutil.rmtree(beside)
    write(beside)
    if beside.is_file():
        # Without it a host that loses power may keep the new name and lose the content.
        with beside.open("rb") as file:
            os.fsync(file.fileno())
    beside.replace(path)


class Storage:
    """Files and checkpoints of one run."""

    def __init__(self, out: Path, every: int) -> None:
        """Checkpoints are due after every so many steps, and at the first step after SAVE_S seconds without one."""
        self.out, self.every = out, every
        self._saved_s = time.monotonic()
        self.folder = out / "training"
        self.tokenizer = self.folder / "tokenizer.json"
        self._settings = out / "training.json"
        self._checkpoint = self.folder / "checkpoint.pt"

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether the folder is this run's already. Raises InvalidRequest about the first setting that is another's."""
        if not self._settings.is_file():
            # What a run leaves that died before it had begun.
            own = (self.folder, self.tokenizer, *(_beside(each) for each in (self.tokenizer, self._settings)))
            if self.out.exists() and (not self.out.is_dir() or any(each not in own for each in self.out.rglob("*"))):
                raise InvalidRequest("--out", str(self.out), "a folder that is new, empty, or of the same run before")
            return False
        try:
            before = json.loads(self._settings.read_text(encoding="utf-8"))
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise InvalidRequest("--out", str(self.out), "a folder of a run, unlike its training.json")
        # Through JSON, which makes lists of tuples.
        now = json.loads(json.dumps(settings))
        name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
        if name is not None:
            limit = f"that of the run in {self.out}, {before.get(name)!r}, or go with another --out"
            raise InvalidRequest(name, now.get(name), limit)
        return True

    def claim(self, settings: Mapping[str, Any], tokenizer: str) -> None:
        """Makes the folder this run's. The settings come last: with them it has everything that a run begins with."""
        if self._settings.is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, text in ((self.tokenizer, tokenizer), (self._settings, json.dumps(settings, indent=2) + "\n")):
            write_whole(file, partial(Path.write_text, data=text, encoding="utf-8"))

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be kept after so many steps of a stage."""
        return step % self.every == 0 or time.monotonic() - self._saved_s >= SAVE_S

    def save_checkpoint(self, stage: str, step: int, state: Mapping[str, Any]) -> None:
        """Keeps what the stage needs to go on after so many steps, instead of what was kept before."""
        _save(self._checkpoint, {"stage": stage, "step": step, **state})
        self._saved_s = time.monotonic()

    def checkpoint(self, stage: str) -> dict[str, Any] | None:
        """State that was kept of this stage, on the CPU; None when it has not begun."""
        found = _load(self._checkpoint)
        return found if found is not None and found["stage"] == stage else None

    def save_result(self, stage: str, result: Mapping[str, Any]) -> None:
        """Keeps the result of a finished stage."""
        _save(self.folder / f"{stage}.pt", result)

    def result(self, stage: str) -> dict[str, Any] | None:
        """Result of a finished stage, on the CPU; None when it has not finished."""
        return _load(self.folder / f"{stage}.pt")


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _save(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, partial(torch.save, dict(values)))


def _load(path: Path) -> dict[str, Any] | None:
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
