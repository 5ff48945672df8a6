"""Asks a machine with a GPU all that we want to know of it, in nine minutes: `bench/gpu.sh`, or `python -m bench.gpu`.

Every section runs in a process of its own and writes what it finds at once, so that a fault or a deadline costs one
section. Files in the folder: records.jsonl, report.md, log.txt. docs/machines/gpu.md says how to read them.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.gpu.plan import SECTIONS, TOTAL_S, PlanSection
from bench.gpu.records import RECORDS, Recorder
from bench.gpu.report import write_report
from outrider.errors import InvalidRequest
from outrider.process.options import run_app, service_app

ROOT = Path(__file__).resolve().parents[2]
# Less is not worth starting a process for.
LEAST_S = 10.0

app = service_app()


@app.command()
def gpu(
    *,
    dry: Annotated[
        bool, typer.Option("--dry", help="On the CPU, with small shapes: whether everything runs, in a minute.")
    ] = False,
    sections: Annotated[
        str, typer.Option(help="Names, separated by commas.", metavar="NAMES", show_default=False)
    ] = ",".join(each.name for each in SECTIONS),
    out: Annotated[Path, typer.Option(help="Folder of the records and the report.", metavar="DIR")] = Path("build/gpu"),
) -> None:
    """Measures this machine's first GPU, and writes a report in Markdown."""
    chosen = sections.split(",")
    unknown = next((name for name in chosen if name not in {each.name for each in SECTIONS}), None)
    if unknown is not None:
        raise InvalidRequest("--sections", unknown, f"among {', '.join(each.name for each in SECTIONS)}")
    if not dry and not torch.cuda.is_available():
        raise InvalidRequest("--dry", "absent", "given where torch sees no CUDA device")
    out.mkdir(parents=True, exist_ok=True)
    for name in (RECORDS, "log.txt"):
        (out / name).unlink(missing_ok=True)
    ends_s = time.monotonic() + TOTAL_S
    device = "cpu" if dry else "cuda:0"
    for section in SECTIONS:
        if section.name in chosen:
            _run(section, device, out, min(section.seconds, ends_s - time.monotonic()))
    print(write_report(out, ROOT / "bench" / "gpu_expected.json"))


def _run(section: PlanSection, device: str, out: Path, seconds: float) -> None:
    recorder = Recorder(out, section.name)
    if seconds < LEAST_S:
        recorder.fail("section", "no time was left")
        return
    start = time.monotonic()
    command = [sys.executable, "-m", "bench.gpu.child", section.name, device, str(out.resolve())]
    environment = {**os.environ, **section.environment, "PYTHONUNBUFFERED": "1"}
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n=== {section.name}\n")
        log.flush()
        # In a group of its own, so that its own children end with it.
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            recorder.fail("section", f"ended at its deadline, after {seconds:.0f} s")
        else:
            if status:
                recorder.fail("section", f"ended with {status}; log.txt says more")
    took_s = time.monotonic() - start
    recorder.add("seconds", took_s, "s")
    print(f"{section.name}: {took_s:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_app(app)
