"""The order of things: what a run is, which model learns what from whom, and what comes of it.

A target learns short blocks, then long ones; a draft learns the same blocks from the finished target. With a pair to
start from only the long ones are left.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from outrider.errors import InvalidRequest
from training.data import HeldOut, TrainingBlocks, held_out_blocks, targets_of
from training.learn import HeldOutLosses, Lesson, Loss, Portion, Stage, distillation, learn, measure, next_token
from training.model import PRESETS, ROLES, Preset, new_model, pair_model, write_model
from training.storage import Storage, write_whole

# Of each stage: its option, and its steps by default.
STEPS = {
    "target": ("--target-steps", 2400),
    "target-long": ("--long-target-steps", 240),
    "draft": ("--draft-steps", 1500),
    "draft-long": ("--long-draft-steps", 240),
}
SHORT_RATE = 3e-3
# A trained target forgets at more; a draft's few weights follow their teacher at any rate.
LONG_RATES = {"target": 6e-4, "draft": 2e-3}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Everything that the weights depend on, beside the kind of device; another value is another run.

    corpus and from_pair are digests of the documents and of the pair to start from; steps are by stage.
    """

    corpus: str
    preset_name: str
    from_pair: str | None
    seed: int
    batch: int
    long_batch: int
    steps: dict[str, int]

    @property
    def preset(self) -> Preset:
        """The sizes."""
        return PRESETS[self.preset_name]

    def stages(self, role: str) -> list[Stage]:
        """What a model of this role goes through; short blocks are behind it when it comes from another pair."""
        short, long = role, f"{role}-long"
        blocks = Portion(self.batch, self.preset.block_len)
        long_blocks = Portion(self.long_batch, self.preset.context_len)
        stages = [
            Stage(short, self.steps[short], SHORT_RATE, (blocks,)),
            Stage(long, self.steps[long], LONG_RATES[role], (long_blocks, blocks)),
        ]
        return stages if self.from_pair is None else stages[1:]

    def values(self) -> dict[str, object]:
        """The settings under the names of their options."""
        return {
            "--corpus": self.corpus,
            "--preset": self.preset_name,
            "--from-pair": self.from_pair,
            "--seed": self.seed,
            "--batch": self.batch,
            "--long-batch": self.long_batch,
            **{STEPS[stage][0]: count for stage, count in self.steps.items()},
        }


def held_out_of(token_ids: Tensor, settings: RunSettings) -> HeldOut:
    """What is never learnt of a text. Raises InvalidRequest when it is too short for the preset's blocks."""
    preset = settings.preset
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
                model = before = new_model(self.settings.preset, role, self.settings.seed)
            else:
                model = pair_model(self.from_pair, role, extended_to=self.settings.preset)
                before = frozen(pair_model(self.from_pair, role))
            for each in (model, before):
                # Through the base class, because the library's own methods are untyped.
                nn.Module.to(each, self.device)
            if self.from_pair is not None:
                outcomes.append(self._measured_before(f"{role} before", before))
            for stage in self.settings.stages(role):
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

    def _measured_before(self, name: str, model: LlamaForCausalLM) -> StageOutcome:
        """What the model of the other pair reaches as it is."""
        found = self.storage.result(name)
        if found is None:
            found = {"losses": asdict(measure(model, self.held_out))}
            self.storage.save_result(name, found)
        return StageOutcome(name, 0, 0, HeldOutLosses(**found["losses"]))

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
