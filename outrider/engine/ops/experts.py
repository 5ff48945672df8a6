"""Experts of a layer, of which each row takes a few (Shazeer et al., 2017), and their sum by the other operations."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.ops.blocks import StackedMatrix, Weight
from outrider.model_files.gguf.types import OUTPUTS


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of E experts of M neurons for rows of H numbers, and how a row's C experts are chosen.

    The matrices of all experts stand below each other in one weight, so that an expert is a range of its rows.
    """

    router: Weight
    """[E, H]; its products with a row are the experts' scores."""
    gate: Weight
    """Matrices of all experts, [E M, H]."""
    up: Weight
    """Matrices of all experts, [E M, H]."""
    down: Weight
    """Matrices of all experts, [E H, M]."""
    num_experts: int
    num_chosen: int
    is_normalised: bool
    """Whether a row's shares are parts of the sum over its chosen experts, and not of that over all."""
    router_bias: Tensor | None = None
    """Numbers that are added to the scores, [E] float32."""
    gate_up_bias: Tensor | None = None
    """[E, 2 M] float32, of gate beside up."""
    down_bias: Tensor | None = None
    """[E, H] float32."""
    clamp: tuple[float, float] | None = None
    """Slope and limit of `Ops.clamped_multiply`, which goes in the place of silu then."""

    @property
    def weights(self) -> list[Weight]:
        biases = (self.router_bias, self.gate_up_bias, self.down_bias)
        return [self.router, self.gate, self.up, self.down, *(bias for bias in biases if bias is not None)]

    @property
    def matrices(self) -> list[Weight]:
        """What each row reads a part of: num_chosen of num_experts."""
        return [self.gate, self.up, self.down]

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Experts int64 [R, C] by their scores [R, E], the best first and of equal ones the lowest, and their shares.

        Shares are float32 [R, C]: e^score over the sum, made in float64 and rounded once.
        """
        ids = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.num_chosen]
        powers = (scores.double() - scores.gather(1, ids[:, :1])).exp()
        chosen = powers.gather(1, ids)
        return ids, (chosen / (chosen if self.is_normalised else powers).sum(1, keepdim=True)).float()


class ExpertOps(Protocol):
    """The operations that experts are made of; see outrider.engine.ops.Ops."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor: ...

    def gate_multiply(self, gate_up: Tensor) -> Tensor: ...

    def clamped_multiply(self, gate_up: Tensor, slope: float, limit: float) -> Tensor: ...


def routed(ops: ExpertOps, x: Tensor, experts: Experts) -> Tensor:
    """`Ops.experts` by other operations: each expert once, for all its rows, and sums in the order of the scores.

    On a device it waits once, to know which experts have how many rows.
    """
    ids, shares = experts.choose(ops.linear(x, experts.router, experts.router_bias))
    counts = torch.bincount(ids.flatten().cpu(), minlength=experts.num_experts).tolist()
    # Of a row with one of its experts the place in what is made, experts together.
    pairs = ids.flatten().argsort(stable=True)
    made = x.new_empty(len(pairs), x.shape[1])  # [R C, H]
    for expert, places in enumerate(torch.split(pairs, counts)):
        if not len(places):
            continue
        inputs = x.index_select(0, places // experts.num_chosen)
        gate_up = torch.cat([_part(ops, inputs, weight, expert, experts) for weight in (experts.gate, experts.up)], 1)
        gate_up = gate_up if experts.gate_up_bias is None else gate_up + experts.gate_up_bias[expert]
        clamp = experts.clamp
        gated = ops.gate_multiply(gate_up) if clamp is None else ops.clamped_multiply(gate_up, *clamp)
        outputs = _part(ops, gated, experts.down, expert, experts)
        outputs = outputs if experts.down_bias is None else outputs + experts.down_bias[expert]
        made.index_copy_(0, places, outputs)
    made = made.view(*ids.shape, -1) * shares[..., None]
    output = made[:, 0]
    for rank in range(1, experts.num_chosen):
        output = output + made[:, rank]
    return output.contiguous()


def _part(ops: ExpertOps, x: Tensor, weight: Weight, expert: int, experts: Experts) -> Tensor:
    """The product of rows with what one expert has of a weight."""
    if isinstance(weight, StackedMatrix):
        raise ValueError("the matrices of experts are of one type, and not of several parts")
    count = len(weight) // experts.num_experts
    first = expert * count
    if isinstance(weight, Tensor):
        return ops.linear(x, weight[first : first + count])
    # Whole blocks, of which the first and the last may belong to other experts too.
    begin, end = first // OUTPUTS, -(-(first + count) // OUTPUTS)
    num_outputs = min(end * OUTPUTS, len(weight)) - begin * OUTPUTS
    around = replace(weight, data=weight.data[begin:end], num_outputs=num_outputs)
    skipped = first - begin * OUTPUTS
    return ops.linear(x, around)[:, skipped : skipped + count]
