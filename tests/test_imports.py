"""The import rule, read from the source: imports point one way, and what must stay light never reaches torch.

Nothing is imported here, so a violation is found even in a module that no test loads.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("outrider", "draft_service", "target_service", "gateway", "bench", "models")
HEAVY = ("torch", "numpy", "transformers", "safetensors", "outrider.engine")
# What each side must not import itself. `bench` stands outside the house and may look at all of it.
FORBIDDEN: Mapping[str, tuple[str, ...]] = {
    "gateway": (*HEAVY, "draft_service", "target_service", "outrider.cli", "bench"),
    "draft_service": ("gateway", "target_service", "outrider.cli", "bench", "transformers"),
    "target_service": ("gateway", "draft_service", "outrider.cli", "bench", "transformers"),
    "outrider": ("gateway", "draft_service", "target_service", "bench", "transformers"),
}
# Transformers costs seconds and hundreds of megabytes: one package imports it, and is itself imported by name alone.
HF_MODELS = "outrider.engine.hf_models"
# What must not reach HEAVY by any chain of imports.
LIGHT = (
    "gateway",
    "outrider.cli",
    "outrider.client",
    "outrider.process.health_probe",
    "outrider.cli.local_stack",
    "outrider.cli.local_stack",
)
# The engine uses these of the house, and itself. The last two hold names, numbers and places of the sized models, which
# the gateway and the command line need as well, and which therefore cannot lie in the engine.
ENGINE_MAY_USE = (
    "outrider.engine",
    "outrider.errors",
    "outrider.parameters",
    "outrider.model_names",
    "outrider.model_names",
)
# protobuf stops at the doors.
PROTOBUF_MODULES = re.compile(
    r"(draft_service|target_service|gateway)\.servicer|gateway\.(links|streams|client_writer|(chat|generation)_messages|\w+_(session|stream))"
    r"|outrider\.(model_servicer|session_servicer|wire(_\w+)?|rpc|cli\.model_facts|client\.(requests|replies))|outrider\.v1(\..+)?|bench\..+"
)


@dataclass(frozen=True)
class Module:
    """A source file by its dotted name."""

    name: str
    tree: ast.Module


def read_modules(root: Path) -> dict[str, Module]:
    """All modules of the packages, without the generated stubs' contents being special."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return modules


@cache
def imported(module: Module) -> set[str]:
    """Dotted names that a module imports; `from a import b` counts as a and a.b, since b may be a module."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def within(name: str, packages: Iterable[str]) -> bool:
    """Whether a dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def reached(start: str, modules: Mapping[str, Module]) -> dict[str, str]:
    """Everything that importing a module imports, each with the module that does it; parents of a module included."""
    found: dict[str, str] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        parents = {name.rpartition(".")[0]} - {""}
        for other in (imported(modules[name]) if name in modules else set()) | parents:
            if other not in found:
                found[other] = name
                waiting.append(other)
    return found


def is_fallback_s_own(module: str, name: str) -> bool:
    """Whether the fallback imports what is there for it alone."""
    return within(module, [HF_MODELS]) and within(name, ["transformers"])


def fallback_imports(modules: Mapping[str, Module]) -> list[str]:
    """Modules that import the fallback, and with it transformers."""
    return [
        f"{module.name} imports {name}"
        for module in modules.values()
        if not within(module.name, [HF_MODELS])
        for name in sorted(imported(module))
        if within(name, [HF_MODELS])
    ]


def forbidden_imports(modules: Mapping[str, Module]) -> list[str]:
    """Imports that point the wrong way."""
    return [
        f"{module.name} imports {name}"
        for module in modules.values()
        for name in sorted(imported(module))
        if (within(name, FORBIDDEN.get(module.name.split(".")[0], ())) and not is_fallback_s_own(module.name, name))
        or (within(module.name, ["outrider.engine"]) and within(name, PACKAGES) and not within(name, ENGINE_MAY_USE))
    ]


def heavy_chains(modules: Mapping[str, Module]) -> list[str]:
    """Light modules that reach a heavy one, with the link that does it."""
    return [
        f"{module.name} reaches {name} through {by}"
        for module in modules.values()
        if within(module.name, LIGHT)
        for name, by in reached(module.name, modules).items()
        if within(name, HEAVY)
    ]


def knots(modules: Mapping[str, Module]) -> list[str]:
    """Imports inside functions, relative imports, and TYPE_CHECKING."""
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [part for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom)]
                found += [f"{module.name} imports in line {part.lineno}, inside a function" for part in inside]
            if isinstance(node, ast.ImportFrom) and node.level:
                found.append(f"{module.name} imports relatively in line {node.lineno}")
            if "TYPE_CHECKING" in {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)}:
                found.append(f"{module.name} says TYPE_CHECKING")
    return found


def protobuf_leaks(modules: Mapping[str, Module]) -> list[str]:
    """Modules behind the doors that know protobuf."""
    return [
        f"{module.name} imports {name}"
        for module in modules.values()
        if not PROTOBUF_MODULES.fullmatch(module.name)
        for name in sorted(imported(module))
        if within(name, ["outrider.v1", "google.protobuf"])
    ]


RULES = (forbidden_imports, fallback_imports, heavy_chains, knots, protobuf_leaks)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(ROOT)


def test_imports_point_one_way(modules: dict[str, Module]) -> None:
    """No package imports what lies above or beside it."""
    assert forbidden_imports(modules) == []


def test_the_fallback_is_loaded_by_name_alone(modules: dict[str, Module]) -> None:
    """No import statement makes a process pay for transformers."""
    assert fallback_imports(modules) == []


def test_light_processes_never_reach_torch(modules: dict[str, Module]) -> None:
    """Gateway, command line, supervisor and probe reach neither torch nor the engine by any chain."""
    assert heavy_chains(modules) == []


def test_no_knots(modules: dict[str, Module]) -> None:
    """Every import stands at the top of its module, is absolute, and happens at run time."""
    assert knots(modules) == []


def test_protobuf_stops_at_the_doors(modules: dict[str, Module]) -> None:
    """Only servicers and clients know the messages."""
    assert protobuf_leaks(modules) == []


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("gateway.rounds.planner", "import torch.nn", "gateway.rounds.planner imports torch.nn"),
        ("draft_service.drafters.a", "from target_service import b", "draft_service.drafters.a imports target_service"),
        ("outrider.engine.a", "from outrider import rpc", "outrider.engine.a imports outrider.rpc.channels"),
        ("outrider.cli.a", "import middle", "outrider.cli.a reaches torch through middle"),
        ("outrider.engine.b", "import transformers", "outrider.engine.b imports transformers"),
        ("outrider.engine.c", f"from {HF_MODELS} import d", f"outrider.engine.c imports {HF_MODELS}"),
        ("gateway.a", "def f():\n    import json", "gateway.a imports in line 2, inside a function"),
        ("gateway.b", "from . import a", "gateway.b imports relatively in line 1"),
        ("gateway.c", "import typing\nif typing.TYPE_CHECKING: pass", "gateway.c says TYPE_CHECKING"),
        ("gateway.d", "from outrider.v1 import types_pb2", "gateway.d imports outrider.v1"),
    ],
)
def test_planted_violations_are_found(name: str, source: str, sentence: str) -> None:
    """Each rule can fail."""
    planted = {
        "middle": Module("middle", ast.parse("import torch")),
        name: Module(name, ast.parse(source)),
    }
    assert sentence in [found for rule in RULES for found in rule(planted)]
