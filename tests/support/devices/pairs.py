"""The same story on the CPU and on a device that is not there, with the same operations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.devices.pretend import pretend_device

from outrider.engine import runner as runner_module
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ModelRunner

T = TypeVar("T")


def load(folder: Path, patch: pytest.MonkeyPatch, device: str = "cpu", **options: Any) -> ModelRunner:
    """A runner with the operations that every device has."""
    patch.setattr(runner_module, "choose_ops", lambda *_, **__: EagerOps())
    return ModelRunner.load(str(folder), device=device, kv_tokens=4096, **{"dtype": "float32", **options})


def on_both(
    patch: pytest.MonkeyPatch,
    folder: Path,
    tell: Callable[[ModelRunner], T],
    prepare: Callable[[ModelRunner], object] = lambda _: None,
) -> tuple[T, T, list[str]]:
    """What a story gives on the CPU and on the device, and what the host waited with there, after `prepare`."""
    with patch.context() as own:
        runner = load(folder, own)
        prepare(runner)
        expected = tell(runner)
        with pretend_device(own) as device:
            runner = load(folder, own, "cuda:0")
            prepare(runner)
            device.waits.clear()
            found = tell(runner)
            return expected, found, list(device.waits)
