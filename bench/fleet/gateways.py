"""Gateways of a simulated fleet: what each knows of its targets, in the real books, and ways to choose among them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.fleet.clock import VirtualClock
from bench.fleet.targets import SimulatedTarget, TargetJob, TargetLink
from bench.fleet.texts import TalkTurn
from bench.policy.devices import CostModel
from gateway.rounds.target_costs import TargetCosts
from gateway.rounds.tuning import TUNING
from gateway.sessions.peer import LOAD_S
from gateway.sessions.placement import (
    USUAL_OUTPUT,
    LinkBook,
    LinkFigures,
    PlaceWish,
    choose,
)
from outrider.estimates.prefixes import BLOCK_TOKENS, PrefixNews
from outrider.estimates.row_costs import Average
from outrider.estimates.timing import ServiceLoad

LOOK_S = 0.02
ROWS = (1, 16, 64, 256, 512)


@dataclass(slots=True, eq=False)
class TurnRequest:
    """A turn on its way through a gateway."""

    turn: TalkTurn
    came_s: float
    session_id: bytes
    first_s: float | None = None
    ended_s: float | None = None
    num_opens: int = 0


@dataclass(slots=True, eq=False)
class KnownPlace:
    """What a gateway knows of one target."""

    link: TargetLink
    book: LinkBook
    requests: dict[bytes, TurnRequest] = field(default_factory=dict)
    said: ServiceLoad | None = None
    heard_s: float = 0.0
    others: int = 0
    """Sessions of other gateways there."""
    is_draining: bool = False

    @property
    def target(self) -> SimulatedTarget:
        return self.link.target


class SimulatedGateway:
    """One gateway, that hears nothing of others but what targets say."""

    def __init__(self, number: int, clock: VirtualClock, policy: "Policy", cost_us: CostModel) -> None:
        self.clock = clock
        self.places: dict[TargetLink, KnownPlace] = {}
        self.line: list[TurnRequest] = []
        """Requests for which there is no place."""
        self.output = Average()
        self.on_open: Callable[[SimulatedGateway, KnownPlace, TurnRequest], object] = lambda *_: None
        self.on_end: Callable[[TurnRequest], object] = lambda _: None
        self.turn = number
        self.dice = random.Random(number)
        self._policy = policy
        self._cost_us = cost_us

    def meet(self, link: TargetLink) -> None:
        """A handshake with a target."""
        book = LinkBook(self.clock.now_s, link.target.cache.num_blocks * BLOCK_TOKENS, BLOCK_TOKENS)
        book.costs = TargetCosts(TUNING)
        book.costs.verify_us.begin({rows: self._cost_us(rows) for rows in ROWS})
        book.costs.tokens.add(1.0)
        self.places[link] = KnownPlace(link, book)

    def take(self, request: TurnRequest) -> None:
        """A request comes, or comes back."""
        place = self._policy(self, [each for each in self.places.values() if not each.is_draining], request)
        if place is None:
            if not self.line:
                self.clock.after(LOOK_S, self._look)
            self.line.append(request)
            return
        self.on_open(self, place, request)
        turn, link = request.turn, place.link
        request.num_opens += 1
        place.book.opened(request.session_id, turn.length, turn.prompt)
        place.requests[request.session_id] = request
        job = TargetJob(request.session_id, turn.prompt, turn.whole, turn.length, turn.end, link)
        link.up.send(lambda: link.target.open(job))

    def leave(self, place: KnownPlace, session_id: bytes) -> None:
        """A client has left."""
        request = place.requests.pop(session_id)
        place.book.closed(session_id)
        place.link.up.send(lambda: place.target.close(session_id))
        self.on_end(request)

    def heard(self, link: TargetLink, load: ServiceLoad, session_count: int, news: PrefixNews | None) -> None:
        place = self.places[link]
        if news is not None:
            place.book.hear(news)
        place.said, place.heard_s, place.is_draining = load, self.clock.now_s, load.is_draining
        place.others = max(0, session_count - len(place.requests))

    def answered(self, link: TargetLink, session_id: bytes, found: int, compute_us: int) -> None:
        place = self.places[link]
        request = place.requests.get(session_id)
        if request is not None:
            request.first_s = self.clock.now_s if request.first_s is None else request.first_s
            place.book.answered(session_id, request.turn.length, found, compute_us)

    def ended(self, link: TargetLink, session_id: bytes) -> None:
        place = self.places[link]
        request = place.requests.pop(session_id, None)
        if request is not None:
            turn = request.turn
            place.book.closed(session_id, turn.tokens[: turn.end])
            self.output.add(turn.output)
            request.ended_s = self.clock.now_s
            self.on_end(request)

    def refused(self, link: TargetLink, session_id: bytes) -> None:
        """The target drains."""
        place = self.places[link]
        place.is_draining = True
        place.book.closed(session_id)
        if (request := place.requests.pop(session_id, None)) is not None:
            self.take(request)

    def lost(self, link: TargetLink) -> None:
        """The target is gone: its sessions go elsewhere."""
        place = self.places.pop(link)
        for request in place.requests.values():
            self.take(request)

    def figures(self, place: KnownPlace, wish: PlaceWish) -> LinkFigures:
        """What is known of a place, as the gateway's peers put it together."""
        is_recent = place.said is not None and self.clock.now_s - place.heard_s <= LOAD_S
        found = place.book.figures(place.target.address, wish, self.clock.now_s, place.others if is_recent else 0)
        if place.said is None or not is_recent:
            return found
        return found.heard(place.said, place.target.cache.num_blocks * BLOCK_TOKENS, BLOCK_TOKENS)

    def wish_of(self, request: TurnRequest) -> PlaceWish:
        turn = request.turn
        return PlaceWish(turn.length, self.output.mean or USUAL_OUTPUT, turn.prompt)

    def _look(self) -> None:
        line, self.line = self.line, []
        for request in line:
            self.take(request)


