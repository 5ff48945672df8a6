"""The question whether a service works, which all sessions that doubt it share, and how long an answer may take.

What is heard shows different things. An answer comes from the service's event loop, so messages pass both ways and the
process runs; in it stands for how long the device has finished nothing. A frame of the link, of which one with the load
comes each second, shows that the process runs, but neither that messages reach it nor that its device works. A ping is
answered by a thread of gRPC's, whatever the others do.

Time is counted in turns of the loop of this process, each for half a second at most: after a gateway was held up
itself, answers have come that it has not read yet.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import structlog

from gateway.sessions.link import Link
from outrider.v1 import model_service_pb2 as pb

TURN_S, LONGEST_TURN_S = 0.25, 0.5
# Without a word of any kind, and in all: what is sent may wait for a long prompt on its way.
MOST_SILENT_S, MOST_WAIT_S = 1.5, 5.0

log = structlog.get_logger()


@dataclass(slots=True)
class Patience:
    """Seconds for which a question has had no answer, and those since anything else came, as far as they count."""

    wait_s: float = 0.0
    silent_s: float = 0.0

    def turn(self, seconds: float, *, has_spoken: bool) -> None:
        """Counts a turn that took so long."""
        counted_s = min(seconds, LONGEST_TURN_S)
        self.wait_s += counted_s
        self.silent_s = 0.0 if has_spoken else self.silent_s + counted_s

    @property
    def is_over(self) -> bool:
        return self.silent_s >= MOST_SILENT_S or self.wait_s >= MOST_WAIT_S


class ServiceProbe:
    """The question that is open, if there is one."""

    def __init__(self, ask: Callable[[], Awaitable[pb.GetModelInfoResponse | None]], service: str) -> None:
        """`ask` begins a call without a time limit; a service is called so in logs."""
        self._ask = ask
        self._service = service
        self._asking: asyncio.Task[float | None] | None = None
        self._patience = Patience()

    @property
    def is_silent(self) -> bool:
        """Whether a question is open, and nothing has come for a turn or more."""
        return self._asking is not None and not self._asking.done() and self._patience.silent_s > 0

    def stalled_s(self, link: Link) -> "asyncio.Task[float | None]":
        """Asks the service at the end of a link for how many seconds its device has had work and finished none.

        There is no end of them for a service that is not there any more. None when it takes no new calls: it may be
        draining, and finish what is under way; if it has ended, every stream says so itself.
        """
        if self._asking is None or self._asking.done():
            self._patience = Patience()
            self._asking = asyncio.create_task(self._wait(link, self._patience), name="probe")
        return self._asking

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _wait(self, link: Link, patience: Patience) -> float | None:
        call, clock_s = asyncio.ensure_future(self._ask()), asyncio.get_running_loop().time
        try:
            while not call.done():
                if patience.is_over:
                    log.info("service does not answer", service=self._service, silent_s=round(patience.silent_s, 2))
                    return math.inf
                began_s, spoke_s = clock_s(), link.spoke_s
                await asyncio.wait({call}, timeout=TURN_S)
                patience.turn(clock_s() - began_s, has_spoken=link.spoke_s > spoke_s)
            answer = call.result()
        except grpc.aio.AioRpcError as error:
            log.info("service does not answer", service=self._service, status=error.code().name)
            return None if error.code() is grpc.StatusCode.UNAVAILABLE else math.inf
        finally:
            call.cancel()
        # None is how grpc.aio says that a message could not be parsed.
        is_same = answer is not None and answer.instance_id == link.instance_id
        return answer.stalled_us / 1e6 if answer is not None and is_same else math.inf
