"""The order of things: what a run is, which model learns what from whom, and what comes of it.

A target learns short blocks, then long ones; a draft learns the same blocks from the finished target. With a pair to
start from only the long ones are left.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from outrider.errors import InvalidRequest
from outrider.process.options import between
from training.data import HeldOut, TrainingBlocks, held_out_blocks, targets_of
from training.learn import HeldOutLosses, Lesson, Loss, Portion, Stage, distillation, learn, measure, next_token
from training.model import PRESETS, ROLES, Preset, new_model, pair_model, write_model
from training.storage import Storage, write_whole

COUNT = between(1, 1_000_000_000)
BATCH = between(1, 65536)
# Steps by default of each stage.
STEPS = {"target": 2400, "target-long": 240, "draft": 1500, "draft-long": 240}
SHORT_RATE = 3e-3
# A trained target forgets at more; a draft's few weights follow their teacher at any rate.
LONG_RATES = {"target": 6e-4, "draft": 2e-3}


def _steps(stage: str, words: str) -> object:
    return typer.Option(callback=COUNT, help=f"{words}; by default {STEPS[stage]:,}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the weights depend on, beside text, pair and device; each is an option, and another value another run."""

    preset: Annotated[str, typer.Option(help=f"Sizes of a new pair, and of all blocks: {', '.join(PRESETS)}.")] = (
        "story"
    )
    seed: Annotated[
        int, typer.Option(callback=between(0, 1 << 62), help="Of first weights, order and held-out blocks of the text.")
    ] = 1
    batch: Annotated[int, typer.Option(callback=BATCH, help="Short blocks a step.")] = 16
    long_batch: Annotated[int, typer.Option(callback=BATCH, help="Long blocks a step, beside the short ones.")] = 1
    target_steps: Annotated[int | None, _steps("target", "Of a new target on short blocks")] = None
    long_target_steps: Annotated[int | None, _steps("target-long", "Of the target on long blocks")] = None
    draft_steps: Annotated[int | None, _steps("draft", "Of a new draft on short blocks")] = None
    long_draft_steps: Annotated[int | None, _steps("draft-long", "Of the draft on long blocks")] = None

    @property
    def sizes(self) -> Preset:
        """The preset's."""
        return PRESETS[self.preset]

    def resolved(self) -> Self:
        """The same with defaults for steps that were not given. Raises InvalidRequest about an unknown preset."""
        if self.preset not in PRESETS:
            raise InvalidRequest("--preset", self.preset, f"one of {', '.join(PRESETS)}")
        return replace(
            self,
            target_steps=self.target_steps or STEPS["target"],
            long_target_steps=self.long_target_steps or STEPS["target-long"],
            draft_steps=self.draft_steps or STEPS["draft"],
            long_draft_steps=self.long_draft_steps or STEPS["draft-long"],
        )

    def stages(self, role: str, *, extends: bool) -> list[Stage]:
        """What a model of this role goes through; short blocks are behind it when it extends another pair."""
        blocks = Portion(self.batch, self.sizes.block_len)
        long_blocks = Portion(self.long_batch, self.sizes.context_len)
        short, long = getattr(self, f"{role}_steps"), getattr(self, f"long_{role}_steps")
        stages = [
            Stage(role, short, SHORT_RATE, (blocks,)),
            Stage(f"{role}-long", long, LONG_RATES[role], (long_blocks, blocks)),
        ]
        return stages[1:] if extends else stages


def held_out_of(token_ids: Tensor, settings: RunSettings) -> HeldOut:
    """What is never learnt of a text. Raises InvalidRequest when it is too short for the preset's blocks."""
    preset = settings.sizes
    least = 3 * preset.context_len
    if len(token_ids) < least:
        limit = f"a text of at least {least:,} tokens, for blocks of {preset.context_len:,}"
        raise InvalidRequest("--corpus", f"{len(token_ids):,} tokens", limit)
    numbers = held_out_blocks(len(token_ids), preset.block_len, settings.seed)
    return HeldOut(token_ids, numbers, preset.block_len, preset.context_len)


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """What one stage took and reached."""

    name: str
    steps: int
    tokens: int
    losses: HeldOutLosses


@dataclass(frozen=True, slots=True)
class Run:
    """One making of a pair, from wherever its storage says that it stands."""

    settings: RunSettings
    held_out: HeldOut
    tokenizer: Tokenizer
    from_pair: Path | None
    device: torch.device
    storage: Storage
    console: Console

    def make(self) -> list[StageOutcome]:
        """Writes target and draft into the storage's folder; returns what every stage reached."""
        outcomes: list[StageOutcome] = []
        teacher: LlamaForCausalLM | None = None
        for role in ROLES:
            if self.from_pair is None:
                model = before = new_model(self.settings.sizes, role, self.settings.seed)
            else:
                model = pair_model(self.from_pair, role, extended_to=self.settings.sizes)
                before = frozen(pair_model(self.from_pair, role))
            for each in (model, before):
                # Through the base class, because the library's own methods are untyped.
                nn.Module.to(each, self.device)
            if self.from_pair is not None:
                name = f"{role} before"
                found = self.storage.result(name)
                if found is None:
                    found = {"losses": asdict(measure(before, self.held_out))}
                    self.storage.save_result(name, found)
                outcomes.append(StageOutcome(name, 0, 0, HeldOutLosses(**found["losses"])))
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

    def _go_through(self, stage: Stage, model: LlamaForCausalLM, losses: Sequence[Loss]) -> StageOutcome:
        """Lets the model learn the stage, or gives it the weights that it had at the stage's end.

        The losses are those of its portions, a lone one or the long blocks first.
        """
        found = self.storage.result(stage.name)
        if found is None:
            portions = " and ".join(f"{each.batch} x {each.block_len:,}" for each in stage.portions)
            self.console.print(f"{stage.name}: {stage.steps:,} steps, {portions} tokens a step")
            text, lessons = self.held_out, []
            targets = targets_of(text.token_ids, text.blocks, text.block_len)
            # A stage of one portion has no use for the second loss.
            for portion, loss in zip(stage.portions, losses, strict=False):
                seed = f"{self.settings.seed} {stage.name} {portion.block_len}"
                blocks = TrainingBlocks(text.token_ids, targets, portion.block_len, portion.batch, seed)
                lessons.append(Lesson(blocks, loss))

            def report(step: int, loss: float) -> None:
                if step % self.storage.every == 0 or step == stage.steps:
                    self.console.print(f"{stage.name}: step {step:,}, loss {loss:.3f}")

            learn(stage, model, lessons, self.storage, report)
            found = {"model": model.state_dict(), "losses": asdict(measure(model, self.held_out))}
            self.storage.save_result(stage.name, found)
        model.load_state_dict(found["model"])
        return StageOutcome(stage.name, stage.steps, stage.tokens, HeldOutLosses(**found["losses"]))


def frozen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same model, which learns nothing any more."""
    nn.Module.eval(model)
    return model.requires_grad_(False)


def outcome_table(outcomes: Sequence[StageOutcome], held_out: HeldOut) -> Table:
    """Held-out losses in nats a token, by what stands before the tokens."""
    behind = [length - held_out.block_len // 2 for length in held_out.window_lens]
    names = (f"behind {count:,}" for count in behind)
    table = Table(Column("stage", no_wrap=True), "steps", "tokens", f"blocks of {held_out.block_len}", *names)
    for each in outcomes:
        losses = (each.losses.blocks, *each.losses.by_window)
        shown = ("-" if math.isnan(value) else f"{value:.3f}" for value in losses)
        table.add_row(each.name, f"{each.steps:,}", f"{each.tokens:,}", *shown)
    return table
