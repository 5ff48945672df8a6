"""Rows that are computed for nobody, so that those which are wanted have the same bits in any company. Knows no model.

Torch's elementwise functions take whole vectors of a tensor at once and what is left over one by one, with other last
bits. Where the number of rows is a multiple of the vector, nothing is left over, and no row depends on their number.
What is dear, products and attention, leaves the padding out.
"""

import torch
from torch import Tensor

# Two AVX-512 vectors of float32: the step of torch's loops; those of AVX2 and NEON divide it.
STEP = 32


def padded(num_rows: int, device: torch.device) -> int:
    """How many rows to compute for num_rows; more only on the CPU, because elsewhere nothing is promised."""
    return -(-max(num_rows, 1) // STEP) * STEP if device.type == "cpu" else max(num_rows, 1)


def pad_index(column: Tensor, num_rows: int) -> Tensor:
    """column [R] made as long as num_rows by repeating its last entry, or zeros when it is empty."""
    missing = num_rows - column.shape[0]
    if not missing:
        return column
    last = column[-1:] if column.shape[0] else column.new_zeros(1)
    return torch.cat((column, last.expand(missing)))


def pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """rows [R, N] with zeros behind them, [num_rows, N]."""
    if rows.shape[0] == num_rows:
        return rows
    output = rows.new_zeros(num_rows, rows.shape[1])
    output[: rows.shape[0]] = rows
    return output
