"""The services of one role: which of them fit, and which a session goes to.

Which there are may change while the gateway runs; see `discovery`. Replicas share the sessions, each where it costs the
least; see `placement`. A gateway without any target takes no new clients, though requests that run wait for one. A
missing draft changes nothing, because it only makes answers slower.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import structlog

from gateway.sessions.peer import ModelInfo, Rollbacks, ServicePeer
from gateway.sessions.placement import (
    NO_PREFIX,
    NO_WISH,
    USUAL_OUTPUT,
    MovedFor,
    PlacedFor,
    Placement,
    PlaceWish,
    PrefixHits,
    PromptPrefix,
    choose,
)
from gateway.sessions.room import LOOK_S, PlacesFound, RoomLine
from outrider.errors import OutriderError, PeerLost
from outrider.estimates.row_costs import Average
from outrider.grammar import ENGINE
from outrider.parameters import SessionSpec
from outrider.rpc.channels import HEALTH_LOOK_S

STOPPING = "is stopping, and takes no new requests"
NONE_ALIKE = "none has the model with which the request began"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Need:
    """Needs of a session: the weights with which it began, and room for its longest sequence."""

    model_hash: str
    max_len: int
    grammar_engine: str = ""
    """Compiler of its grammar; empty for a session without one."""
    numerics_id: str = ""
    """The numerics that it keeps; empty where it may go on with others."""

    def met_by(self, info: ModelInfo) -> bool:
        is_alike = self.grammar_engine in {"", info.grammar_engine} and self.numerics_id in {"", info.numerics_id}
        return is_alike and info.model_hash == self.model_hash and self.max_len <= min(info.context_len, info.kv_tokens)


def need_of(spec: SessionSpec, model_hash: str) -> Need:
    """The need of a session that began with such weights."""
    return Need(model_hash, spec.max_len, ENGINE if spec.grammar else "")


def wish_of(spec: SessionSpec, length: int, output: Average, prefix: PromptPrefix, numerics_id: str = "") -> PlaceWish:
    """The wish of a session that has so many tokens now, where answers have so many."""
    return PlaceWish(length, min(output.mean or USUAL_OUTPUT, spec.max_len - length), prefix, numerics_id)


class WeightsGone(Exception):
    """No target has the weights of a request any more, but there are others, and it need not stay with its own."""


def _have_others(peers: Sequence[ServicePeer], need: Need) -> bool:
    """Whether there are targets, and all have other weights than a session needs."""
    return bool(peers) and all(peer.info is None or peer.info.model_hash != need.model_hash for peer in peers)


@dataclass(slots=True)
class Placing:
    """Where the sessions of one request go, which share what is cached of it."""

    model_hash: str
    """The weights with which the request began; no others go on with it."""
    prefix: PromptPrefix = NO_PREFIX
    numerics_id: str = ""
    """Numerics that are wanted; empty for any."""
    peer: ServicePeer | None = None
    """The place of the first one."""
    priority: int = 0
    """Where no place has room the smallest comes first."""
    has_begun: bool = False
    """Whether something of its answer is there, so that what follows has the same weights."""
    is_bound: bool = True
    """Whether it stays with its weights: it has several sessions, or has begun, or others cannot serve it."""


class LinkSet:
    """Links of one role, which come and go."""

    def __init__(self, peers: Sequence[ServicePeer], role: str = "", places: str = "") -> None:
        """Takes one link or more; or none, with the role, and words that say where its services are looked for."""
        self.rollbacks = Rollbacks()
        """Calls on all links that there ever were."""
        self.peers: tuple[ServicePeer, ...] = ()
        """Links to services that get new sessions."""
        self.leaving: tuple[ServicePeer, ...] = ()
        """Links that get none, and stay until the sessions that they carry have ended."""
        self.brought_by: Mapping[str, str] = {}
        """The place that is looked up or read, by each address that it has."""
        self.change(peers)
        self.role = peers[0].role if peers else role
        self._places = places
        self._closing: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        if len(self.peers) == 1:
            return str(self.peers[0])
        return f"The {self.role} services at {', '.join(peer.address for peer in self.peers) or self._places}"

    @property
    def links(self) -> tuple[ServicePeer, ...]:
        """All links, those that leave last; from any thread."""
        return tuple(dict.fromkeys((*self.peers, *self.leaving)))

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins what keeps the links those that there should be, until `close`."""
        self._following = asyncio.create_task(work, name=f"{self.role} addresses")

    def change(self, peers: Sequence[ServicePeer]) -> None:
        """New sessions get these links alone, which may have been there before; the others leave."""
        before, self.peers = self.links, tuple(peers)
        self.leaving = tuple(peer for peer in before if peer not in peers)
        for peer in peers:
            peer.rollbacks = self.rollbacks

    def see_off(self) -> None:
        """Closes the links that leave and carry no session any more."""
        for peer in [peer for peer in self.leaving if not peer.has_sessions]:
            self.leaving = tuple(each for each in self.leaving if each is not peer)
            closing = asyncio.create_task(peer.close(), name=f"{self.role} link closing")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await asyncio.gather(*(peer.close() for peer in self.links), *self._closing)

    @property
    def address(self) -> str:
        """Address of the first, or where it is looked for."""
        return self.peers[0].address if self.peers else self._places


