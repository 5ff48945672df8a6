"""What comes before the imports at the start of a process, and the imports."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

# The releases of gRPC that still have what it waited with for sockets before its event engine. With the engine one
# thread waits for the socket and wakes another, which wakes the loop; without, the second one waits for the socket. A
# message there and back takes half of the time and of the processors, and a round has two.
INLINE_RELEASES = ("1.85.",)
EXPERIMENTS = "GRPC_EXPERIMENTS"
INLINE_POLLING = "-event_engine_client,-event_engine_listener"


def poll_inline() -> None:
    """Lets gRPC wait for sockets in one thread less, which has to be said before it is imported.

    Says nothing to other releases, which would complain, and nothing where the operator has named experiments.
    """
    if version("grpcio").startswith(INLINE_RELEASES):
        os.environ.setdefault(EXPERIMENTS, INLINE_POLLING)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps the collector off all that is imported inside, then and later.

    Nearly all of it stays for ever, and to look through it again and again is a sixth of the time that importing takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
