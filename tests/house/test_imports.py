"""The import rules, one table, read from the source: imports point one way, and light processes never reach torch.

`docs/architecture.md` shows the same table. Nothing is imported here, so a violation is found even in a module that no
test loads.
"""

import ast
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("outrider", "draft_service", "target_service", "gateway", "bench", "models")
HEAVY = ("torch", "transformers", "safetensors", "outrider.engine")
# Who may have numpy, which takes a seventh of a second, but no torch.
WITH_NUMPY = ("gateway", "outrider.drafting.rows", "outrider.drafting.vllm")
# Who may compile grammars without torch. Client and command line pass them on as text.
WITH_LLGUIDANCE = ("gateway", "outrider.grammar")
PROTOBUF = ("outrider.v1", "google.protobuf")
# Transformers costs seconds and hundreds of megabytes: one package imports it, and is itself imported by name alone.
HF_MODELS = "outrider.engine.hf_models"
# Rare ways to guess: whoever puts a service together knows them, and nobody else.
SHELF = "outrider.drafters.shelf"
# Packages that few modules may import. The dialects of REST share what stands beside them, and nothing of each other's.
CLOSED = {
    SHELF: ("draft_service.server", "target_service.server", "outrider.drafters.registry"),
    "gateway.rest.openai": ("gateway.rest.app",),
    "gateway.rest.anthropic": ("gateway.rest.app",),
}


@dataclass(frozen=True)
class Rule:
    """What a package may import of the house beside itself. Of several rules the one with the longest name holds."""

    package: str
    may_import: tuple[str, ...] = ()
    torch: bool = False
    """Whether it may reach torch, safetensors or the engine by any chain of imports."""
    protobuf: bool = False
    """Whether it may know the messages. Everywhere else there are plain dataclasses."""


