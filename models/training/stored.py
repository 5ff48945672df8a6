"""What a target wrote and computed (training.material), as lessons for a head and for a separate draft.

The target is not run any more: its distribution at a row is a product of the final state with its output matrix.
Only the ids of the draft vocabulary are in it, so what they have together counts as all there is.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import LlamaForCausalLM

from training.data import IGNORED
from training.heads import Eagle3
from training.imitate import row_losses
from training.learn import Loss
from training.material import seeded, shard_path

OVERLAP_TEMPERATURE = 0.7
"""Temperature of both distributions where the overlap is raised: between greedy choice and sampling, both served."""

ANSWER_STEP_WEIGHT = 0.5
"""Weight of a step, of that of the step before it: about half of the guesses of answers are kept, and who wants to gain
tokens a round gains most at the first."""

SCALE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Material:
    """All texts of some shards, as one list of rows of one length; past the ends of shorter ones nothing is learnt."""

    token_ids: Tensor
    """Ids [R, L] int64."""
    is_answer: Tensor
    """[R, L]: which tokens the target drew for an answer."""
    places: tuple[tuple[Path, int], ...]
    """File of each row, and its place there."""

    @classmethod
    def read(cls, folder: Path, count: int) -> Self:
        """The first shards; states stay on disk until they are wanted."""
        return cls.of([shard_path(folder, number) for number in range(count)])

    @classmethod
    def of(cls, files: Sequence[Path]) -> Self:
        """Shards of any lengths, at least one."""
        parts: list[tuple[Tensor, Tensor]] = []
        places: list[tuple[Path, int]] = []
        for path in files:
            with safe_open(path, "pt") as file:
                parts.append((file.get_tensor("token_ids"), file.get_tensor("is_answer")))
            places += ((path, place) for place in range(len(parts[-1][0])))
        length = max(part.shape[1] for part, _ in parts)
        padded = [[pad(each, (0, length - each.shape[1])) for each in part] for part in zip(*parts, strict=True)]
        return cls(torch.cat(padded[0]), torch.cat(padded[1]), tuple(places))

    def states(self, name: str, rows: Tensor) -> Tensor:
        """`taps` or `normed` [B, L, ...] float32 of these rows [B]; zeros past their ends."""
        found: list[Tensor] = []
        for row in rows.tolist():
            path, place = self.places[row]
            with safe_open(path, "pt") as file:
                found.append(file.get_slice(name)[place])
        length = self.token_ids.shape[1]
        return torch.stack([pad(each, (0, 0, 0, length - len(each))) for each in found]).float()

    def feature_scale(self) -> Tensor:
        """The root of the mean square of each feature [F] at the taps, over the first texts."""
        taps = self.states("taps", torch.arange(min(SCALE_ROWS, len(self.token_ids)))).flatten(0, 1)
        read = taps[taps.any(1)]
        return read.pow(2).mean(0).sqrt().clamp_min(1e-6)


@dataclass(frozen=True, slots=True)
class AnswerBlocks:
    """Rows of a material, each once in a pass; what is learnt are the distributions of known tokens in answers."""

    material: Material
    is_known: Tensor
    """[V]: which ids the draft vocabulary has."""
    first: int
    """Column of a row from which on distributions are learnt."""
    batch: int
    seed: str

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs are places in the whole material [batch, L], so that a loss finds tokens and states; see Blocks."""
        count, length = self.material.token_ids.shape
        places = [divmod(index, count) for index in range(step * self.batch, (step + 1) * self.batch)]
        passes = {number for number, _ in places}
        orders = {each: torch.randperm(count, generator=seeded(f"{self.seed} {each}")) for each in passes}
        rows = torch.tensor([int(orders[number][position]) for number, position in places])
        behind = self.material.token_ids[rows].roll(-1, 1)
        is_learnt = self.material.is_answer[rows].roll(-1, 1) & self.is_known[behind]
        is_learnt[:, : self.first] = False
        is_learnt[:, -1] = False
        return rows[:, None] * length + torch.arange(length), behind.where(is_learnt, torch.tensor(IGNORED))


@dataclass(frozen=True, slots=True)
class StoredTeacher:
    """The target's distributions over the ids of a draft vocabulary, from stored final states."""

    material: Material
    output: Tensor
    """The target's output matrix at these ids [V', H]."""
    draft_ids: Tensor
    feature_scale: Tensor
    """[F] of the taps: the root of their mean square, for some features are a thousand times as large as others."""

    def lesson(self, places: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows [B] of the material; text and column [n] of every distribution that is learnt; and these [n, V']."""
        rows = places[:, 0] // places.shape[1]
        texts, columns = (targets != IGNORED).nonzero(as_tuple=True)
        with torch.no_grad():
            normed = self.material.states("normed", rows)[texts, columns]
            laws = (linear(normed.bfloat16(), self.output).float() / temperature).softmax(-1)
        return rows, texts, columns, laws


def head_loss(teacher: StoredTeacher, *, overlap: bool) -> Loss:
    """Loss of an EAGLE-3 head like training.imitate.imitation; targets begin where all its steps have a row.

    The head learns to read scaled features; `over_raw_features` makes one of it that reads them as they are.
    """
    temperature = OVERLAP_TEMPERATURE if overlap else 1.0

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        head: Eagle3 = model  # type: ignore[assignment]
        rows, texts, columns, laws = teacher.lesson(inputs, targets, temperature)
        total, weights = torch.zeros(()), 0.0
        with torch.autocast("cpu", torch.bfloat16):
            # Nothing is learnt after the last column, nor does anything before it see what is there.
            end = int(columns.max()) + 1 if len(columns) else 1 + head.steps_ahead
            features = teacher.material.states("taps", rows)[:, :end] / teacher.feature_scale
            for step, states in enumerate(head.normed_states(features, teacher.material.token_ids[rows, :end])):
                # Row m of a step guesses the distribution at row m + 1 + step.
                logits = head.lm_head(states[texts, columns - 1 - step]).float()
                weight = ANSWER_STEP_WEIGHT**step
                guessed = (logits / temperature).log_softmax(-1)
                total = total + weight * row_losses(laws, guessed, overlap=overlap).sum()
                weights += weight
        return total / weights

    return loss


def over_raw_features(head: Eagle3, teacher: StoredTeacher) -> Eagle3:
    """A copy of a trained head that reads features as the target has them."""
    made = copy.deepcopy(head)
    made.fc.weight.data /= teacher.feature_scale
    return made


def draft_loss(teacher: StoredTeacher, *, overlap: bool) -> Loss:
    """Loss of a separate draft, whose distribution is over all ids: what it gives to ids not in `draft_ids` is lost."""
    temperature = OVERLAP_TEMPERATURE if overlap else 1.0

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        draft: LlamaForCausalLM = model
        rows, texts, columns, laws = teacher.lesson(inputs, targets, temperature)
        with torch.autocast("cpu", torch.bfloat16):
            states = draft.model(input_ids=teacher.material.token_ids[rows], use_cache=False).last_hidden_state
            logits = draft.lm_head(states[texts, columns])
            guessed = logits[:, teacher.draft_ids].float() / temperature
            guessed = guessed - (logits.float() / temperature).logsumexp(-1, keepdim=True)
        return row_losses(laws, guessed, overlap=overlap).sum()

    return loss
