"""llama.cpp in a process of its own, which has an environment of its own and speaks lines of JSON: see llama.py."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from outrider.cli.bench.common import REPOSITORY
from outrider.cli.modules import NotInstalled
from outrider.errors import OutriderError

PYTHON = REPOSITORY / ".venv-llama" / "bin" / "python"
PROGRAM = Path(__file__).with_name("llama.py")


class LlamaFailed(OutriderError):
    """llama.cpp refused what it was asked for, or its process has ended."""

    reason = "LLAMA_FAILED"


class Llama:
    """A running llama.cpp; leaving the context ends it."""

    def __init__(self) -> None:
        """Raises NotInstalled."""
        if not PYTHON.exists():
            raise NotInstalled(f"llama.cpp is not in {PYTHON.parents[1]}. Run make lab, which compiles it.")
        command = (str(PYTHON), str(PROGRAM))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - each has its own answer
        """What a method of llama.py's Lab returns. Raises LlamaFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LlamaFailed(f"llama.cpp ended with {self._process.wait()} while it was to {do}")
        said = json.loads(line)
        if "error" in said:
            raise LlamaFailed(said["error"])
        return said["said"]

    def blocks(self, rows: Tensor, kind: GGMLQuantizationType) -> Tensor:
        """Rows of weights, float32 [R, W], as llama.cpp's quantiser writes them in a type, uint8 [R, bytes]."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.npy")
            np.save(file, rows.numpy())
            self.ask("blocks", file=str(file), kind=int(kind))
            return torch.from_numpy(np.load(file))

    def log_probabilities(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities [T, V] of the token after each of these, at most 512."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "logits.npy")
            self.ask("logits", tokens=list(token_ids), file=str(file))
            return torch.log_softmax(torch.from_numpy(np.load(file)), 1)