SHARED = (
    "outrider.errors",
    "outrider.parameters",
    "outrider.token_tree",
    "outrider.beams",
    "outrider.model_files",
    "outrider.constraint",
    "outrider.grammar",
    "outrider.answer",
    "outrider.estimates.timing",
    "outrider.estimates.prefixes",
)
PLUMBING = ("outrider.rpc", "outrider.process")
SERVICE = (*SHARED, *PLUMBING, "outrider.engine", "outrider.drafters", "outrider.model_service")
COMMANDS = ("outrider.client", "outrider.model_service.settings")
RULES = (
    Rule("outrider.errors"),
    Rule("outrider.parameters", ("outrider.errors",)),
    Rule("outrider.model_files", ("outrider.errors", "outrider.parameters")),
    Rule("outrider.token_tree", ("outrider.errors", "outrider.parameters")),
    Rule("outrider.beams", ("outrider.errors", "outrider.token_tree")),
    Rule("outrider.constraint", ("outrider.errors",)),
    Rule("outrider.grammar", ("outrider.errors", "outrider.constraint")),
    Rule("outrider.answer", ("outrider.parameters",)),
    Rule("outrider.estimates.timing"),
    Rule("outrider.estimates.prefixes", ("outrider.errors",)),
    Rule("outrider.v1", protobuf=True),
    Rule("outrider.rpc", SHARED, protobuf=True),
    Rule("outrider.process", (*SHARED, "outrider.rpc")),
    Rule("outrider.estimates", ("outrider.token_tree",)),
    Rule("outrider.engine", (*SHARED, "outrider.estimates"), torch=True),
    Rule("outrider.drafters", (*SHARED, "outrider.engine", "outrider.estimates"), torch=True),
    Rule("outrider.model_service", (*SHARED, *PLUMBING, "outrider.engine"), torch=True, protobuf=True),
    Rule("outrider.model_service.settings", (*SHARED, *PLUMBING)),
    Rule("outrider.drafting", ("outrider.errors", "outrider.model_files.digests", "outrider.rpc"), protobuf=True),
    Rule("outrider.client", (*SHARED, "outrider.rpc"), protobuf=True),
    Rule("outrider.cli", (*SHARED, *PLUMBING, *COMMANDS), protobuf=True),
    Rule("outrider.cli.bench", (*SHARED, *PLUMBING, "outrider.cli", *COMMANDS), protobuf=True),
    Rule(
        "outrider.cli.bench.rounds",
        (*SERVICE, "outrider.cli", "outrider.client", "target_service", "gateway.text"),
        torch=True,
        protobuf=True,
    ),
    Rule("draft_service", SERVICE, torch=True),
    Rule("draft_service.servicer", ("draft_service", *SERVICE), torch=True, protobuf=True),
    Rule("target_service", (*SERVICE, "outrider.estimates"), torch=True),
    Rule("target_service.servicer", ("target_service", *SERVICE), torch=True, protobuf=True),
    Rule("gateway.rounds", (*SHARED, "outrider.estimates")),
    Rule("gateway.lookup", (*SHARED, "outrider.estimates", "gateway.rounds")),
    Rule("gateway.lookup.datastore", (*SHARED, "outrider.process")),
    Rule("gateway.tools", SHARED),
    Rule("gateway.keys", SHARED),
    Rule("gateway.text", (*SHARED, "gateway.tools")),
    Rule("gateway.sessions", (*SHARED, *PLUMBING, "outrider.estimates", "gateway.rounds"), protobuf=True),
    Rule("gateway.speculation", (*SHARED, "gateway.rounds", "gateway.lookup", "gateway.sessions")),
    Rule("gateway.beams", (*SHARED, *PLUMBING, "gateway.rounds", "gateway.sessions"), protobuf=True),
    Rule(
        "gateway.generation",
        (
            *SHARED,
            *PLUMBING,
            "gateway.rounds",
            "gateway.lookup",
            "gateway.sessions",
            "gateway.tools",
            "gateway.text",
            "gateway.speculation",
            "gateway.beams",
            "gateway.keys",
        ),
    ),
    Rule(
        "gateway.grpc",
        (*SHARED, *PLUMBING, "gateway.rounds", "gateway.tools", "gateway.text", "gateway.keys", "gateway.generation"),
        protobuf=True,
    ),
    Rule(
        "gateway.rest",
        (
            *SHARED,
            *PLUMBING,
            "gateway.rounds",
            "gateway.sessions",
            "gateway.tools",
            "gateway.text",
            "gateway.keys",
            "gateway.generation",
            "gateway.settings",
        ),
    ),
    Rule("gateway.settings", (*SHARED, *PLUMBING, "gateway.lookup", "gateway.tools")),
    Rule("gateway", (*SHARED, *PLUMBING)),
)
# They stand outside the house and may look at all of it.
FREE = ("bench", "models")
# Programs, and the extras of pyproject.toml that must be installed beside the client for each to start.
PROGRAMS = {
    "outrider.client": (),
    "outrider.cli.app": (),
    "outrider.cli.bench.load.__main__": (),
    "outrider.cli.bench.timeline": (),
    "gateway.lookup.datastore.command": ("gateway",),
    "gateway.__main__": ("gateway",),
    "gateway.server": ("gateway",),
    "gateway.keys.store": ("redis",),
    "gateway.worker_process": ("gateway",),
    "outrider.cli.doctor.models": ("gateway",),
    "draft_service.__main__": ("engine",),
    "target_service.__main__": ("engine",),
    "outrider.model_service.convert_head": ("engine",),
    "outrider.cli.bench.rounds.__main__": ("gateway", "engine"),
}


@dataclass(frozen=True)
class Module:
    """A source file by its dotted name."""

    name: str
    tree: ast.Module


def read_modules(root: Path) -> dict[str, Module]:
    """All modules of the packages, without the generated stubs' contents being special."""
    modules = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
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


def rule_of(name: str) -> Rule | None:
    """The rule that holds for a module; None for what is free."""
    return max(
        (rule for rule in RULES if within(name, [rule.package])), key=lambda rule: len(rule.package), default=None
    )


def wrong_ways(modules: Mapping[str, Module]) -> list[str]:
    """Imports of the house that a module's rule does not name."""
    found = []
    for module in modules.values():
        rule = rule_of(module.name)
        if rule is None:
            found += [] if within(module.name, FREE) or module.name == "outrider" else [f"{module.name} has no rule"]
            continue
        allowed = (rule.package, *rule.may_import, *(["outrider.v1"] if rule.protobuf else []))
        found += [
            f"{module.name} imports {name}"
            for name in sorted(imported(module))
            if within(name, FOLDERS) and not within(name, allowed) and not is_package_of(name, allowed)
        ]
    return found