Policy = Callable[[SimulatedGateway, Sequence[KnownPlace], TurnRequest], KnownPlace | None]


def by_cost(gateway: SimulatedGateway, places: Sequence[KnownPlace], request: TurnRequest) -> KnownPlace | None:
    """The gateway's own choice."""
    wish = gateway.wish_of(request)
    return _chosen([(place, gateway.figures(place, wish)) for place in places], wish)


def by_chance(gateway: SimulatedGateway, places: Sequence[KnownPlace], _: TurnRequest) -> KnownPlace | None:
    return gateway.dice.choice(places) if places else None


def by_turns(gateway: SimulatedGateway, places: Sequence[KnownPlace], _: TurnRequest) -> KnownPlace | None:
    gateway.turn += 1
    return places[gateway.turn % len(places)] if places else None


def by_sessions(gateway: SimulatedGateway, places: Sequence[KnownPlace], _: TurnRequest) -> KnownPlace | None:
    """The place with the least sessions, as far as the gateway knows; by chance among equal ones."""
    return min(places, key=lambda each: (len(each.requests) + each.others, gateway.dice.random()), default=None)


def by_oracle(_: SimulatedGateway, places: Sequence[KnownPlace], request: TurnRequest) -> KnownPlace | None:
    """The place where the first token comes first, by the caches and queues of all targets as they are."""
    turn = request.turn
    blocks = turn.prompt.names[: (turn.length - 1) // BLOCK_TOKENS]

    def wait(place: KnownPlace) -> tuple[int, int]:
        target = place.target
        own = sum(job.unread for job in place.link.waiting) + turn.length
        own -= BLOCK_TOKENS * target.cache.hit_blocks(blocks)
        others = [sum(job.unread for job in each.waiting) for each in target.links if each is not place.link]
        return (own + sum(min(own, each) for each in others)) // BLOCK_TOKENS, len(target.jobs)

    return min((each for each in places if not each.target.is_draining), key=wait, default=None)


POLICIES: dict[str, tuple[Policy, bool]] = {
    "random": (by_chance, False),
    "round robin": (by_turns, False),
    "least sessions": (by_sessions, False),
    "ours, caches guessed": (by_cost, False),
    "ours": (by_cost, True),
    "oracle": (by_oracle, False),
}
"""Ways to choose, and whether targets say what is in their caches."""


def _chosen(known: Sequence[tuple[KnownPlace, LinkFigures]], wish: PlaceWish) -> KnownPlace | None:
    placement = choose([figures for _, figures in known], wish)
    return next((place for place, each in known if placement and each.address == placement.address), None)
