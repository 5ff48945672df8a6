"""Which versions are installed, and whether they are those that this one needs. Imports none of what it looks at."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from outrider.cli.doctor.findings import Finding, failed, ok, warning

CHECK = "versions"
SHOWN = ("outrider", "torch", "grpcio", "protobuf", "tokenizers", "fastapi", "uvicorn")
OURS = "outrider"
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed: versions by name, None where missing, and the needs of this installation."""

    python: str
    versions: Mapping[str, str | None]
    needs: tuple[str, ...]
    """Requirements as the distribution states them, for instance `torch<3,>=2.8; extra == "engine"`."""


def gather() -> Installed:
    """Reads the metadata of this environment."""
    needs = tuple(_needs())
    names = dict.fromkeys((*SHOWN, *(Requirement(each).name for each in needs)))
    return Installed(platform.python_version(), {name: _version(name) for name in names}, needs)


def judge(installed: Installed) -> list[Finding]:
    """The versions, then whatever does not fit."""
    shown = ", ".join(f"{name} {installed.versions.get(name) or 'missing'}" for name in SHOWN)
    findings = [ok(CHECK, f"Python {installed.python}, {shown}.")]
    requirements = [Requirement(each) for each in installed.needs]
    for each in requirements:
        found = installed.versions.get(each.name)
        if found is not None and not each.specifier.contains(found, prereleases=True):
            sentence = f"{each.name} is {found}, but must be {each.specifier}."
            findings.append(failed(CHECK, sentence, f"pip install '{each.name}{each.specifier}'"))
    for extra in ("", ENGINE):
        missing = [
            each.name for each in requirements if _extra(each) == extra and not installed.versions.get(each.name)
        ]
        if missing:
            findings.append(_missing(extra, missing))
    return findings


def _missing(extra: str, names: list[str]) -> Finding:
    absent = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"
    if extra == ENGINE:
        sentence = f"{absent}, so this installation can be a gateway or a client, but serves no model."
        return warning(CHECK, sentence, "pip install 'outrider[engine]'")
    return failed(CHECK, f"{absent}.", f"pip install {' '.join(names)}")


def _extra(requirement: Requirement) -> str | None:
    """The extra that asks for it: empty for everybody, None for one that no command needs."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return ""
    return ENGINE if marker.evaluate({"extra": ENGINE}) else None


def _needs() -> Iterator[str]:
    try:
        stated = requires(OURS) or []
    except PackageNotFoundError:
        return
    yield from (each for each in stated if _extra(Requirement(each)) is not None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
