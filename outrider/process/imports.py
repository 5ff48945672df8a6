"""Imports at the start of a process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps the collector off all that is imported inside, then and later.

    Nearly all of it stays for ever, and to look through it again and again is a sixth of the time that importing takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