class Replicas(LinkSet):
    """Services of one role that share the sessions and stand in for each other."""

    def __init__(self, peers: Sequence[ServicePeer], role: str = "", places: str = "") -> None:
        super().__init__(peers, role, places)
        self.placements = Counter(dict.fromkeys(PlacedFor, 0))
        """How often sessions were given a place, by the reason for it."""
        self.moves = Counter(dict.fromkeys(MovedFor, 0))
        """How often sessions that ran went on elsewhere, though nothing had failed."""
        self.output = Average()
        """Tokens of a session's answer."""
        self.prefix_hits = PrefixHits()
        # One that hangs is open to none but the session on trial there, which stands in no line.
        self.room = RoomLine(lambda: sum(not peer.breaker.blocks(self) for peer in self._meeting(None)))
        """New sessions for which none has room."""
        self.suspect_turn = asyncio.Lock()
        """Held by a session that is read again, because its place ended while it read that."""
        self.move_room = RoomLine(lambda: len(self._meeting(None)))
        """Running sessions that are to leave their place."""

    @property
    def info(self) -> ModelInfo | None:
        """Facts of the first present service that takes new requests; None while all are away."""
        return next((peer.info for peer in self.peers if self.fits(peer)), None)

    def fits(self, peer: ServicePeer) -> bool:
        """Whether new requests may go there."""
        return peer.info is not None and not peer.is_draining

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
        """Error that all are away or about to end, with the first reason that an operator has to mend."""
        if any(peer.info and peer.is_draining for peer in self.peers):
            return PeerLost(f"{self} {STOPPING}", address=self.peers[0].address)
        reason = "" if self.refusal is None else f": {self.refusal.message}"
        return PeerLost(f"{self} cannot be reached{reason}", address=self.address)

    def takes(self, peer: ServicePeer, session: object, need: Need | None = None) -> bool:
        """Whether a session may go to a link."""
        return peer in self._meeting(need) and not peer.breaker.blocks(session)

    def pick(
        self,
        session: object,
        need: Need | None = None,
        failed: ServicePeer | None = None,
        wish: PlaceWish = NO_WISH,
        *,
        counts: bool = False,
    ) -> ServicePeer | None:
        """The best place for a session among links that are present, meet the need, and that no breaker keeps from it.

        The one that has just failed comes last: a service whose device hangs still answers a handshake. It `counts`
        where the session goes there at once.
        """
        found = self._look(session, need, failed, wish)
        if counts and found.placement is not None:
            self._count(found.placement)
        return found.peer

    async def place(self, placing: Placing, need: Need, wish: PlaceWish) -> None:
        """Gives a request the place that `pick` finds; where none of several has room, after those that came before."""
        if len(self.peers) < 2:
            placing.peer = self.pick(placing, need, wish=wish, counts=True)
            return

        def look(held: Set[str]) -> PlacesFound:
            # Other samples of it may have found one meanwhile.
            if placing.peer is not None and self.takes(placing.peer, placing, need):
                address = placing.peer.address
                return PlacesFound({address: placing.peer}, Placement(address, PlacedFor.ONLY))
            return self._look(placing, need, None, wish, held)

        seeker = await self.room.turn(placing.priority, look)
        found = seeker.found
        if found is not None and found.placement is not None and found.peer is not placing.peer:
            placing.peer = found.peer
            reason = PlacedFor.LATE if seeker.is_late else found.placement.reason
            self._count(replace(found.placement, reason=reason))

    async def place_to_move(self, session: object, need: Need, wish: PlaceWish) -> ServicePeer | None:
        """A place for a running session that leaves its own, after those that came before; None where none is open.

        So prompts of a second or so wait at one place, as for new sessions.
        """
        seeker = await self.move_room.turn(0, lambda held: self._look(session, need, None, wish, held))
        return seeker.found.peer if seeker.found is not None else None

    def _look(
        self,
        session: object,
        need: Need | None,
        failed: ServicePeer | None,
        wish: PlaceWish,
        held: Set[str] = frozenset(),
    ) -> PlacesFound:
        """The places that are open to a session, and the best but those that are held for others."""
        peers = {peer.address: peer for peer in self._meeting(need) if not peer.breaker.blocks(session)}
        free = [peer for address, peer in peers.items() if address not in held]
        return PlacesFound(peers, choose([peer.figures(wish, has_failed=peer is failed) for peer in free], wish))

    def _count(self, placement: Placement) -> None:
        self.placements[placement.reason] += 1
        log.debug("session placed", place=str(placement))

    async def wait(
        self,
        session: object,
        need: Need,
        until_s: float,
        failed: ServicePeer | None = None,
        wish: PlaceWish = NO_WISH,
        *,
        placing: Placing,
    ) -> ServicePeer:
        """Waits for the link that `pick` finds, at most until the loop's clock says so; raises PeerLost then.

        Raises WeightsGone at once for a request that need not stay with its weights.
        """
        loop = asyncio.get_running_loop()
        while (peer := self.pick(session, need, failed, wish, counts=True)) is None:
            if not placing.is_bound and _have_others(self._meeting(None), need):
                raise WeightsGone
            if loop.time() >= until_s:
                raise self._reason(need)
            await asyncio.sleep(LOOK_S)
        return peer

    async def settled(self, timeout_s: float) -> bool:
        """Waits until a service has answered, fitting or not; returns whether one did in time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while not any(peer.is_settled for peer in self.peers):
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def after_handshake(self, timeout_s: float) -> ModelInfo:
        """Facts like those of `present`, after a little wait for handshakes that are under way."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            is_hopeless = bool(self.peers) and all(peer.mismatch for peer in self.peers)
            if self.info or is_hopeless or loop.time() >= until_s:
                return self.present()
            await asyncio.sleep(LOOK_S)

    def _meeting(self, need: Need | None) -> list[ServicePeer]:
        present = [(peer, peer.info) for peer in self.peers if not peer.is_draining]
        return [peer for peer, info in present if info and (need is None or need.met_by(info))]

    def _reason(self, need: Need) -> PeerLost:
        """Reason why there is none: all are away, none has the same weights, or room, or those that have hang."""
        if not self._meeting(None):
            return self.lost()
        if _have_others(self._meeting(None), need):
            return PeerLost(f"{self}: {NONE_ALIKE}", model_hash=need.model_hash)
        if not self._meeting(need):
            return PeerLost(f"{self}: none has room for the {need.max_len} tokens of the request", max_len=need.max_len)
        return PeerLost(f"{self} does not answer requests", address=self.address)


