"""What computes on this machine, asked of a child process. Never imports torch itself.

The child loads the target as a service loads it and compares rows of its logits bit by bit (DESIGN: row invariance).
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cli.doctor.findings import CONFIG, SOFTWARE, Finding, failed, gibibytes, ok, skipped, warning
from outrider.cli.stack import OFFLINE

KERNELS, CUDA, ROWS = "kernels", "cuda", "row invariance"
COMPILERS = ("cc", "gcc", "clang")
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps -e ."
# Far longer than a large model takes to load.
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Engine:
    """What the child said: its facts, or in one sentence why there are none, with its exit code."""

    facts: Mapping[str, Any]
    problem: str = ""
    code: int = 0


def command(model: str, dtype: str, device: str, threads: int) -> tuple[str, ...]:
    """The child's command line; without a model it loads none."""
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    flags = ("--model", model, "--dtype", dtype, "--device", device, "--threads", str(threads))
    return (sys.executable, "-P", "-m", "outrider.model_service.row_probe", *flags)


async def gather(arguments: tuple[str, ...]) -> Engine:
    """Runs the child to its end; cancelled, it ends the child."""
    pipe = asyncio.subprocess.PIPE
    # A check of this machine downloads nothing.
    environment = {**os.environ, **OFFLINE}
    child = await asyncio.create_subprocess_exec(
        *arguments, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    )
    try:
        output, notes = await asyncio.wait_for(child.communicate(), PATIENCE_S)
    except TimeoutError:
        return Engine({}, f"The probe was not done within {PATIENCE_S:g} s.", SOFTWARE)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return parse(output.decode(errors="replace"), notes.decode(errors="replace"), child.returncode or 0)


def parse(output: str, notes: str, code: int) -> Engine:
    """The child's line, or its last words."""
    if code == 0:
        return Engine(json.loads(output.strip().splitlines()[-1]))
    last = next((line.strip() for line in reversed(notes.splitlines()) if line.strip()), "It said nothing.")
    return Engine({}, last, code)


def compiler() -> str | None:
    """Where a C compiler is, None where there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def judge(engine: Engine, compiler_path: str | None, device: str) -> list[Finding]:
    """Kernels, CUDA devices, and whether rows are independent."""
    if not engine.facts:
        return [_no_facts(engine)]
    return [
        _kernels(engine.facts, compiler_path),
        _cuda(engine.facts["cuda"], device),
        *_rows(engine.facts, device),
    ]


def _no_facts(engine: Engine) -> Finding:
    if "No module named 'torch'" in engine.problem:
        return skipped(ROWS, "There is no torch here to compute with.", "pip install 'outrider[engine]'")
    if engine.code == CONFIG:
        return failed(ROWS, engine.problem, "Name another model with --target.", CONFIG)
    fix = "Run `python -m outrider.model_service.row_probe --model DIR` to see all of what it says."
    return failed(ROWS, f"The engine does not run: {engine.problem}", fix, SOFTWARE)


def _kernels(facts: Mapping[str, Any], compiler_path: str | None) -> Finding:
    found, levels = facts["kernels"], facts["processor_levels"]
    built_with = f"compiler {compiler_path}" if compiler_path else "no C compiler"
    if found is None and not levels:
        sentence = "This processor has neither AVX2 nor AVX-512, so torch computes, several times slower."
        return warning(KERNELS, sentence, "Use a machine with AVX2 (2013 or later), or an accelerator.")
    if found is None:
        sentence = f"The kernels are not built ({built_with}), so torch computes, several times slower."
        fix = REBUILD if compiler_path else f"Install a C compiler (apt install gcc libc6-dev), then: {REBUILD}"
        return warning(KERNELS, sentence, fix)
    if found != levels[0]:
        return warning(KERNELS, f"{found} is built, but {levels[0]} would run here and is faster.", REBUILD)
    return ok(KERNELS, f"{found} is built, and the fastest for this processor ({built_with}).")


def _cuda(devices: list[Mapping[str, Any]], device: str) -> Finding:
    if devices:
        names = (f"cuda:{n} is {each['name']}, {gibibytes(each['memory_bytes'])}" for n, each in enumerate(devices))
        return ok(CUDA, f"{'; '.join(names)}.")
    if device != "cpu":
        return failed(CUDA, f"{device} is wanted, but torch sees no CUDA device.", "Leave out --device.")
    return skipped(CUDA, "torch sees no CUDA device; models run on the CPU.")


def _rows(facts: Mapping[str, Any], device: str) -> list[Finding]:
    comparisons = facts.get("comparisons")
    if comparisons is None:
        return [skipped(ROWS, "No model was loaded.")]
    unequal = [each for each in comparisons if each["equal_rows"] != each["rows"]]
    numerics = facts["numerics_id"]
    if not unequal:
        counts = ", ".join(f"{each['name']} ({each['rows']} rows)" for each in comparisons)
        return [ok(ROWS, f"Bitwise equal with {numerics}: {counts}.")]
    shares = ", ".join(f"{each['name']}: {each['rows'] - each['equal_rows']} of {each['rows']}" for each in unequal)
    sentence = f"Rows differ in their bits with {numerics} ({shares}), so tokens may depend on who else is served."
    if device != "cpu":
        return [warning(ROWS, sentence, "Use --device cpu where every token must be that of plain decoding.")]
    return [failed(ROWS, sentence, f"Build the kernels again: {REBUILD}", SOFTWARE)]