def is_package_of(name: str, allowed: Iterable[str]) -> bool:
    """Whether a name is only the package in which something allowed lies, as in `from outrider import errors`."""
    return any(other.startswith(name + ".") for other in allowed)


def hf_imports(modules: Mapping[str, Module]) -> list[str]:
    """Modules that import transformers, or the one package that does."""
    return [
        f"{module.name} imports {name}"
        for module in modules.values()
        if not within(module.name, [HF_MODELS, *FREE])
        for name in sorted(imported(module))
        if within(name, ["transformers", HF_MODELS])
    ]


def closed_imports(modules: Mapping[str, Module]) -> list[str]:
    """Modules that import a closed package and are none of the few that may."""
    return [
        f"{module.name} imports {name}"
        for package, users in CLOSED.items()
        for module in modules.values()
        if not within(module.name, [package, *users, *FREE])
        for name in sorted(imported(module))
        if within(name, [package])
    ]


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


def heavy_chains(modules: Mapping[str, Module]) -> list[str]:
    """Light modules that reach a heavy one, with the link that does it."""
    light = [module for module in modules.values() if (rule := rule_of(module.name)) is not None and not rule.torch]
    allowed = {"numpy": WITH_NUMPY, "llguidance": WITH_LLGUIDANCE}
    return [
        f"{module.name} reaches {name} through {by}"
        for module in light
        for name, by in reached(module.name, modules).items()
        if within(name, [*HEAVY, *(other for other, users in allowed.items() if not within(module.name, users))])
    ]


