"""What a drafting head learns: the distribution of a frozen target, some steps ahead; and how near it comes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from training.data import IGNORED
from training.learn import Loss, micro_batches
from training.model import CausalModel

STEP_WEIGHT = 0.8
"""Weight of a step, of that of the step before it: a guess is of use only after right ones."""


class TrainedHead(Protocol):
    """A head of training.heads, as the loss uses it."""

    def guesses(self, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]: ...


class TargetReading(NamedTuple):
    """Results of a target for texts [B, L]."""

    features: Tensor
    """[B, L, F] float32: residuals at the taps, side by side."""
    logits: Tensor
    """[B, L, V'] float32, of the draft's ids alone."""
    best: Tensor
    """[B, L]: its likeliest ids, of all."""
    known_mass: Tensor
    """[B, L]: probability of the draft's ids together."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen target, as a head of these taps and ids sees it.

    Tap b is what enters layer b; N, the number of layers, is what leaves the final norm.
    """

    model: CausalModel
    taps: tuple[int, ...]
    draft_ids: Tensor

    @torch.no_grad()
    def read(self, token_ids: Tensor) -> TargetReading:
        """Computed in bfloat16 wherever that is safe, where the caller's autocast says so."""
        result = self.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        features = torch.cat([result.hidden_states[tap].float() for tap in self.taps], -1)
        logits = result.logits.float()
        best = logits.argmax(-1)
        if len(self.draft_ids) == logits.shape[-1]:
            return TargetReading(features, logits, best, torch.ones_like(logits[..., 0]))
        known = logits[..., self.draft_ids]
        return TargetReading(features, known, best, (known.logsumexp(-1) - logits.logsumexp(-1)).exp())

    def knows(self, token_ids: Tensor) -> Tensor:
        """Mask of the ids that are the draft's."""
        return torch.isin(token_ids, self.draft_ids)


def imitation(teacher: Teacher, *, overlap: bool = False) -> Loss:
    """Cross-entropy to the teacher's distributions over the draft's ids, where the teacher's likeliest is one of them.

    A weighted mean over the steps ahead. With `overlap` it is -log sum min(p, q) instead, of the probability that a
    guess is kept under the ratio rule, which is what there is to gain where a head is too small to copy all of p.
    """

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        total, weights = torch.zeros((), device=inputs.device), 0.0
        with torch.autocast(inputs.device.type, torch.bfloat16):
            reading = teacher.read(inputs)
            laws = reading.logits.softmax(-1)
            is_learnt = (targets != IGNORED) & teacher.knows(reading.best)
            for step, guess in enumerate(guesses_of(model, reading.features, inputs)):
                losses = row_losses(laws[:, 1 + step :], guess.float().log_softmax(-1), overlap=overlap)
                weight = STEP_WEIGHT**step
                total = total + weight * (losses * is_learnt[:, 1 + step :]).sum()
                weights += weight
        return total / weights

    return loss


def row_losses(laws: Tensor, guessed: Tensor, *, overlap: bool) -> Tensor:
    """Losses [...] of distributions [..., V] and guessed log-probabilities: cross-entropy, or -log sum min(p, q)."""
    if overlap:
        return -torch.minimum(laws, guessed.exp()).sum(-1).log()
    return -(laws * guessed).sum(-1)


def guesses_of(head: nn.Module, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
    """Guesses that the head yields, typed here, because a module's attributes have no types."""
    own: TrainedHead = head  # type: ignore[assignment]
    return own.guesses(features, token_ids)


class Reached(NamedTuple):
    """Quality of one step ahead, given that all guesses before it were right; means over tokens."""

    overlap: float
    """sum min(p, q) at temperature 1: how often the ratio rule keeps its guess."""
    agreement: float
    """Share of tokens for which its likeliest id is the target's."""


@torch.inference_mode()
def measure_head(head: nn.Module, teacher: Teacher, texts: Tensor, first_row: int = 0) -> list[Reached]:
    """Quality of each step ahead, over rounds from a row of texts [B, L]; an id unknown to the head is never guessed.

    Row m is the round after m + 2 tokens.
    """
    head.eval()
    sums: dict[int, Tensor] = {}
    for piece in micro_batches(texts):
        tokens = piece.to(teacher.draft_ids.device)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            reading = teacher.read(tokens)
            laws = reading.logits.softmax(-1) * reading.known_mass[..., None]
            for step, guess in enumerate(guesses_of(head, reading.features, tokens)):
                logits = guess.float()
                overlap = torch.minimum(laws[:, 1 + step :], logits.softmax(-1)).sum(-1)[:, first_row:]
                agrees = (teacher.draft_ids[logits.argmax(-1)] == reading.best[:, 1 + step :])[:, first_row:]
                values = [overlap.double().sum(), agrees.double().sum(), torch.tensor(float(agrees.numel()))]
                sums[step] = sums.get(step, torch.zeros(3)) + torch.stack([each.cpu() for each in values])
    return [Reached(*(sums[step][:2] / sums[step][2]).tolist()) for step in sorted(sums)]


@torch.inference_mode()
def greedy_tokens_per_pass(head: nn.Module, teacher: Teacher, texts: Tensor, first_row: int) -> float:
    """Mean tokens of a verification at temperature 0, as many guesses as the head has steps, its own token included.

    The texts [B, L] are the target's greedy ones. There the right guesses are the text, so one pass over the whole text
    shows the rounds of decoding: the first one begins at a row, and each later one where the one before it ended.
    """
    head.eval()
    rounds = total = 0
    for piece in micro_batches(texts):
        tokens = piece.to(teacher.draft_ids.device)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            reading = teacher.read(tokens)
            right = []
            for step, guess in enumerate(guesses_of(head, reading.features, tokens)):
                hits = teacher.draft_ids[guess[:, :-1].argmax(-1)] == tokens[:, 2 + step :]
                right.append(hits)
        rows = right[-1].shape[1]
        chains = torch.stack([each[:, :rows] for each in right], -1).long().cumprod(-1).sum(-1)
        for lengths in chains.tolist():
            row = first_row
            while row < rows:
                rounds, total = rounds + 1, total + 1 + lengths[row]
                row += 1 + lengths[row]
    return total / max(1, rounds)


@torch.inference_mode()
def continued(model: CausalModel, prompts: Tensor, length: int, generator: torch.Generator | None) -> Tensor:
    """Texts [B, length] of the model after prompts [B, P]: greedy ones, or at temperature 1 with a generator."""
    tokens = feed = prompts
    past = None
    while tokens.shape[1] < length:
        result = model(input_ids=feed, past_key_values=past, use_cache=True)
        past = result.past_key_values
        logits = result.logits[:, -1].float()
        if generator is None:
            feed = logits.argmax(-1, keepdim=True)
        else:
            feed = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(tokens.device)
        tokens = torch.cat([tokens, feed], 1)
    return tokens
