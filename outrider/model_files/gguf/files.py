"""GGUF files by name: a path, or a hub id with `:FILE.gguf` after it where its repository has several."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from outrider.errors import ModelRefused

SUFFIX, SAFETENSORS = ".gguf", ".safetensors"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[A-Za-z]+)")
# How names end by the habit of llama.cpp and of those who publish its files: -Q4_K_M, .i1-IQ3_XXS, -UD-Q4_K_XL, -f16.
_QUANTISED = re.compile(
    r"(?<=.)[-._](?:(?:UD|i1|imat)[-._])*(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|B?F16|FP16|F32)$",
    re.IGNORECASE,
)
MAX_PARTS = 1000
# Models lie at the top of a repository; Mistral's own format repeats the weights under other names.
IGNORED = ["consolidated*", "*/*"]


def gguf_in(path: Path) -> Path | None:
    """The .gguf file that a path names, itself or the only one of a folder without safetensors; None for anything else.

    Of a split model it is the first part. Raises ModelRefused where a folder has several models.
    """
    # Path's own questions raise where a name is too long for the file system.
    if os.path.isfile(path):
        first = path.with_name(part_names(path.name)[0])
        return (first if os.path.isfile(first) else path) if is_gguf(path.name) else None
    names = [each.name for each in path.iterdir()] if os.path.isdir(path) else []
    return None if (name := only_gguf(str(path), names)) is None else path / name


def only_gguf(place: str, names: Iterable[str]) -> str | None:
    """The GGUF file among all files of a place, None beside safetensors or without any. Raises ModelRefused."""
    files = sorted(names)
    found = [name for name in files if is_gguf(name)]
    if not found or any(name.endswith(SAFETENSORS) for name in files):
        return None
    if len({part_names(name)[0] for name in found}) > 1:
        advice = "name one of them by its path, or behind a hub id as in org/name:FILE.gguf"
        raise ModelRefused(f"{place} has several GGUF files ({', '.join(found)}): {advice}", model=place)
    return found[0]


def is_gguf(name: str) -> bool:
    """Whether a file is one by its name, of which capitals are as good."""
    return name.lower().endswith(SUFFIX)


def part_names(name: str) -> list[str]:
    """The names of all parts of a split model by that of one, NAME-00002-of-00003.gguf; of any other file its own."""
    part = _PART.fullmatch(name)
    count = int(part["count"]) if part else 1
    if part is None or not 0 < int(part["number"]) <= count <= MAX_PARTS:
        return [name]
    return [f"{part['stem']}-{number:05d}-of-{part['count']}{part['suffix']}" for number in range(1, count + 1)]


def model_stem(name: str) -> str:
    """Name of a model by its file: without the suffix, which part it is, and how its numbers are quantised."""
    part = _PART.fullmatch(name)
    stem = Path(name).stem if part is None else part["stem"]
    return _QUANTISED.sub("", stem)


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, with `@revision` and `:FILE.gguf` after it where they are given."""

    model_id: str
    revision: str | None
    file: str | None

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parts of any name; whether the id can be one is for the hub's library to say."""
        repository, _, file = name.rpartition(":") if is_gguf(name) else (name, "", "")
        model_id, _, revision = (repository or file).partition("@")
        return cls(model_id, revision or None, file if repository and file else None)

    @property
    def command(self) -> str:
        """Command that downloads it."""
        parts = ["hf download", self.model_id, self.file, f"--revision {self.revision}" if self.revision else None]
        return " ".join(part for part in parts if part)


def cached_gguf(name: str, snapshot: Callable[..., Any]) -> Path | None:
    """The GGUF file of a hub id in the cache of downloads; `snapshot` is the hub library's snapshot_download.

    Raises ModelRefused where there are several, and what the library raises for an id that is not there.
    """
    hub = HubName.parse(name)
    patterns = part_names(hub.file) if hub.file else ["*.json"]
    folder = Path(snapshot(hub.model_id, revision=hub.revision, allow_patterns=patterns, local_files_only=True))
    return gguf_in(folder / hub.file if hub.file else folder)


def fetch_gguf(name: str, snapshot: Callable[..., Any]) -> Path | None:
    """The only GGUF file of a hub id, downloaded; None where its repository has safetensors or no GGUF file.

    None too where the hub does not say what there is. Raises ModelRefused where there are several.
    """
    hub, weights = HubName.parse(name), [f"*{SUFFIX}", f"*{SUFFIX.upper()}", f"*{SAFETENSORS}"]
    ask = partial(snapshot, hub.model_id, revision=hub.revision, allow_patterns=weights, ignore_patterns=IGNORED)
    try:
        offered = ask(dry_run=True)
    except (OSError, ValueError):
        return None
    file = only_gguf(name, [each.filename for each in offered])
    return None if file is None else fetch_file(replace(hub, file=file), snapshot)


def fetch_file(hub: HubName, snapshot: Callable[..., Any]) -> Path:
    """The file that is named, downloaded. Raises ModelRefused if there is none, and what the library raises."""
    names = part_names(str(hub.file))
    file = names[0]
    found = Path(snapshot(hub.model_id, revision=hub.revision, allow_patterns=names)) / file
    if not found.is_file():
        message = (
            f"{hub.model_id}:{file} is not downloaded, and the hub does not give it: run `{hub.command}` to see why"
        )
        raise ModelRefused(message, model=hub.model_id)
    return found
