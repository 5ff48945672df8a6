"""The order of things: what a run is, which model learns what from whom, and what comes of it.

A target learns short blocks, then long ones; a draft learns the same blocks from the finished target. With a pair to
start from only the long ones are left.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import torch
import typer
from rich.table import Column, Table
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from outrider.errors import InvalidRequest
from outrider.process.options import between
from training.data import HeldOut, TrainingBlocks, held_out_blocks, targets_of
from training.learn import Lesson, Loss, Stage, distillation, go_through, measure, next_token
from training.model import PRESETS, ROLES, Preset, new_model, trained_model, write_model
from training.steady import SteadyConsole
from training.storage import Storage, write_whole

COUNT = between(1, 1_000_000_000)
BATCH = between(1, 65536)
# Options of every command that trains.
Separator = Annotated[
    str, typer.Option(show_default=False, help="What stands between documents; by default a blank line.")
]
Threads = Annotated[int | None, typer.Option(callback=between(1, 1024), help="On the CPU; by default one a core.")]
CheckpointEvery = Annotated[int, typer.Option(callback=COUNT, help="Steps between checkpoints.")]
TARGET_STEPS, DRAFT_STEPS, LONG_STEPS = 2400, 1500, 240
SHORT_RATE = 3e-3
# A trained target forgets at more; a draft's few weights follow their teacher at any rate.
LONG_RATES = {"target": 6e-4, "draft": 2e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings that the weights depend on, beside text, pair and device; another value of one is another run."""

    preset: Annotated[str, typer.Option(help=f"Sizes of a new pair, and of all blocks: {', '.join(PRESETS)}.")] = (
        "story"
    )
    seed: Annotated[
        int, typer.Option(callback=between(0, 1 << 62), help="Of first weights, order and held-out blocks of the text.")
    ] = 1
    batch: Annotated[int, typer.Option(callback=BATCH, help="Short blocks a step.")] = 16
    long_batch: Annotated[int, typer.Option(callback=BATCH, help="Long blocks a step, beside the short ones.")] = 1
    target_steps: Annotated[
        int | None,
        typer.Option(callback=COUNT, help=f"Of a new target on short blocks; by default {TARGET_STEPS:,}."),
    ] = None
    long_target_steps: Annotated[int, typer.Option(callback=COUNT, help="Of the target on long blocks.")] = LONG_STEPS
    draft_steps: Annotated[
        int | None, typer.Option(callback=COUNT, help=f"Of a new draft on short blocks; by default {DRAFT_STEPS:,}.")
    ] = None
    long_draft_steps: Annotated[int, typer.Option(callback=COUNT, help="Of the draft on long blocks.")] = LONG_STEPS

    @property
    def sizes(self) -> Preset:
        """Sizes of the chosen preset."""
        return PRESETS[self.preset]

    def resolved(self) -> Self:
        """A copy with defaults for steps that were not given. Raises InvalidRequest about an unknown preset."""
        if self.preset not in PRESETS:
            raise InvalidRequest("--preset", self.preset, f"one of {', '.join(PRESETS)}")
        target_steps, draft_steps = self.target_steps or TARGET_STEPS, self.draft_steps or DRAFT_STEPS
        return replace(self, target_steps=target_steps, draft_steps=draft_steps)

    def stages(self, role: str, *, extends: bool) -> list[Stage]:
        """Stages that a model of this role goes through; one that extends another pair has had its short blocks."""
        blocks, long_blocks = (self.batch, self.sizes.block_len), (self.long_batch, self.sizes.context_len)
        steps, long_steps = getattr(self, f"{role}_steps"), getattr(self, f"long_{role}_steps")
        long = Stage(f"{role}-long", long_steps, LONG_RATES[role], (long_blocks, blocks))
        return [long] if extends else [Stage(role, steps, SHORT_RATE, (blocks,)), long]


def held_out_of(token_ids: Tensor, settings: RunSettings) -> HeldOut:
    """Part of a text that is never learnt. Raises InvalidRequest when it is too short for the preset's blocks."""
    preset = settings.sizes
    least = 3 * preset.context_len
    if len(token_ids) < least:
        limit = f"a text of at least {least:,} tokens, for blocks of {preset.context_len:,}"
        raise InvalidRequest("--corpus", f"{len(token_ids):,} tokens", limit)
    numbers = held_out_blocks(len(token_ids), preset.block_len, settings.seed)
    return HeldOut(token_ids, numbers, preset.block_len, preset.context_len)


