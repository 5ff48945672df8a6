"""The sections, in the order in which they run, and how long each may take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from bench.gpu import card, cuda_tests, kernels, pair, questions, signatures, stack, steps
from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes


@dataclass(frozen=True, slots=True)
class PlanSection:
    """A part that runs in a process of its own, and is ended when its seconds are over."""

    name: str
    run: Callable[[Recorder, Sizes, torch.device], None]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


# Its products cannot be split over the inputs, for want of room to add the parts.
SMALL_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
# For all of them together, and what is left is the report's.
TOTAL_S = 530.0
SECTIONS = (
    PlanSection("card", card.run, 60),
    PlanSection("compile", signatures.run, 90),
    PlanSection("questions", questions.run, 90),
    PlanSection("pinned", questions.pinned, 45, SMALL_WORKSPACE),
    PlanSection("tests", cuda_tests.run, 120),
    PlanSection("kernels", kernels.run, 100),
    PlanSection("steps", steps.run, 150),
    PlanSection("pair", pair.run, 100),
    PlanSection("stack", stack.run, 90),
)
