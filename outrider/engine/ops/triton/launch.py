"""How a kernel begins, so that the next one of a chain may be launched while it runs; and what all read of the work."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.batching import WorkPlaces

# Places in the header of shared work, in the order of its fields.
NUM_ITEMS, ITEMS, ITEM_ROWS, COUNTS, ROW_CHUNKS, KEY_SLOTS, NUM_ROWS, TOKEN_IDS, POSITIONS, SLOTS = (
    tl.constexpr(place) for place in range(len(WorkPlaces._fields))
)


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Lets the next kernel begin, and waits until the one before has written everything; before any load."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
