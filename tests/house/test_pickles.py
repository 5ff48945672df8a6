"""No process that serves reads a pickle, which can run code; seen in the source, where ruff's rules stop halfway."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("outrider", "draft_service", "target_service", "gateway")
MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
# What a keyword must not be. Only numpy's is safe where it is left out.
UNSAFE = {"allow_pickle": True, "weights_only": False, "trust_remote_code": True}
# A command of its own: it unpickles tensors alone, and catches pickle's error.
CONVERTER = "outrider/engine/heads/convert.py"


def unpickled(source: str) -> list[str]:
    """What in a source may read a pickle: imports, torch's readers, and keywords that allow it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = {each.name for each in node.names}
            module = node.module or ""
            found += [module] if module.partition(".")[0] in MODULES else []
            found += [f"{module}.load"] if module.partition(".")[0] == "torch" and "load" in names else []
        elif isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node).startswith("torch."):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in UNSAFE:
            is_safe = isinstance(node.value, ast.Constant) and node.value.value is not UNSAFE[node.arg]
            found += [] if is_safe else [node.arg]
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from dill import loads", ["dill"]),
        ("from torch import load", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load", "weights_only"]),
        ("torch.load(path)", ["torch.load"]),
        ("torch.jit.load(path)", ["torch.jit.load"]),
        ("np.load(path, allow_pickle=True)", ["allow_pickle"]),
        ("np.load(path, allow_pickle=chosen)", ["allow_pickle"]),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", ["trust_remote_code"]),
        ("np.load(path)\nnp.load(path, allow_pickle=False)", []),
    ],
)
def test_what_reads_a_pickle_is_found(source: str, found: list[str]) -> None:
    """By whatever name and keyword."""
    assert unpickled(source) == found


@pytest.mark.slow
def test_nobody_who_serves_reads_a_pickle() -> None:
    """Only the converter of heads does, which nothing but its command imports, and which takes tensors alone."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    found = {name: each for name, source in sources.items() if (each := unpickled(source))}
    assert found == {CONVERTER: ["pickle", "torch.load"]}
    assert sources[CONVERTER].count("weights_only=True") == 1
    importing = {
        name for name, source in sources.items() if "heads.convert" in source or "heads import convert" in source
    }
    assert importing == {"outrider/model_service/convert_head.py"}
