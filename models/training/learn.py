"""Learning of one stage by one model: what from, by which optimisers, and how well it then does on held-out text.

Muon moves the matrices, AdamW embeddings and norms. Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in
neural networks"; its rate is scaled to AdamW's RMS as in Liu et al. 2025, "Muon is scalable for LLM training", so one
learning rate serves both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outrider.errors import OutriderError
from training.data import IGNORED, HeldOut
from training.steady import SteadyConsole
from training.storage import Storage

MICRO_TOKENS = 4096
MAX_GRADIENT_NORM = 1.0
FINAL_RATE = 0.03  # of the learning rate, at the last step
# Modules with a vector for each token, which are no matrices to Muon.
TABLES = {"embed_tokens", "lm_head", "emb", "head"}

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""The sum over all targets [B, L] but the IGNORED ones, given the inputs [B, L]."""


class Blocks(Protocol):
    """Blocks that a stage learns from: training.data.TrainingBlocks, or rows that a target has written."""

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, L] of a step; a target is the token after its input, or IGNORED."""


Lesson = tuple[Blocks, Loss]


class Diverged(OutriderError):
    """The loss is no number any more; less learning rate or other text is wanted, and a restart would not help."""

    reason = "DIVERGED"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage in which one model learns once."""

    name: str
    steps: int
    learning_rate: float
    portions: tuple[tuple[int, int], ...]
    """Portions of a step: so many blocks of so many tokens, and so many of another length."""
    table_share: float = 1.0
    """Share of the learning rate for norms and vectors of single tokens: below 1 where these are known already."""

    @property
    def tokens(self) -> int:
        """Tokens that the model reads in all steps."""
        return self.steps * sum(batch * block_len for batch, block_len in self.portions)


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """[B, L, V] float32, computed in bfloat16 wherever that is safe."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        result: Tensor = model(input_ids=inputs, use_cache=False).logits
    return result.float()


def next_token(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy against the text."""
    return cross_entropy(logits(model, inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def distillation(teacher: nn.Module) -> Loss:
    """Cross-entropy against a teacher's whole distributions at temperature 1.

    Its gradient is that of the divergence KL(teacher || model), which bounds how often a draft is refused: the total
    variation is at most sqrt(KL / 2).
    """

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        learnt = targets.flatten() != IGNORED
        with torch.no_grad():
            wanted = logits(teacher, inputs).flatten(0, 1)[learnt].softmax(-1)
        return cross_entropy(logits(model, inputs).flatten(0, 1)[learnt], wanted, reduction="sum")

    return loss


def rate(step: int, steps: int, warm_up: int) -> float:
    """The share of the learning rate at a step: linear up, constant to half way, then linear down to FINAL_RATE."""
    rising = min(1.0, (step + 1) / max(1, warm_up))
    falling = min(1.0, 2 * (steps - 1 - step) / max(1, steps))
    return rising * (FINAL_RATE + (1 - FINAL_RATE) * falling)


def learn(
    stage: Stage, model: nn.Module, lessons: Sequence[Lesson], storage: Storage, report: Callable[[int, float], None]
) -> None:
    """Changes the model's weights, from wherever the storage says that the stage stands. Raises Diverged.

    After every step `report` gets how many are done, and the loss in nats a token.
    """
    named = list(model.named_parameters())
    matrices = [own for name, own in named if own.ndim == 2 and not TABLES & set(name.split("."))]
    others = [own for name, own in named if own.ndim != 2 or TABLES & set(name.split("."))]
    optimisers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
    )
    found = storage.checkpoint(stage.name)
    if found is not None:
        model.load_state_dict(found["model"])
        for optimiser, state in zip(optimisers, found["optimisers"], strict=True):
            optimiser.load_state_dict(state)
    model.train()
    device = next(model.parameters()).device
    for step in range(found["step"] if found is not None else 0, stage.steps):
        # The gradients of the mean loss over all tokens learnt add up.
        material = [(loss, *blocks.at(step)) for blocks, loss in lessons]
        learnt = max(1, sum(int((targets != IGNORED).sum()) for _, _, targets in material))
        total = torch.zeros(())
        for loss, inputs, targets in material:
            for own_inputs, own_targets in zip(micro_batches(inputs), micro_batches(targets), strict=True):
                part = loss(model, own_inputs.to(device), own_targets.to(device)) / learnt
                part.backward()  # type: ignore[no-untyped-call]
                total += part.detach().cpu()
        value = float(total)
        if not math.isfinite(value):
            raise Diverged(f"The loss of stage {stage.name} is {value} at step {step + 1}.", step=step + 1)
        nn.utils.clip_grad_norm_(list(model.parameters()), MAX_GRADIENT_NORM)
        for optimiser, share in zip(optimisers, (1.0, stage.table_share), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = share * stage.learning_rate * rate(step, stage.steps, min(100, stage.steps // 10))
            optimiser.step()
            optimiser.zero_grad()
        if storage.is_due(step + 1) and step + 1 < stage.steps:
            state = {"model": model.state_dict(), "optimisers": [each.state_dict() for each in optimisers]}
            storage.save_checkpoint(stage.name, step + 1, state)
        report(step + 1, value)
    model.eval()


def go_through(
    stage: Stage,
    model: nn.Module,
    lessons: Callable[[], Sequence[Lesson]],
    storage: Storage,
    console: SteadyConsole,
    measured: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Lets the model learn the stage, or gives it the weights that it had at the stage's end. Raises Diverged.

    Lessons are made, and what is `measured` at the end, only where the stage is still to be learnt; returns what was.
    """
    found = storage.result(stage.name)
    if found is None:

        def report(step: int, value: float) -> None:
            console.doing = f"{stage.name}: step {step:,} of {stage.steps:,}, loss {value:.3f}"
            if step % storage.every == 0 or step == stage.steps:
                console.print(f"{stage.name}: step {step:,}, loss {value:.3f}")

        console.doing = f"{stage.name}: its first step"
        learn(stage, model, lessons(), storage, report)
        console.doing = f"{stage.name}: measuring"
        found = {"model": model.state_dict(), **measured()}
        storage.save_result(stage.name, found)
    model.load_state_dict(found["model"])
    return found


def micro_batches(rows: Tensor) -> tuple[Tensor, ...]:
    """Pieces of a batch [B, L] of about MICRO_TOKENS tokens, and of one row at least: logits take much memory."""
    return torch.split(rows, max(1, MICRO_TOKENS // rows.shape[1]))


def measure(model: nn.Module, held_out: HeldOut) -> list[float]:
    """Nats a token: of all held-out blocks, each without anything before it, then of the last half block of windows.

    By window_lens; NaN when the text is too short for a window.
    """
    model.eval()
    windows = (held_out.windows(length) for length in held_out.window_lens)
    blocks = _tail_loss(model, held_out.whole_blocks(), held_out.block_len - 1)
    return [blocks, *(_tail_loss(model, each, held_out.block_len // 2) for each in windows)]


@torch.inference_mode()
def _tail_loss(model: nn.Module, windows: Tensor, tail: int) -> float:
    """Loss of the last `tail` tokens of windows [W, L]."""
    if not len(windows):
        return math.nan
    total = torch.zeros((), dtype=torch.float64)
    device = next(model.parameters()).device
    for piece in micro_batches(windows):
        tokens = piece.to(device)
        predicted = logits(model, tokens)[:, -tail - 1 : -1]
        total += cross_entropy(predicted.flatten(0, 1), tokens[:, -tail:].flatten(), reduction="sum").cpu()
    return float(total / (len(windows) * tail))
