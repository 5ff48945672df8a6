"""The order of things: which model learns what from whom, and the pair as files. Knows no command line.

A target learns short blocks, then long ones; a draft learns the same blocks from the finished target. With a pair to
start from only the long ones are left.
"""

import copy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from outrider.errors import InvalidRequest
from training.blocks import Blocks, held_out_blocks, targets_of
from training.corpus import write_tokenizer
from training.evaluation import HeldOut, Losses, measure
from training.losses import Loss, distillation, next_token
from training.plan import Settings
from training.report import Report, Row
from training.shapes import ROLES, extended_model, new_model, pair_model
from training.stage import Lesson, Portion, Stage, learn
from training.storage import Storage, write_whole


@dataclass(frozen=True, slots=True)
class Text:
    """What all stages learn from and are measured on."""

    token_ids: Tensor
    targets: Tensor
    held_out: HeldOut

    @classmethod
    def of(cls, token_ids: Tensor, settings: Settings) -> "Text":
        """Raises InvalidRequest when the text is too short for the preset's blocks."""
        preset = settings.preset
        least = 3 * preset.context_len
        if len(token_ids) < least:
            limit = f"a text of at least {least:,} tokens, for blocks of {preset.context_len:,}"
            raise InvalidRequest("--corpus", f"{len(token_ids):,} tokens", limit)
        numbers = held_out_blocks(len(token_ids), preset.block_len, settings.seed)
        held_out = HeldOut(token_ids, numbers, preset.block_len, preset.context_len)
        return cls(token_ids, targets_of(token_ids, numbers, preset.block_len), held_out)


@dataclass(frozen=True, slots=True)
class Run:
    """One making of a pair, from wherever its storage says that it stands."""

    settings: Settings
    text: Text
    tokenizer: Tokenizer
    from_pair: Path | None
    device: torch.device
    storage: Storage
    report: Report

    def make(self) -> list[Row]:
        """Writes target and draft into the storage's folder; returns what every stage reached."""
        rows: list[Row] = []
        teacher: LlamaForCausalLM | None = None
        for role in ROLES:
            rows += self._before(role)
            model, model_before = self._first(role)
            for stage in self.settings.stages(role):
                rows.append(self._pass_through(stage, model, self._losses(teacher, model_before)))
                model_before = frozen(copy.deepcopy(model))
            self._write(role, model)
            teacher = frozen(model)
        return rows

    def _losses(self, teacher: LlamaForCausalLM | None, model_before: LlamaForCausalLM) -> tuple[Loss, ...]:
        """What a stage learns from its portions, a lone one or the long blocks first.

        A target that learns long blocks copies itself on short ones: there it must not get worse, and the text, which
        it has seen several times, would only be learnt by heart.
        """
        if teacher is not None:
            return distillation(teacher), distillation(teacher)
        return next_token, distillation(model_before)

    def _before(self, role: str) -> list[Row]:
        """What the model of the other pair reaches as it is."""
        if self.from_pair is None:
            return []
        name = f"{role} before"
        found = self.storage.result(name)
        if found is None:
            found = {"losses": asdict(self._measured(name, self._placed(pair_model(self.from_pair, role))))}
            self.storage.save_result(name, found)
        return [Row(name, 0, 0, Losses(**found["losses"]))]

    def _first(self, role: str) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
        """The model as its first stage gets it, and as it was before that."""
        preset = self.settings.preset
        if self.from_pair is None:
            model = self._placed(new_model(preset, role, self.settings.seed))
            return model, model
        before = self._placed(pair_model(self.from_pair, role))
        return self._placed(extended_model(preset, self.from_pair, role)), frozen(before)

    def _placed(self, model: LlamaForCausalLM) -> LlamaForCausalLM:
        # Through the base class, because the library's own methods are untyped.
        nn.Module.to(model, self.device)
        return model

    def _pass_through(self, stage: Stage, model: LlamaForCausalLM, losses: tuple[Loss, ...]) -> Row:
        """Lets the model learn the stage, or gives it the weights that it had at the stage's end."""
        found = self.storage.result(stage.name)
        if found is None:
            # A stage of one portion has no use for the second loss.
            lessons = [self._lesson(stage, *each) for each in zip(stage.portions, losses, strict=False)]
            with self.report.learning(stage) as progress:
                learn(stage, model, lessons, self.storage, progress)
            measured = asdict(self._measured(stage.name, model))
            found = {"model": model.state_dict(), "losses": measured}
            self.storage.save_result(stage.name, found)
        model.load_state_dict(found["model"])
        return Row(stage.name, stage.steps, stage.tokens, Losses(**found["losses"]))

    def _lesson(self, stage: Stage, portion: Portion, loss: Loss) -> Lesson:
        seed = f"{self.settings.seed} {stage.name} {portion.block_len}"
        blocks = Blocks(self.text.token_ids, self.text.targets, portion.block_len, portion.batch, seed)
        return Lesson(blocks, loss)

    def _measured(self, name: str, model: LlamaForCausalLM) -> Losses:
        with self.report.measuring(name) as advance:
            return measure(model, self.text.held_out, advance)

    def _write(self, role: str, model: LlamaForCausalLM) -> None:
        folder = self.storage.out / role
        if not folder.exists():
            write_whole(folder, lambda partial: write_model(copy.deepcopy(model), self.tokenizer, partial))


def frozen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same model, which learns nothing any more."""
    nn.Module.eval(model)
    return model.requires_grad_(False)


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a checkpoint in bfloat16 as transformers has it, with its tokenizer; changes the model's dtype."""
    nn.Module.to(model, device="cpu", dtype=torch.bfloat16)
    model.save_pretrained(str(folder))
    # The library makes it private, and services in containers run as another user.
    (folder / "model.safetensors").chmod(0o644)
    write_tokenizer(tokenizer, folder)
