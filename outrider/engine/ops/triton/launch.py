"""How a kernel begins, so that the next one of a chain may be launched while it runs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Lets the next kernel begin, and waits until the one before has written everything; before any load."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
