"""One stage: a model takes lessons for so many steps, and goes on from its checkpoint. Knows no roles and no order."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outrider.errors import OutriderError
from training.blocks import IGNORED, Blocks
from training.evaluation import micro_batches
from training.losses import Loss
from training.optimisers import Optimisers, rate
from training.storage import Storage


@dataclass(frozen=True, slots=True)
class Portion:
    """What a step takes of one kind of block."""

    batch: int
    """Blocks a step."""
    block_len: int


@dataclass(frozen=True, slots=True)
class Stage:
    """How one model learns once."""

    name: str
    steps: int
    learning_rate: float
    portions: tuple[Portion, ...]

    @property
    def warm_up(self) -> int:
        """Steps until the full learning rate."""
        return min(100, self.steps // 10)

    @property
    def tokens(self) -> int:
        """Tokens that the model reads in all steps."""
        return self.steps * sum(each.batch * each.block_len for each in self.portions)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Blocks, and what is learnt from them."""

    blocks: Blocks
    loss: Loss


class Diverged(OutriderError):
    """The loss is no number any more; less learning rate or other text is wanted, and a restart would not help."""

    reason = "DIVERGED"


Report = Callable[[int, float], None]
"""Told after every step: how many are done, and the loss in nats a token."""


def learn(stage: Stage, model: nn.Module, lessons: Sequence[Lesson], storage: Storage, report: Report) -> None:
    """Changes the model's weights, from wherever the storage says that the stage stands. Raises Diverged."""
    optimisers = Optimisers(model, stage.learning_rate)
    done = 0
    found = storage.checkpoint(stage.name)
    if found is not None:
        model.load_state_dict(found["model"])
        optimisers.restore(found["optimisers"])
        done = found["step"]
    model.train()
    for step in range(done, stage.steps):
        value = _gradients(model, lessons, step)
        if not math.isfinite(value):
            raise Diverged(f"The loss of stage {stage.name} is {value} at step {step + 1}.", step=step + 1)
        optimisers.step(rate(step, stage.steps, stage.warm_up))
        if (step + 1) % storage.every == 0 and step + 1 < stage.steps:
            state = {"model": model.state_dict(), "optimisers": optimisers.state()}
            storage.save_checkpoint(stage.name, step + 1, state)
        report(step + 1, value)
    model.eval()


def _gradients(model: nn.Module, lessons: Sequence[Lesson], step: int) -> float:
    """Adds up the gradients of a step's mean loss over all tokens learnt; returns that loss."""
    material = [(lesson.loss, *lesson.blocks.at(step)) for lesson in lessons]
    learnt = max(1, sum(int((targets != IGNORED).sum()) for _, _, targets in material))
    device, total = next(model.parameters()).device, torch.zeros(())
    for loss, inputs, targets in material:
        for own_inputs, own_targets in zip(micro_batches(inputs), micro_batches(targets), strict=True):
            part = loss(model, own_inputs.to(device), own_targets.to(device)) / learnt
            part.backward()  # type: ignore[no-untyped-call]
            total += part.detach().cpu()
    return float(total)
