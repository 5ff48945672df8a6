"""Which tokens are held out, and which block a step learns from: pure functions of the seed, the stage and the step.

A resumed run therefore needs no more than its step to go on with the same data.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
HELD_OUT_SHARE = 50  # one block in so many


def held_out_blocks(num_tokens: int, block_len: int, seed: int) -> Tensor:
    """The numbers of the held-out blocks [H] among the blocks of block_len tokens, at least one, in no order."""
    num_blocks = num_tokens // block_len
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return order[: max(1, num_blocks // HELD_OUT_SHARE)]


def targets_of(token_ids: Tensor, held_out: Tensor, block_len: int) -> Tensor:
    """The tokens [N] with IGNORED in place of every held-out one: it may be context, but nothing is learnt from it."""
    targets = token_ids.clone()
    for number in held_out.tolist():
        targets[number * block_len : (number + 1) * block_len] = IGNORED
    return targets


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one stage, every one once in a pass, in another order and with another beginning in every pass."""

    token_ids: Tensor
    targets: Tensor
    block_len: int
    batch: int
    seed: str
    """Whatever tells this order of blocks from all others."""

    @property
    def per_pass(self) -> int:
        """Blocks in a pass: one beginning fewer than there are, so that a pass may begin anywhere in a block."""
        return (len(self.token_ids) - 1) // self.block_len - 1

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch, block_len] of a step; a target is the token behind its input, or IGNORED."""
        orders: dict[int, Tensor] = {}
        starts = []
        for index in range(step * self.batch, (step + 1) * self.batch):
            number, position = divmod(index, self.per_pass)
            if number not in orders:
                orders[number] = self._starts(number)
            starts.append(int(orders[number][position]))
        inputs = [self.token_ids[start : start + self.block_len] for start in starts]
        targets = [self.targets[start + 1 : start + 1 + self.block_len] for start in starts]
        return torch.stack(inputs), torch.stack(targets)

    def _starts(self, number: int) -> Tensor:
        seed = int.from_bytes(hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        offset = torch.randint(self.block_len, (), generator=generator)
        return offset + self.block_len * torch.randperm(self.per_pass, generator=generator)