class Targets(Replicas):
    """Replicas of one model, that of the first in the list which has been there, as it was then.

    So what a seed says does not change when that one is away. When it comes back with other weights, these count: it
    was replaced by who names it first. When it has left the list, those of the next one do. Requests that run go on
    wherever their own weights are.

    What a name or a file brings is replaced one by one while it serves. So where one brings the first of the list, the
    weights of all that it brings count, and a request begins with those of the place that costs it least.
    """

    @property
    def mismatch(self) -> OutriderError | None:
        """Mismatch of any replicas, and that those which are there have other weights."""
        strangers, first = self._strangers, self._first
        if strangers and first is not None and self.info is None:
            return PeerLost(f"{first} cannot be reached, and {'; '.join(strangers)}", address=first.address)
        return super().mismatch

    @property
    def left_out(self) -> list[str]:
        """Sentences about the replicas with other weights, and those that are about to end."""
        return [*self._strangers, *(f"{peer} {STOPPING}" for peer in self.peers if peer.info and peer.is_draining)]

    @property
    def _strangers(self) -> list[str]:
        wanted = self._first.model_hash if self._first is not None else ""
        return [
            f"{peer} has other weights, with which no request begins (model hash {peer.info.model_hash}, not {wanted})"
            for peer in self.peers
            if peer.info is not None and not self._counts(peer)
        ]

    def fits(self, peer: ServicePeer) -> bool:
        """Whether it has weights that count, and takes requests."""
        return super().fits(peer) and self._counts(peer)

    def info_of(self, model_hash: str) -> ModelInfo:
        """Facts of a target that is there with such weights; raises PeerLost while there is none."""
        for peer in self.peers:
            if peer.info is not None and peer.info.model_hash == model_hash:
                return peer.info
        raise PeerLost(f"{self}: {NONE_ALIKE}", model_hash=model_hash)

    def weights_for(self, placing: Placing, need: Need, wish: PlaceWish) -> ModelInfo | None:
        """Facts of a target whose weights a request should begin with, whichever it needed so far: of the cheapest
        place where several count. None where none is open to it.
        """
        found = [(peer, peer.info) for peer in self.peers if self.fits(peer) and not peer.breaker.blocks(placing)]
        open_to = [
            (peer, info) for peer, info in found if info and replace(need, model_hash=info.model_hash).met_by(info)
        ]
        placement = None
        if len({info.model_hash for _, info in open_to}) > 1:
            placement = choose([peer.figures(wish) for peer, _ in open_to], wish)
        return next((info for peer, info in open_to if placement is None or peer.address == placement.address), None)

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

    def _counts(self, peer: ServicePeer) -> bool:
        """Whether new requests may begin with its weights."""
        first = self._first
        if first is None or peer.model_hash == first.model_hash:
            return first is not None
        place = self.brought_by.get(first.address)
        return place is not None and place == self.brought_by.get(peer.address)

    @property
    def _first(self) -> ServicePeer | None:
        return next((peer for peer in self.peers if peer.model_hash), next(iter(self.peers), None))