def undeclared(program: str, extras: Iterable[str], modules: Mapping[str, Module]) -> list[str]:
    """Distributions that a program imports and that its extras do not bring, neither themselves nor as a need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    direct = {canonicalize_name(Requirement(line).name) for line in lines}
    needs = (Requirement(line) for name in direct for line in requires(name) or ())
    brought = direct | {canonicalize_name(each.name) for each in needs if each.marker is None}
    owners = packages_distributions()
    tops = {name.partition(".")[0] for name in reached(program, modules)} - sys.stdlib_module_names - {*FOLDERS}
    return [
        f"{program} imports {top}"
        for top in sorted(tops)
        # Several share the package google, each of them declared.
        if not {canonicalize_name(owner) for owner in owners.get(top, ())} & brought
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
    """Modules inside the doors that know protobuf."""
    return [
        f"{module.name} imports {name}"
        for module in modules.values()
        if (rule := rule_of(module.name)) is not None and not rule.protobuf
        for name in sorted(imported(module))
        if within(name, PROTOBUF)
    ]


CHECKS = (wrong_ways, hf_imports, closed_imports, heavy_chains, knots, protobuf_leaks)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(ROOT)


@pytest.mark.slow
def test_imports_point_one_way(modules: dict[str, Module]) -> None:
    """No package imports what its rule does not name."""
    assert wrong_ways(modules) == []


def test_transformers_is_loaded_by_name_alone(modules: dict[str, Module]) -> None:
    """No import statement makes a process pay for transformers."""
    assert hf_imports(modules) == []


def test_rare_drafters_and_dialects_stand_aside(modules: dict[str, Module]) -> None:
    """No hot room imports the shelf, and no dialect of REST another, so that each of their files can be deleted."""
    assert closed_imports(modules) == []


def test_light_processes_never_reach_torch(modules: dict[str, Module]) -> None:
    """Gateway, client and command line reach neither torch nor the engine by any chain, the last two no llguidance."""
    assert heavy_chains(modules) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_has_what_it_imports(program: str, modules: dict[str, Module]) -> None:
    """The client and commands that ask a gateway elsewhere need no extra, and each part of the stack its own alone."""
    assert undeclared(program, PROGRAMS[program], modules) == []


@pytest.mark.parametrize(("program", "missing"), [("gateway.server", "fastapi"), ("target_service.__main__", "torch")])
def test_what_an_extra_would_bring_is_found(program: str, missing: str, modules: dict[str, Module]) -> None:
    """The check can fail: without their extras the parts lack what they import."""
    assert f"{program} imports {missing}" in undeclared(program, (), modules)


def test_no_knots(modules: dict[str, Module]) -> None:
    """Every import stands at the top of its module, is absolute, and happens at run time."""
    assert knots(modules) == []


def test_protobuf_stops_at_the_doors(modules: dict[str, Module]) -> None:
    """Only servicers and clients know the messages."""
    assert protobuf_leaks(modules) == []


def test_every_rule_is_about_something(modules: dict[str, Module]) -> None:
    """A rule whose package is gone is no rule."""
    assert [rule.package for rule in RULES if rule.package not in modules] == []


def row(rule: Rule) -> str:
    """A rule as a line of the table in docs/architecture.md, where siblings of the package begin with a dot."""
    groups = {"shared": SHARED, "plumbing": PLUMBING, "the frame": SERVICE[-3:]}
    named = [word for word, group in groups.items() if set(group) <= set(rule.may_import)]
    grouped = {name for word in named for name in groups[word]}
    parent = rule.package.rpartition(".")[0]
    others = [name for name in rule.may_import if name not in grouped]
    short = [name.removeprefix(parent) if parent and name.startswith(f"{parent}.") else name for name in others]
    may_import = ", ".join([*named, *(f"`{name}`" for name in short)]) or "nothing"
    return f"| `{rule.package}` | {may_import} | {'yes' if rule.torch else ''} | {'yes' if rule.protobuf else ''} |"


def test_the_document_shows_the_same_table() -> None:
    """docs/architecture.md has every rule, in the same order, and no other."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    head = "| package | may import | reaches torch | knows messages |"
    table = text[text.index(head) :].split("\n\n")[0].splitlines()
    assert table[2:] == [row(rule) for rule in RULES]


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        (
            "gateway.rounds.policy",
            "import torch.nn",
            "gateway.rounds.policy reaches torch.nn through gateway.rounds.policy",
        ),
        ("gateway.rounds.a", "from gateway import sessions", "gateway.rounds.a imports gateway.sessions"),
        ("gateway.server", "import draft_service", "gateway.server imports draft_service"),
        ("outrider.drafters.a", "from target_service import b", "outrider.drafters.a imports target_service"),
        ("outrider.engine.a", "from outrider import rpc", "outrider.engine.a imports outrider.rpc"),
        ("outrider.rpc.a", "from outrider.cli import b", "outrider.rpc.a imports outrider.cli"),
        ("outrider.estimates.a", "import torch", "outrider.estimates.a reaches torch through outrider.estimates.a"),
        ("outrider.b", "import json", "outrider.b has no rule"),
        ("outrider.cli.a", "import middle", "outrider.cli.a reaches torch through middle"),
        (
            "outrider.parameters",
            "import llguidance",
            "outrider.parameters reaches llguidance through outrider.parameters",
        ),
        ("outrider.engine.b", "import transformers", "outrider.engine.b imports transformers"),
        ("outrider.engine.c", f"from {HF_MODELS} import d", f"outrider.engine.c imports {HF_MODELS}"),
        ("draft_service.a", f"from {SHELF} import cascade", f"draft_service.a imports {SHELF}"),
        (
            "gateway.rest.anthropic.a",
            "import gateway.rest.openai",
            "gateway.rest.anthropic.a imports gateway.rest.openai",
        ),
        (
            "gateway.rest.openai.a",
            "from gateway.rest import anthropic",
            "gateway.rest.openai.a imports gateway.rest.anthropic",
        ),
        ("gateway.rest.sse", "import gateway.rest.openai", "gateway.rest.sse imports gateway.rest.openai"),
        ("gateway.a", "def f():\n    import json", "gateway.a imports in line 2, inside a function"),
        ("gateway.b", "from . import a", "gateway.b imports relatively in line 1"),
        ("gateway.c", "import typing\nif typing.TYPE_CHECKING: pass", "gateway.c says TYPE_CHECKING"),
        ("gateway.generation.d", "from outrider.v1 import types_pb2", "gateway.generation.d imports outrider.v1"),
    ],
)
def test_planted_violations_are_found(name: str, source: str, sentence: str) -> None:
    """Each rule can fail."""
    planted = {
        "middle": Module("middle", ast.parse("import torch")),
        name: Module(name, ast.parse(source)),
    }
    assert sentence in [found for check in CHECKS for found in check(planted)]
