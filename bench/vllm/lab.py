"""vLLM in a process of its own, which has an environment of its own and speaks lines of JSON, and drafts beside it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.cli.bench.common import REPOSITORY
from outrider.cli.modules import NotInstalled
from outrider.errors import OutriderError

PROGRAM = Path(__file__).with_name("engine.py")
ENVIRONMENT = REPOSITORY / ".venv-vllm"
PROPOSER = {"method": "custom_class", "model": "outrider.drafting.vllm.RemoteProposer"}


class VllmFailed(OutriderError):
    """vLLM has ended, or did not start."""

    reason = "VLLM_FAILED"


class _Process:
    """A program whose lines on stdout are read; leaving the context kills it."""

    def __init__(self, words: Sequence[str | Path], environment: Mapping[str, str], errors: Path | None) -> None:
        with open(errors or os.devnull, "wb") as log:
            self.process = subprocess.Popen(
                words, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        with self.process:
            self.process.kill()


class Engine(_Process):
    """vLLM over a folder in float32; with a way to guess, if one is given, and a draft's address for our own."""

    def __init__(
        self,
        model: Path | str,
        speculative: Mapping[str, Any] | None = None,
        *,
        draft: str = "",
        deadline_ms: int = 100,
        cpus: str = "0",
        log: Path | None = None,
        **options: object,
    ) -> None:
        """`cpus` as `0-1` are those it computes on; options are vLLM's; a log is its stderr. Raises NotInstalled."""
        python = Path(os.environ.get("OUTRIDER_VLLM_PYTHON", ENVIRONMENT / "bin" / "python"))
        if not python.exists():
            raise NotInstalled(f"vLLM is not in {ENVIRONMENT}. Run make vllm, which takes 3 GB.")
        # What vLLM asks for: with the C library's threads alone, each waits long for the others.
        preload = python.parents[1] / "lib" / "libiomp5.so"
        settings = {
            "PYTHONPATH": str(REPOSITORY),
            "LD_PRELOAD": str(preload),
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "OUTRIDER_DRAFT": draft,
            "OUTRIDER_DRAFT_DEADLINE_MS": str(deadline_ms),
        }
        words = (python, PROGRAM, str(model), json.dumps(speculative), json.dumps(options))
        super().__init__(words, {**os.environ, **settings}, log)
        assert self.read() == {"ready": True}

    def read(self) -> dict[str, Any]:
        """What it says next. Raises VllmFailed."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b'{"said"'):
                said: dict[str, Any] = json.loads(line)["said"]
                return said
        raise VllmFailed(f"vLLM ended with {self.process.wait()}")

    def ask(self, prompts: Sequence[Sequence[int]], streams: int, tokens: int) -> None:
        """Lets it answer prompts, so many at once, with so many tokens each; it says what comes meanwhile."""
        assert self.process.stdin is not None
        line = {"prompts": [[*prompt] for prompt in prompts], "streams": streams, "tokens": tokens}
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def finish(self) -> dict[str, Any]:
        """What came of what it was asked: answers, seconds, row_steps, counters. Raises VllmFailed."""
        while "answers" not in (said := self.read()):
            pass
        return said


class Draft(_Process):
    """A draft service of a model, with one thread; `address` and `metrics` are where it listens."""

    def __init__(self, model: str, listen: str = "127.0.0.1:0") -> None:
        words = ("--model", model, "--listen", listen, "--metrics-listen", "127.0.0.1:0", "--threads", "1")
        super().__init__((sys.executable, "-m", "draft_service", *words), os.environ, None)
        assert self.process.stdout is not None
        said = next(each for line in self.process.stdout if (each := json.loads(line))["event"] == "listening")
        self.address, self.metrics = str(said["address"]), str(said["metrics"])
