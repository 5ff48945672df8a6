"""The replicas of one service in order of preference, which of them a session goes to, and readiness that follows them.

The first that can be used is taken: this is failover, not balancing, so that the caches of a service stay warm and the
figures that the policy learns are those of one machine. A gateway without any target takes no new clients, though
requests that run wait for one. A missing draft changes nothing, because it only makes answers slower.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from grpc_health.v1 import health, health_pb2

from gateway.sessions.link import ModelInfo, ServiceLink
from outrider.errors import OutriderError, PeerLost

# Links and breakers change with time and in several places, so who waits for them looks now and then.
LOOK_S = 0.02
READINESS_LOOK_S = 0.25

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Need:
    """What a session needs of a service: the weights with which it began, and room for its longest sequence."""

    model_hash: str
    max_len: int

    def met_by(self, info: ModelInfo) -> bool:
        """Whether a service can take the session."""
        return info.model_hash == self.model_hash and self.max_len <= min(info.context_len, info.kv_tokens)


class Replicas:
    """One or more links of one role."""

    def __init__(self, links: Sequence[ServiceLink]) -> None:
        """Takes at least one link."""
        self.links = tuple(links)

    def __str__(self) -> str:
        if len(self.links) == 1:
            return str(self.links[0])
        return f"The {self.links[0].role} services at {', '.join(link.address for link in self.links)}"

    @property
    def info(self) -> ModelInfo | None:
        """Who the first present service is; None while all are away."""
        return next((link.info for link in self.links if link.info is not None), None)

    @property
    def misfit(self) -> OutriderError | None:
        """Why the first service that answered but does not fit is not used."""
        return next((link.misfit for link in self.links if link.misfit is not None), None)

    def present(self) -> ModelInfo:
        """As `info`; raises PeerLost while all are away, or the reason why none fits."""
        if self.info is None:
            raise self.misfit or PeerLost(f"{self} cannot be reached", address=self.links[0].address)
        return self.info

    def pick(self, session: object, need: Need | None = None, failed: ServiceLink | None = None) -> ServiceLink | None:
        """The first link that is present, meets the need, and is not blocked for the session by its breaker.

        The one that has just failed comes last: a service whose device hangs still answers a handshake.
        """
        links = sorted(self._meeting(need), key=lambda link: link is failed)
        return next((link for link in links if not link.breaker.blocks(session)), None)

    async def wait(self, session: object, need: Need, until_s: float, failed: ServiceLink | None = None) -> ServiceLink:
        """As `pick`, but waits for one until the loop's clock says so; raises PeerLost then."""
        loop = asyncio.get_running_loop()
        while (link := self.pick(session, need, failed)) is None:
            if loop.time() >= until_s:
                raise self._reason(need)
            await asyncio.sleep(LOOK_S)
        return link

    async def settled(self, timeout_s: float) -> bool:
        """Waits until a service has answered, fitting or not; tells whether one did in time."""
        waits = {asyncio.create_task(link.settled(timeout_s)) for link in self.links}
        try:
            while waits:
                done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in done):
                    return True
            return False
        finally:
            for task in waits:
                task.cancel()

    async def after_handshake(self, timeout_s: float) -> ModelInfo:
        """As `present`, but waits a little for handshakes that are under way."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            if self.info or all(link.misfit for link in self.links) or loop.time() >= until_s:
                return self.present()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Closes all links."""
        await asyncio.gather(*(link.close() for link in self.links))

    def _meeting(self, need: Need | None) -> list[ServiceLink]:
        return [link for link in self.links if link.info and (need is None or need.met_by(link.info))]

    def _reason(self, need: Need) -> PeerLost:
        """Why there is none: all are away, none has the same weights, or room, or those that have hang."""
        if self.info is None:
            return PeerLost(f"{self} cannot be reached", address=self.links[0].address)
        if not any(link.info and link.info.model_hash == need.model_hash for link in self.links):
            return PeerLost(f"{self}: none has the model with which the request began", model_hash=need.model_hash)
        if not self._meeting(need):
            return PeerLost(f"{self}: none has room for the {need.max_len} tokens of the request", max_len=need.max_len)
        return PeerLost(f"{self} does not answer requests", address=self.links[0].address)


async def report_readiness(target: Replicas, servicer: health.aio.HealthServicer, names: tuple[str, ...]) -> None:
    """Keeps the health of the named services at SERVING while a target is there, until it is cancelled."""
    was_ready = True
    while True:
        is_ready = target.info is not None
        if is_ready != was_ready:
            log.warning("readiness changed", ready=is_ready)
            statuses = health_pb2.HealthCheckResponse
            for name in names:
                await servicer.set(name, statuses.SERVING if is_ready else statuses.NOT_SERVING)
        was_ready = is_ready
        await asyncio.sleep(READINESS_LOOK_S)
