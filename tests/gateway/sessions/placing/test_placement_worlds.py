"""The real choice and the real books of gateways in simulated worlds: targets that come, drain and go, and full caches.

Messages come late but in order, so that they cross. The same few hundred worlds every time; OUTRIDER_FENCING_EXAMPLES
asks for more. Targets, time and messages are those of bench.fleet.
"""

import os
import random
from array import array
from dataclasses import replace
from functools import partial

import pytest
from simulation.invariants import Broken, hold

from bench.fleet.gateways import KnownPlace, SimulatedGateway, TurnRequest, by_cost
from bench.fleet.simulated import SimulatedFleet, h100_8b
from bench.fleet.targets import MAX_ROWS, SimulatedTarget
from bench.fleet.texts import TalkTurn
from gateway.sessions import placement
from gateway.sessions.placement import KEY_BLOCKS, LinkBook, PromptPrefix
from outrider.estimates.prefixes import BLOCK_TOKENS

USUAL_WORLDS = 40
WORLDS = int(os.environ.get("OUTRIDER_FENCING_EXAMPLES", USUAL_WORLDS))
PLANTED_WORLDS = 40
LAST_S, LONG_S, QUIET_S = 4.0, 600.0, 2.5
BEGUN = PromptPrefix(b"", (b"salt",))


class PlacedWorld:
    """A world of one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        slowest_s = dice.choice([0.0005, 0.01, 0.04])
        self.fleet = SimulatedFleet(
            dice.randint(1, 4),
            dice.randint(1, 3),
            by_cost,
            dice.choice([40, 120, 1_000]),
            pushes=True,
            delay_s=lambda: dice.uniform(0.0001, slowest_s),
        )
        self.clock = self.fleet.clock
        self.gone = 0
        beginnings = [self._text(BLOCK_TOKENS * dice.randint(1, 12)) for _ in range(4)]
        self.requests = [self._request(number, beginnings) for number in range(dice.randint(10, 80))]
        for gateway in self.fleet.gateways:
            gateway.on_open = self._check_choice
        for request in self.requests:
            gateway = dice.choice(self.fleet.gateways)
            self.clock.at(request.came_s, partial(gateway.take, request))
            if dice.random() < 0.1:
                self.clock.at(request.came_s + dice.uniform(0, 0.5), partial(self._leave, gateway, request))
        for _ in range(dice.randint(0, 5)):
            event = dice.choice([self.fleet.join, self._drain, self._lose])
            self.clock.at(dice.uniform(0, LAST_S), event)

    def live(self) -> None:
        """Everything, until it is quiet; raises Broken where an invariant does not hold."""
        self.clock.at(LAST_S, self._join_if_none)
        while any(each.ended_s is None for each in self.requests):
            hold(self.clock.step() and self.clock.now_s < LONG_S, "a request has no end")
        quiet_s = self.clock.now_s + QUIET_S
        while self.clock.now_s < quiet_s:
            self.clock.step()
        for target in self._live_ones():
            hold(not target.jobs and not target.cache.holders and not target.cache.num_own, "a session is left")
            for link in target.links:
                self._check_index(self.fleet.gateways[target.links.index(link)].places[link])

    def _live_ones(self) -> list[SimulatedTarget]:
        return [each for each in self.fleet.targets if not each.is_lost]

    def _check_choice(self, _: SimulatedGateway, place: KnownPlace, request: TurnRequest) -> None:
        """A session is on one live target, and does not wait long while another target has nothing to do."""
        holders = [each.address for each in self._live_ones() if request.session_id in each.jobs]
        hold(not holders, f"a session goes to {place.target.address} and is at {holders}")
        hold(not place.is_draining, f"a session goes to {place.target.address}, which drains")
        idle = [
            each
            for each in self.fleet.gateways[0].places.values()
            if len(self.fleet.gateways) == 1 and not each.requests and not each.is_draining
        ]
        unread = sum(self._unread(place, each) for each in place.requests.values() if each.first_s is None)
        step_s = h100_8b()(MAX_ROWS) / 1e6
        steps, idle_steps = unread / MAX_ROWS, -(-request.turn.length // MAX_ROWS)
        if idle and steps > 3 * (idle_steps + 1):
            raise Broken(f"a session waits {steps * step_s:.3f} s at {place.target.address} while others are idle")

    def _unread(self, place: KnownPlace, request: TurnRequest) -> int:
        """Tokens of a prompt that a target has yet to read, also where it has not come there yet."""
        job = place.target.jobs.get(request.session_id)
        hit_len = BLOCK_TOKENS * place.target.cache.hit_blocks(request.turn.prompt.names)
        return job.unread if job is not None else max(0, request.turn.length - hit_len)

    def _check_index(self, place: KnownPlace) -> None:
        """In quiet times a gateway knows what of any text is in a target's cache."""
        for request in self.requests:
            for prefix in (request.turn.prompt, request.turn.whole):
                found = BLOCK_TOKENS * place.target.cache.hit_blocks(prefix.names)
                expected = place.book.hit_len(prefix)
                hold(expected == found, f"{expected} tokens are expected, and {found} are there")

    def _leave(self, gateway: SimulatedGateway, request: TurnRequest) -> None:
        place = next((each for each in gateway.places.values() if request.session_id in each.requests), None)
        if place is not None:
            gateway.leave(place, request.session_id)
            request.ended_s = self.clock.now_s

    def _drain(self) -> None:
        target = self.dice.choice(self.fleet.targets)
        if not target.is_lost and not target.is_draining:
            target.drain()
            self.clock.after(self.dice.uniform(0.05, 3.0), partial(self._lose_one, target))

    def _lose(self) -> None:
        self._lose_one(self.dice.choice(self.fleet.targets))

    def _lose_one(self, target: SimulatedTarget) -> None:
        if not target.is_lost:
            self.fleet.lose(target)
            self._join_if_none()

    def _join_if_none(self) -> None:
        if all(each.is_draining for each in self._live_ones()):
            self.fleet.join()

    def _request(self, number: int, beginnings: list["array[int]"]) -> TurnRequest:
        dice = self.dice
        tokens = array("q", dice.choice(beginnings)) if dice.random() < 0.7 else array("q")
        tokens += self._text(dice.randint(1, 900))
        length = len(tokens)
        tokens += self._text(dice.randint(1, 200))
        prompt = BEGUN.grown(tokens[:length])
        prompt = replace(prompt, key=prompt.chain[: KEY_BLOCKS + 1][-1])
        at_s = dice.choice([0.0, 0.5, dice.uniform(0, LAST_S)])
        turn = TalkTurn(number, at_s, prompt, prompt.grown(tokens), tokens, length, len(tokens), None)
        return TurnRequest(turn, at_s, number.to_bytes(8))

    def _text(self, count: int) -> "array[int]":
        return array("q", self.dice.choices(range(1 << 15), k=count))


def test_worlds_of_targets_that_come_and_go() -> None:
    """Every request ends, none waits long beside an idle target, and gateways know what is cached when it is quiet."""
    for seed in range(WORLDS):
        try:
            PlacedWorld(seed).live()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


PLANTS = {
    "who waits does not count": (placement, "costs_us", lambda places, _: [1e6 * each for each in range(len(places))]),
    "what was sent stays, whatever the target says": (LinkBook, "_settle", lambda self, number, prefix: None),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_of_a_choice_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that breaks its invariants does not go unnoticed for long."""
    monkeypatch.setattr(*PLANTS[plant])

    def search() -> None:
        for seed in range(PLANTED_WORLDS):
            PlacedWorld(seed).live()

    with pytest.raises(Broken):
        search()
