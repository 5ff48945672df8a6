"""The services of one role: which of them fits, and which a session goes to.

Of several replicas the first that can be used is taken: this is failover, not balancing, so that the caches of a
service stay warm and the figures that the policy learns are those of one machine. A gateway without any target takes no
new clients, though requests that run wait for one. A missing draft changes nothing, because it only makes answers
slower.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from gateway.sessions.peer import ModelInfo, ServicePeer
from outrider.errors import OutriderError, PeerLost
from outrider.rpc.channels import (
    HEALTH_LOOK_S,
)

# Links and breakers change with time and in several places, so who waits for them looks now and then.
LOOK_S = 0.02

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Need:
    """Needs of a session: the weights with which it began, and room for its longest sequence."""

    model_hash: str
    max_len: int
    grammar_engine: str = ""
    """Compiler of its grammar; empty for a session without one."""

    def met_by(self, info: ModelInfo) -> bool:
        is_engine = self.grammar_engine in {"", info.grammar_engine}
        return (
            is_engine and info.model_hash == self.model_hash and self.max_len <= min(info.context_len, info.kv_tokens)
        )


class Replicas:
    """Links of one role, one or more."""

    def __init__(self, peers: Sequence[ServicePeer]) -> None:
        self.peers = tuple(peers)

    def __str__(self) -> str:
        if len(self.peers) == 1:
            return str(self.peers[0])
        return f"The {self.peers[0].role} services at {', '.join(peer.address for peer in self.peers)}"

    @property
    def info(self) -> ModelInfo | None:
        """Facts of the first present service that takes new requests; None while all are away."""
        return next((peer.info for peer in self.peers if self.fits(peer)), None)

    def fits(self, peer: ServicePeer) -> bool:
        """Whether new requests may go there."""
        return peer.info is not None

    @property
    def left_out(self) -> list[str]:
        """About those that are there and get no new requests, a sentence each."""
        return []

    @property
    def mismatch(self) -> OutriderError | None:
        """Reason why the first service that answered but does not fit is not used."""
        return next((peer.mismatch for peer in self.peers if peer.mismatch is not None), None)

    @property
    def state(self) -> Literal["present", "absent", "misfit"]:
        """Whether one is there that fits, none, or none that fits."""
        if self.info is not None:
            return "present"
        return "absent" if self.mismatch is None else "misfit"

    @property
    def refusal(self) -> OutriderError | None:
        """Reason why there is no connection to the first service that is there and takes none."""
        return next((peer.refusal for peer in self.peers if peer.refusal is not None), None)

    def present(self) -> ModelInfo:
        """Facts like those of `info`; raises PeerLost while all are away, or the reason why none fits."""
        if self.info is None:
            raise (self.mismatch or self.lost()).with_traceback(None)
        return self.info

    def lost(self) -> PeerLost:
        """Error that all are away, with the first reason that an operator has to mend."""
        reason = "" if self.refusal is None else f": {self.refusal.message}"
        return PeerLost(f"{self} cannot be reached{reason}", address=self.peers[0].address)

    def pick(self, session: object, need: Need | None = None, failed: ServicePeer | None = None) -> ServicePeer | None:
        """The first link that is present, meets the need, and is not blocked for the session by its breaker.

        The one that has just failed comes last: a service whose device hangs still answers a handshake.
        """
        peers = sorted(self._meeting(need), key=lambda peer: peer is failed)
        return next((peer for peer in peers if not peer.breaker.blocks(session)), None)

    async def wait(self, session: object, need: Need, until_s: float, failed: ServicePeer | None = None) -> ServicePeer:
        """Waits for the link that `pick` finds, at most until the loop's clock says so; raises PeerLost then."""
        loop = asyncio.get_running_loop()
        while (peer := self.pick(session, need, failed)) is None:
            if loop.time() >= until_s:
                raise self._reason(need)
            await asyncio.sleep(LOOK_S)
        return peer

    async def settled(self, timeout_s: float) -> bool:
        """Waits until a service has answered, fitting or not; returns whether one did in time."""
        waits = {asyncio.create_task(peer.settled(timeout_s)) for peer in self.peers}
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
        """Facts like those of `present`, after a little wait for handshakes that are under way."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            if self.info or all(peer.mismatch for peer in self.peers) or loop.time() >= until_s:
                return self.present()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self.peers))

    def _meeting(self, need: Need | None) -> list[ServicePeer]:
        return [peer for peer in self.peers if peer.info and (need is None or need.met_by(peer.info))]

    def _reason(self, need: Need) -> PeerLost:
        """Reason why there is none: all are away, none has the same weights, or room, or those that have hang."""
        if not any(peer.info for peer in self.peers):
            return self.lost()
        if not any(peer.info and peer.info.model_hash == need.model_hash for peer in self.peers):
            return PeerLost(f"{self}: none has the model with which the request began", model_hash=need.model_hash)
        if not self._meeting(need):
            return PeerLost(f"{self}: none has room for the {need.max_len} tokens of the request", max_len=need.max_len)
        return PeerLost(f"{self} does not answer requests", address=self.peers[0].address)


class Targets(Replicas):
    """Replicas of one model, that of the first in the list which has been there, as it was then.

    So what a seed says does not change when that one is gone. When it comes back with other weights, these count: it
    was replaced by who names it first. Requests that run go on wherever their own weights are.
    """

    @property
    def mismatch(self) -> OutriderError | None:
        """Mismatch of any replicas, and that those which are there have other weights."""
        strangers = self.left_out
        if strangers and self.info is None:
            return PeerLost(f"{self._first} cannot be reached, and {'; '.join(strangers)}", address=self._first.address)
        return super().mismatch

    @property
    def left_out(self) -> list[str]:
        """Sentences about the replicas with other weights."""
        wanted = self._first.model_hash
        return [
            f"{peer} has other weights, with which no request begins (model hash {peer.info.model_hash}, not {wanted})"
            for peer in self.peers
            if peer.info is not None and not self.fits(peer)
        ]

    def fits(self, peer: ServicePeer) -> bool:
        """Whether it has the weights of the first one."""
        return peer.info is not None and peer.info.model_hash == self._first.model_hash

    async def tell_left_out(self) -> None:
        """Logs which of them are left out, when that changes; for ever."""
        told: list[str] = []
        while True:
            found = self.left_out
            for sentence in found:
                if sentence not in told:
                    log.warning("target left out", reason=sentence)
            told = found
            await asyncio.sleep(HEALTH_LOOK_S)

    @property
    def _first(self) -> ServicePeer:
        return next((peer for peer in self.peers if peer.model_hash), self.peers[0])