Causal = TypeVar("Causal", bound=nn.Module)
Outcome = tuple[str, int, int, list[float]]
"""A stage's name, steps, tokens, and held-out losses after it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One making of a pair, from wherever its storage says that it stands."""

    settings: RunSettings
    held_out: HeldOut
    tokenizer: Tokenizer
    from_pair: Path | None
    device: torch.device
    storage: Storage
    console: SteadyConsole

    def make(self) -> list[Outcome]:
        """Writes target and draft into the storage's folder; returns what every stage reached."""
        outcomes: list[Outcome] = []
        teacher: LlamaForCausalLM | None = None
        for role in ROLES:
            if self.from_pair is None:
                model = before = new_model(self.settings.sizes, role, self.settings.seed)
            else:
                model = trained_model("--from-pair", self.from_pair / role, self.settings.sizes)
                before = frozen(trained_model("--from-pair", self.from_pair / role))
            for each in (model, before):
                # Through the base class, because the library's own methods are untyped.
                nn.Module.to(each, self.device)
            if self.from_pair is not None:
                name = f"{role} before"
                found = self.storage.result(name)
                if found is None:
                    found = {"losses": measure(before, self.held_out)}
                    self.storage.save_result(name, found)
                outcomes.append((name, 0, 0, found["losses"]))
            for stage in self.settings.stages(role, extends=self.from_pair is not None):
                # A target that learns long blocks copies itself on short ones: there it must not get worse, and the
                # text, which it has seen several times, would only be learnt by heart.
                losses = [next_token, distillation(before)] if teacher is None else [distillation(teacher)] * 2
                outcomes.append(self._go_through(stage, model, losses))
                before = frozen(copy.deepcopy(model))
            folder = self.storage.out / role
            if not folder.exists():
                write_whole(folder, partial(write_model, copy.deepcopy(model), self.tokenizer))
            teacher = frozen(model)
        return outcomes

    def _go_through(self, stage: Stage, model: LlamaForCausalLM, losses: Sequence[Loss]) -> Outcome:
        """Lets the model learn the stage, or gives it the weights that it had at the stage's end.

        The losses are those of its portions, a lone one or the long blocks first.
        """

        def lessons() -> list[Lesson]:
            portions = " and ".join(f"{batch} x {block_len:,}" for batch, block_len in stage.portions)
            self.console.print(f"{stage.name}: {stage.steps:,} steps, {portions} tokens a step")
            text = self.held_out
            targets = targets_of(text.token_ids, text.blocks, text.block_len)
            # A stage of one portion has no use for the second loss.
            return [
                (TrainingBlocks(text.token_ids, targets, length, batch, f"{seed} {stage.name} {length}"), loss)
                for (batch, length), loss in zip(stage.portions, losses, strict=False)
            ]

        def measured() -> dict[str, Any]:
            return {"losses": measure(model, self.held_out)}

        seed = self.settings.seed
        found = go_through(stage, model, lessons, self.storage, self.console, measured)
        return stage.name, stage.steps, stage.tokens, found["losses"]


def frozen(model: Causal) -> Causal:
    """The given model, which learns nothing any more."""
    nn.Module.eval(model)
    return model.requires_grad_(False)


def outcome_table(outcomes: Sequence[Outcome], held_out: HeldOut) -> Table:
    """Held-out losses in nats a token, by what stands before the tokens."""
    behind = [length - held_out.block_len // 2 for length in held_out.window_lens]
    names = (f"behind {count:,}" for count in behind)
    table = Table(Column("stage", no_wrap=True), "steps", "tokens", f"blocks of {held_out.block_len}", *names)
    for name, steps, tokens, losses in outcomes:
        shown = ("-" if math.isnan(loss) else f"{loss:.3f}" for loss in losses)
        table.add_row(name, f"{steps:,}", f"{tokens:,}", *shown)
    return table
