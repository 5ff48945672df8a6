"""What one ragged forward computes, row by row, as tensors.

A row is one new token. The mask of a forward is not a matrix: every row names the list of cache slots that it sees, in
position order, so prefill, decode and a tree of proposals are the same plan with other lists.
"""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One ragged forward of R rows; tensors live on the model's device.

    Row r sees the keys and values in the slots key_slots[key_starts[r] : key_starts[r] + key_counts[r]], in this order.
    The rows of a chain share one list and differ in their counts only. Its own slot is the last that a row sees.
    """

    token_ids: Tensor
    """[R] int64."""
    positions: Tensor
    """[R] int64: length of the committed prefix plus depth in the tree."""
    slots: Tensor
    """[R] int64, all different: where the row's own key and value are stored."""
    key_slots: Tensor
    """[L] int32: lists of slots in position order."""
    key_starts: Tensor
    """[R] int64: where a row's list begins in key_slots."""
    key_counts: Tensor
    """[R] int32: how many keys the row sees, at least 1."""
    max_key_count: int
    """The largest of key_counts, known to the host, so that no operation has to ask the device and wait."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.token_ids.shape[0]

    def windowed(self, window: int | None) -> Self:
        """The same rows, each of which sees only the last `window` keys of its list; all of them if that is None.

        A list ends with the row itself and has one key for each position, along a tree's path too: of a row at position
        t the positions above t - window are left.
        """
        if window is None or self.max_key_count <= window:
            return self
        hidden = (self.key_counts - window).clamp_min(0)
        return replace(
            self,
            key_starts=self.key_starts + hidden,
            key_counts=self.key_counts - hidden,
            max_key_count=window,
        )
