"""A run's folder: its settings, its checkpoint, what its stages made. A killed run finds it whole, whenever it died.

Every file is written beside its place and moved there, so it is the old one or the new one and never half of one.
`training.json` marks a folder as a run's own; `training/` is what the run needs to go on; `target` and `draft` are the
pair, moved there whole.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidRequest


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` make a file or folder under another name, and moves it to its own, where no folder may be yet."""
    partial = _partial(path)
    if partial.is_dir():
        shutil.rmtree(partial)
    write(partial)
    if partial.is_file():
        # Without it a host that loses power may keep the new name and lose the content.
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    partial.replace(path)


class Storage:
    """What is known of one run."""

    def __init__(self, out: Path, every: int) -> None:
        """Checkpoints are due after every so many steps."""
        self.out = out
        self.every = every
        self.folder = out / "training"
        self.tokenizer = self.folder / "tokenizer.json"
        self._settings = out / "training.json"
        self._checkpoint = self.folder / "checkpoint.pt"

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether the folder is this run's already. Raises InvalidRequest when it is another's."""
        if self._settings.is_file():
            self._compare(_read_settings(self._settings), settings)
            return True
        # What a run leaves that died before it had begun.
        own = (self.folder, self.tokenizer, *(_partial(each) for each in (self.tokenizer, self._settings)))
        if self.out.exists() and (not self.out.is_dir() or any(each not in own for each in self.out.rglob("*"))):
            raise InvalidRequest("--out", str(self.out), "a folder that is new, empty, or of the same run before")
        return False

    def claim(self, settings: Mapping[str, Any], tokenizer: str) -> None:
        """Makes the folder this run's. The settings come last: with them it has everything that a run begins with."""
        if self._settings.is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.tokenizer, lambda path: _write_text(path, tokenizer))
        text = json.dumps(settings, indent=2) + "\n"
        write_whole(self._settings, lambda path: _write_text(path, text))

    def _compare(self, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        # Through JSON, which knows no tuples.
        now = json.loads(json.dumps(settings))
        name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
        if name is not None:
            limit = f"that of the run in {self.out}, {before.get(name)!r}, or go with another --out"
            raise InvalidRequest(name, now.get(name), limit)

    def save_checkpoint(self, stage: str, step: int, state: Mapping[str, Any]) -> None:
        """Keeps what the stage needs to go on after so many steps, instead of what was kept before."""
        self._save(self._checkpoint, {"stage": stage, "step": step, **state})

    def checkpoint(self, stage: str) -> dict[str, Any] | None:
        """What was kept of this stage, on the CPU; None when it has not begun."""
        found = self._load(self._checkpoint)
        return found if found is not None and found["stage"] == stage else None

    def save_result(self, stage: str, result: Mapping[str, Any]) -> None:
        """Keeps what a finished stage made."""
        self._save(self.folder / f"{stage}.pt", result)

    def result(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage made, on the CPU; None when it has not finished."""
        return self._load(self.folder / f"{stage}.pt")

    def _save(self, path: Path, values: Mapping[str, Any]) -> None:
        write_whole(path, lambda partial: torch.save(dict(values), partial))

    def _load(self, path: Path) -> dict[str, Any] | None:
        if not path.is_file():
            return None
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return found


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest("--out", str(path.parent), "a folder of a run, unlike its training.json")
    return found


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
